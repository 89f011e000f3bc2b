"""The header of a GGUF file: its key/values and where its tensors lie, read strictly and without touching tensor data.

The ``gguf`` package reads the same, but makes several numpy views for every string of an array: 2.1 s for a vocabulary of
49,152 tokens, which both the router and every worker would pay at each start. This reader takes 0.1 s. Every length is
checked against the bytes that are there, so a cut or hostile file ends in ModelFileError, never in a huge allocation.

Layout after the specification in ggml's ``docs/gguf.md``: magic, version, tensor count, key/value count, key/values, tensor
infos, padding to ``general.alignment``, data. Little-endian only; versions 2 and 3.
"""

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from prefixmesh.errors import ModelFileError

MAGIC: Final = b"GGUF"
SUPPORTED_VERSIONS: Final = (2, 3)
"""Version 1 had 32-bit counts and was in use for weeks only."""

DEFAULT_ALIGNMENT: Final = 32
"""The specification's, for files that do not name one."""

MAX_KEY_VALUES: Final = 65_536
"""Real files have tens."""

MAX_TENSORS: Final = 1_000_000
"""The largest models have some thousands."""

MAX_ARRAY_DEPTH: Final = 4
"""Arrays of arrays are allowed by the format and used by nobody; deeper ones would only exhaust the stack."""

MAX_DIMENSIONS: Final = 8
"""GGML itself stops at 4."""

_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALARS: Final[Mapping[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""GGUF value types that have a fixed size, as numpy writes them."""

_GGML_F32: Final = 0

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as the header tells it."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as numpy and torch write it (the file has it the other way round)."""

    ggml_type: int
    """Number of its storage type, a ``gguf.GGMLQuantizationType``."""

    offset: int
    """First byte of its data, from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything in a GGUF file before the data."""

    metadata: Mapping[str, Any]
    """Values by key: int, float, bool, str, or a list of them."""

    tensors: Mapping[str, GgufTensor]
    data_offset: int
    """Where the header ends and the tensors' data begin."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a file's whole header; O(header). Raises ModelFileError when it is missing, cut or malformed."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Reader(path, view).header()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise ModelFileError(f"cannot read {path}: {error}") from error


def read_gguf_metadata(path: Path) -> Mapping[str, Any]:
    """The key/values of a GGUF file; the same cost and errors as ``read_gguf_header``."""
    return read_gguf_header(path).metadata


def read_f32_vector(path: Path, tensor: GgufTensor) -> tuple[float, ...]:
    """The numbers of a small vector that belongs to the configuration. ModelFileError unless it is stored as float32."""
    if tensor.ggml_type != _GGML_F32 or len(tensor.shape) != 1:
        raise ModelFileError(f"{path}: tensor {tensor.name} must be a vector of float32")
    try:
        with path.open("rb") as file:
            file.seek(tensor.offset)
            raw = file.read(tensor.shape[0] * 4)
    except OSError as error:
        raise ModelFileError(f"cannot read tensor {tensor.name} of {path}: {error}") from error
    if len(raw) != tensor.shape[0] * 4:
        raise ModelFileError(f"{path} ends within the data of tensor {tensor.name}")
    return tuple(np.frombuffer(raw, "<f4").tolist())


class _Reader:
    """A cursor over the mapped file; every read says first how many bytes it needs."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._size = len(view)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise self._malformed("it does not begin with GGUF")
        version = self._u32()
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in SUPPORTED_VERSIONS
            hint = "big-endian files are not supported" if swapped else f"supported: {SUPPORTED_VERSIONS}"
            raise self._malformed(f"version {version}; {hint}")
        tensor_count = self._count("tensors", MAX_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(self._count("key/values", MAX_KEY_VALUES)):
            key = self._string()
            if key in metadata:
                raise self._malformed(f"the key {key!r} comes twice")
            metadata[key] = self._value(self._u32(), depth=0)
        infos = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._malformed(f"general.alignment must be a power of two, got {alignment!r}")
        data_offset = -(-self._at // alignment) * alignment
        tensors = {
            tensor.name: GgufTensor(tensor.name, tensor.shape, tensor.ggml_type, data_offset + tensor.offset)
            for tensor in infos
        }
        if len(tensors) != tensor_count:
            raise self._malformed("two tensors have the same name")
        for tensor in tensors.values():
            if tensor.offset > self._size:
                raise self._malformed(f"the data of tensor {tensor.name!r} lie beyond its end")
        return GgufHeader(metadata, tensors, data_offset)

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dimensions = self._u32()
        if dimensions > MAX_DIMENSIONS:
            raise self._malformed(f"tensor {name!r} has {dimensions} dimensions, at most {MAX_DIMENSIONS}")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        return GgufTensor(name, shape, self._u32(), self._u64())

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise self._malformed(f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        kind, count = self._u32(), self._u64()
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            # An inner array takes at least 12 bytes, so this bounds the list before it is made.
            self._need(count * 12)
            return [self._array(depth + 1) for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._malformed(f"unknown value type {kind}")
        dtype = np.dtype(code)
        raw = self._take(count * dtype.itemsize)
        if kind == _BOOL:  # any byte but 0 is true; numpy's own bool would keep the odd byte
            return [byte != 0 for byte in raw]
        numbers: list[Any] = np.frombuffer(raw, dtype).tolist()
        return numbers

    def _strings(self, count: int) -> list[str]:
        """An array of strings: the one hot loop, so with everything local."""
        self._need(count * 8)  # each has at least its length, which bounds the list before it is made
        view, at, size = self._view, self._at, self._size
        unpack: Callable[[Any, int], tuple[int]] = _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(view, at)[0]
                if at > size:
                    raise self._malformed("a string ends beyond its end")
                found.append(view[start:at].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise self._malformed(f"a malformed string array: {error}") from error
        self._at = at
        return found

    def _string(self) -> str:
        raw = self._take(self._u64())
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._malformed(f"a string that is not UTF-8: {error}") from error

    def _count(self, what: str, limit: int) -> int:
        count = self._u64()
        if count > limit:
            raise self._malformed(f"{count} {what}, at most {limit}")
        return count

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _take(self, size: int) -> bytes:
        self._need(size)
        start = self._at
        self._at = start + size
        return self._view[start : self._at]

    def _need(self, size: int) -> None:
        if size > self._size - self._at:
            raise self._malformed(
                f"it needs {size} bytes at {self._at}, but has only {self._size - self._at} left"
            )

    def _malformed(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._path} is not a good GGUF file: {problem}")
