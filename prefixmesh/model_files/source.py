"""From what a user calls a model (a known name, a folder, a file) to the files it consists of."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.pull import KNOWN_MODELS, Progress, pull

ModelKind = Literal["hf", "gguf"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine's disk."""

    name: str
    """What the model is served as: the known name, or the folder's or file's own."""

    path: Path
    """The folder (``hf``) or the file (``gguf``), absolute."""

    kind: ModelKind


def resolve_model(name_or_path: str, progress: Progress | None = None) -> ModelFiles:
    """Find a model's files; a known model that is missing is fetched first (``pull``), and ``progress`` is told.

    Raises ModelFileError when there is no such model, or what is there is neither a Hugging Face folder nor a GGUF file.
    """
    if name_or_path in KNOWN_MODELS:
        return ModelFiles(name_or_path, pull(name_or_path, progress), "gguf")
    if not name_or_path:
        raise ModelFileError("the model's name or path must not be empty")
    path = Path(name_or_path).expanduser().absolute()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelFileError(f"{path} is not a Hugging Face model folder: it has no config.json")
        return ModelFiles(path.resolve().name, path, "hf")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelFileError(f"{path} is not a model: a *.gguf file or a Hugging Face folder is needed")
        return ModelFiles(path.stem, path, "gguf")
    known = ", ".join(sorted(KNOWN_MODELS))
    raise ModelFileError(
        f"{name_or_path!r} is neither a file or folder here nor a known model (known: {known})"
    )
