"""Weights of a Hugging Face folder: ``model.safetensors``, or shards named by ``model.safetensors.index.json``.

Safetensors only: a pickle can run code when it is loaded. Each tensor's file is opened for that tensor alone, so that no
more of it stays mapped than what is being copied.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.model_config import read_json_object
from prefixmesh.worker.model.tensor_source import row_pieces

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
FLOAT_DTYPES: Final = ("F64", "F32", "F16", "BF16")

_DERIVED: Final = ".rotary_emb.inv_freq"
"""A constant that old checkpoints carry; it follows from the configuration."""


class HfTensors:
    """The tensors of one Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for path in self._paths():
            self._index(path)
        self._check_index()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor by name."""
        return self._shapes

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy a tensor into ``out``; ModelFileError naming it when it is not of a float type or cannot be read."""
        path = self._files[name]
        if self._dtypes[name] not in FLOAT_DTYPES:
            raise ModelFileError(f"{path}: tensor {name} is stored as {self._dtypes[name]}, not as floats")
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_slice(name)
                for start, end in row_pieces(self._shapes[name]):
                    out[start:end].copy_(tensor[start:end])
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"cannot read tensor {name} of {path}: {error}") from error

    def _paths(self) -> list[Path]:
        index = self._folder / INDEX_FILE
        if not index.is_file():
            return [self._folder / SINGLE_FILE]
        names = self._weight_map().values()
        if any(Path(name).name != name for name in names):
            raise ModelFileError(f"{index} names a shard outside its folder")
        return [self._folder / name for name in sorted(set(names))]

    def _weight_map(self) -> dict[str, str]:
        path = self._folder / INDEX_FILE
        weight_map = read_json_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
            raise ModelFileError(f"{path}: weight_map must name a file for each tensor")
        return weight_map

    def _index(self, path: Path) -> None:
        if not path.is_file():
            raise ModelFileError(f"{path} is missing (weights are read from safetensors files only)")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name.endswith(_DERIVED):
                        continue
                    if name in self._files:
                        raise ModelFileError(f"tensor {name} is in {path} and in {self._files[name]}")
                    view = file.get_slice(name)
                    self._files[name] = path
                    self._shapes[name] = tuple(view.get_shape())
                    self._dtypes[name] = view.get_dtype()
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"cannot read {path}: {error}") from error

    def _check_index(self) -> None:
        if not (self._folder / INDEX_FILE).is_file():
            return
        for name, file in self._weight_map().items():
            if name not in self._files and not name.endswith(_DERIVED):
                raise ModelFileError(f"{self._folder / file} lacks the tensor {name} that the index promises")
