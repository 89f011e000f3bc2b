"""What a safetensors file says it holds: read and checked to the last byte before any tensor is.

The format is an 8-byte little-endian length, a JSON object of so many bytes, then the tensors' bytes. Nothing is believed: every
tensor must lie where the file has bytes, be as long as its shape says, and overlap no other, and no byte may belong to none.
"""

import math
import os
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NamedTuple, TypeGuard

import msgspec

from prefixmesh.errors import ModelFileError

DTYPE_BYTES: Final[Mapping[str, int]] = {"F32": 4, "F16": 2, "BF16": 2}
"""The types that weights of an adapter may have."""

MAX_HEADER_BYTES: Final = 512 * 2**10
"""A tensor takes some 140 bytes of it, and an adapter of every linear layer of a model of 126 layers has 1,766 of them. More would
take longer to look through than a refusal may."""

METADATA: Final = "__metadata__"
SHOWN_CHARACTERS: Final = 80

_LENGTH: Final = struct.Struct("<Q")


class TensorEntry(NamedTuple):
    """Where a tensor lies in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the beginning of the file."""

    size_bytes: int


def read_header(file: BinaryIO, max_file_bytes: int) -> dict[str, TensorEntry]:
    """Tensors by name. Raises ModelFileError. Reads at most ``MAX_HEADER_BYTES``; milliseconds."""
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes > max_file_bytes:
        raise ModelFileError(f"at most {max_file_bytes} bytes are read, the file has {file_bytes}")
    raw = file.read(_LENGTH.size)
    if len(raw) < _LENGTH.size:
        raise ModelFileError("not a safetensors file: it is shorter than the header's length")
    header_bytes = _LENGTH.unpack(raw)[0]
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
        raise ModelFileError(
            f"not a safetensors file: its header would have {header_bytes} bytes of at most {MAX_HEADER_BYTES}"
        )
    entries = _parse(file.read(header_bytes), _LENGTH.size + header_bytes)
    _check_places(entries, _LENGTH.size + header_bytes, file_bytes)
    return {entry.name: entry for entry in entries}


def _parse(header: bytes, data_offset: int) -> list[TensorEntry]:
    try:
        described = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError("not a safetensors file: its header is not a JSON object of objects") from error
    described.pop(METADATA, None)
    if not described:
        raise ModelFileError("the safetensors file holds no tensor")
    return [_entry(name, fields, data_offset) for name, fields in described.items()]


def _entry(name: str, fields: dict[str, Any], data_offset: int) -> TensorEntry:
    shown = name[:SHOWN_CHARACTERS]
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ModelFileError(f"tensor {shown} is of type {str(dtype)[:SHOWN_CHARACTERS]}, not of {known}")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ModelFileError(f"the safetensors header gives no shape or place of the tensor {shown}")
    size_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != size_bytes:
        raise ModelFileError(
            f"tensor {shown} takes {offsets[1] - offsets[0]} bytes where its shape needs {size_bytes}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_offset + offsets[0], size_bytes)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**48 for x in value)
    )


def _check_places(entries: list[TensorEntry], data_offset: int, file_bytes: int) -> None:
    end = data_offset
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.size_bytes)):
        if entry.offset != end:
            problem = "overlaps another" if entry.offset < end else "leaves a gap before it"
            raise ModelFileError(f"tensor {entry.name[:SHOWN_CHARACTERS]} {problem}")
        end += entry.size_bytes
    if end != file_bytes:
        raise ModelFileError(f"the tensors end at byte {end}, the file at {file_bytes}")
