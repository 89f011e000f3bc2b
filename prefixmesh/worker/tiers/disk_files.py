"""The disk tier's files: one run of a prefix's KV each, written so that a crash leaves nothing half, read so that nothing wrong is taken.

A safetensors file with two tensors, ``kv`` [pages, layers, 2, page_size, kv heads, head_dim] and ``tokens`` [end] (int32: *all* tokens from the
prefix's start), and metadata: format, namespace, where the run begins, names of its blocks, the model's revision, the layout, and the XXH3-128 of both
tensors. Any tool for safetensors opens it; nothing in it is executed. A file is written under another name, synced, renamed, and its folder
synced: under its own name it is whole or not there. Its bytes are the machine's own order, which is little-endian wherever torch runs.

Tokens are a tensor, and not in the metadata, so that a start reads a few hundred bytes of each file, however long its prefix is.
"""

import errno
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec
import xxhash

from prefixmesh.cache.packed_names import pack_names, unpack_names
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.tiers.disk_runs import DTYPE_BYTES, DiskIdentity, KvLayout, KvRun

FORMAT: Final = "prefixmesh.kv/1"
SUFFIX: Final = ".kv.safetensors"
DRAFT_SUFFIX: Final = ".draft"
"""Of a file that is being written."""

BAD_SUFFIX: Final = ".bad"
"""Of a file that was put away."""

MAX_HEADER_BYTES: Final = 64 * 2**10
"""A run's header is under 1 KiB; more is no file of ours."""

_LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 8
_SAFETENSORS_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FILE_MODE: Final = 0o600
"""Prompts are in it."""

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Opening a pipe would wait for somebody to write into it, for ever."""

_DRAFT_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


class BadFileError(Exception):
    """A file is not what it says it is, is not what its name says, or says nothing that this version understands. It is put away."""


class RunHeader(NamedTuple):
    """What a file says of itself."""

    identity: DiskIdentity
    namespace: Namespace
    start_tokens: int
    end_tokens: int
    fingerprints: tuple[Fingerprint, ...]
    checksum: str
    kv_offset: int
    kv_bytes: int
    file_bytes: int

    @property
    def tokens_offset(self) -> int:
        """Where the tokens lie."""
        return self.kv_offset + self.kv_bytes


class WantedPages(NamedTuple):
    """What a reader is to find in a file."""

    identity: DiskIdentity
    namespace: Namespace
    tokens: bytes
    """Packed, from the prefix's start to the last page that is wanted."""

    start_tokens: int
    """The first that is wanted; whole pages, not before the run's start."""


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """Safetensors allows text only."""

    format: str
    namespace: str
    start: str
    fingerprints: str
    revision: str
    layout: str
    checksum: str


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    kv: _Tensor
    tokens: _Tensor


class _AnyMetadata(msgspec.Struct):
    format: str = ""


class _AnyHeader(msgspec.Struct):
    metadata: _AnyMetadata = msgspec.field(name="__metadata__", default_factory=_AnyMetadata)


def write_run(
    folder: Path, stem: str, run: KvRun, identity: DiskIdentity, pages: Sequence[memoryview | bytes]
) -> int:
    """Keep a run whose KV is ``pages``, in order, in pieces of any size; returns the file's bytes. OSError when it cannot be, and then
    nothing is left. The calling thread waits for the disk."""
    draft = folder / f".{stem}{DRAFT_SUFFIX}"
    try:
        size = _write_draft(draft, _encode_header(run, identity, pages), [*pages, run.tokens])
        draft.rename(folder / f"{stem}{SUFFIX}")
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    return size


def read_header(path: Path) -> RunHeader:
    """What a file says of itself, checked against its length; a few hundred bytes are read. Raises BadFileError, and OSError when it
    cannot be read."""
    with _open(path) as file:
        return _read_header(file)


def read_pages(path: Path, wanted: WantedPages, into: memoryview) -> None:
    """Fill ``into`` with the wanted pages, whose bytes it is long. The whole file is read and its checksum compared, and every token.

    Raises BadFileError for a file that is not what it says, or of other tokens; OSError when it cannot be read, or when it holds another part of
    the prefix by now. ``into`` holds anything then.
    """
    with _open(path) as file:
        header = _read_header(file)
        if (header.identity, header.namespace) != (wanted.identity, wanted.namespace):
            raise BadFileError("it holds another prefix than its name says")
        held = os.pread(file.fileno(), header.file_bytes - header.tokens_offset, header.tokens_offset)
        page_bytes = header.identity.layout.page_bytes
        skipped = (wanted.start_tokens - header.start_tokens) // header.identity.layout.page_size * page_bytes
        fits = skipped >= 0 and skipped + len(into) <= header.kv_bytes
        file.seek(header.kv_offset)
        is_whole = skipped == 0 and len(into) == header.kv_bytes
        kv = into if is_whole else memoryview(bytearray(header.kv_bytes))
        _read_into(file, kv)
        if _checksum([kv, held]) != header.checksum:
            raise BadFileError("its checksum is another")
        if not held.startswith(wanted.tokens):
            raise BadFileError("it holds another prefix than its name says")
        if not fits:
            raise FileNotFoundError(f"{path.name} was written anew, and holds another part of its prefix")
        if kv is not into:
            into[:] = kv[skipped : skipped + len(into)]


