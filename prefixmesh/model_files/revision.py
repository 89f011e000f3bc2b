"""A model's revision: the identity under which its KV may be shared.

BLAKE2b over the configuration and index in full, and each weight file's name, size, first and last MiB. That takes milliseconds
for any model, where hashing everything would take minutes; weights that were trained further, quantised otherwise or
merged differ in every MiB. Two files of equal name and size that differ only in their middle would pass for one: whoever makes
such files gives them other names.
"""

import hashlib
from pathlib import Path
from typing import Final

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.gguf_metadata import read_gguf_header
from prefixmesh.model_files.source import ModelFiles

REVISION_BYTES: Final = 16
"""128 bits: no two models meet by chance."""

EDGE_BYTES: Final = 2**20
"""How much of a weight file's beginning and end is hashed."""

INDEX_FILE: Final = "model.safetensors.index.json"
_FORMAT: Final = b"prefixmesh/revision/v1"


def model_revision(files: ModelFiles) -> str:
    """Hexadecimal digest; equal on every machine that has the same files. Cost: about 2 MiB read per weight file."""
    digest = hashlib.blake2b(_FORMAT, digest_size=REVISION_BYTES)
    try:
        if files.kind == "gguf":
            # The header is the configuration: it may be longer than a MiB, so it counts in full.
            header_bytes = read_gguf_header(files.path).data_offset
            _add_whole(digest, "header", files.path, header_bytes)
            weights = [files.path]
        else:
            for name in ("config.json", INDEX_FILE):
                if name == "config.json" or (files.path / name).is_file():
                    _add_whole(digest, name, files.path / name)
            weights = sorted(files.path.glob("*.safetensors"))
            if not weights:
                raise ModelFileError(f"{files.path} has no *.safetensors weights")
        for path in weights:
            _add_edges(digest, path)
    except OSError as error:
        raise ModelFileError(f"cannot read the model at {files.path}: {error}") from error
    return digest.hexdigest()


def _add_whole(digest: "hashlib.blake2b", name: str, path: Path, size: int = -1) -> None:
    with path.open("rb") as file:
        _add(digest, name.encode(), file.read(size))


def _add_edges(digest: "hashlib.blake2b", path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(EDGE_BYTES)
        file.seek(max(0, size - EDGE_BYTES))
        last = file.read(EDGE_BYTES)
    _add(digest, path.name.encode(), size.to_bytes(8, "little"), first, last)


def _add(digest: "hashlib.blake2b", *fields: bytes) -> None:
    """Length-prefixed, so that no two different lists of fields read the same."""
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