def put_away(path: Path) -> Path:
    """Take a bad file out of service; it stays to be looked at, until there is no room for it. Where even that fails it is removed."""
    away = path.with_name(path.name + BAD_SUFFIX)
    try:
        path.rename(away)
    except FileNotFoundError:
        pass
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return away


def _encode_header(run: KvRun, identity: DiskIdentity, pages: Sequence[memoryview | bytes]) -> bytes:
    layout = identity.layout
    kv, tokens = _tensors(layout, run.end_tokens - run.start_tokens, run.end_tokens)
    assert sum(len(piece) for piece in pages) == kv.data_offsets[1], "the pages are not the run's"
    header = _Header(
        metadata=_Metadata(
            format=FORMAT,
            namespace=run.namespace.hex(),
            start=str(run.start_tokens),
            fingerprints=pack_names(run.fingerprints).hex(),
            revision=identity.revision,
            layout=msgspec.json.encode(layout).decode(),
            checksum=_checksum([*pages, run.tokens]),
        ),
        kv=kv,
        tokens=tokens,
    )
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _write_draft(draft: Path, header: bytes, pieces: Sequence[memoryview | bytes]) -> int:
    descriptor = os.open(draft, _DRAFT_FLAGS, _FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(header)
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> BinaryIO:
    """A file to be read, without a buffer. BadFileError for a link, a pipe, a folder: the tier wrote none of them, and none may be waited for."""
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadFileError("it is no file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFileError("it is no file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _read_header(file: BinaryIO) -> RunHeader:
    file_bytes = os.fstat(file.fileno()).st_size
    raw = file.read(_LENGTH.size)
    length = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else 0
    if not 0 < length <= min(MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
        raise BadFileError("it is too short, or no safetensors file")
    text = file.read(length)
    try:
        known = msgspec.json.decode(text, type=_AnyHeader).metadata.format
        if known != FORMAT:
            raise BadFileError(f"its format is {known[:40]!r}, this version reads {FORMAT}")
        header = msgspec.json.decode(text, type=_Header)
        return _checked(header, _LENGTH.size + length, file_bytes)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadFileError(f"its header is malformed: {error}") from error


def _checked(header: _Header, data_offset: int, file_bytes: int) -> RunHeader:
    """Raises ValueError or BadFileError where the parts of a header do not agree, or do not with the file's length."""
    metadata = header.metadata
    layout = msgspec.json.decode(metadata.layout, type=KvLayout)
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.page_size, layout.block_size)
    if layout.dtype not in DTYPE_BYTES or min(sizes) < 1:
        raise BadFileError("its layout is no layout")
    fingerprints = unpack_names(bytes.fromhex(metadata.fingerprints))
    start = int(metadata.start)
    run_tokens = len(fingerprints) * layout.block_size
    end = start + run_tokens
    pages, rest = divmod(run_tokens, layout.unit_tokens)
    if rest or not pages or start < 0 or start % layout.unit_tokens:
        raise BadFileError("its run is not of whole units")
    if pages > layout.run_units:  # a reader finds memory for a run before it knows whether its checksum holds
        raise BadFileError("its run is longer than any that is written")
    kv, tokens = _tensors(layout, run_tokens, end)
    if (header.kv, header.tokens) != (kv, tokens):
        raise BadFileError("its tensors are not of its run")
    if file_bytes != data_offset + tokens.data_offsets[1]:
        raise BadFileError(f"it has {file_bytes} bytes of {data_offset + tokens.data_offsets[1]}")
    return RunHeader(
        identity=DiskIdentity(revision=metadata.revision, layout=layout),
        namespace=Namespace(bytes.fromhex(metadata.namespace)),
        start_tokens=start,
        end_tokens=end,
        fingerprints=fingerprints,
        checksum=metadata.checksum,
        kv_offset=data_offset,
        kv_bytes=kv.data_offsets[1],
        file_bytes=file_bytes,
    )


def _tensors(layout: KvLayout, run_tokens: int, end_tokens: int) -> tuple[_Tensor, _Tensor]:
    """What a header says of its two tensors, the second right behind the first."""
    count = run_tokens // layout.page_size
    end = count * layout.page_bytes
    return (
        _Tensor(_SAFETENSORS_DTYPES[layout.dtype], (count, *layout.page_shape), (0, end)),
        _Tensor("I32", (end_tokens,), (end, end + end_tokens * TOKEN_BYTES)),
    )


def _read_into(file: BinaryIO, into: memoryview) -> None:
    read = 0
    while read < len(into):
        count = file.readinto(into[read:])  # type: ignore[attr-defined]
        if not count:
            raise BadFileError("it became shorter while it was read")
        read += count


def _checksum(pieces: Sequence[memoryview | bytes]) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
