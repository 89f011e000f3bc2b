"""Adapters as the state's store keeps them: one entry a name, the wish as it was put, and which content it turned out to be. Pure.

A name that was taken back stays for a while, marked as removed, so that a worker that was out of reach at the time is told when it is
back. After that nothing says any more that the name ever was the store's, and whoever has it keeps it. The wish is the wire's own message,
so fields that a later version has added stay in it when it is written again. A record of a later format is not read, and never written over.
"""

from typing import Final, NamedTuple

import msgspec
from google.protobuf.message import DecodeError

from prefixmesh.adapter_names import is_adapter_name
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.pins.records import NewerRecordError, StoredGeneration, StoredNumber

ADAPTERS: Final = "adapters/"
"""Keys are this and the name."""

FORMAT: Final = 1

REMOVED_FOR_MS: Final = 24 * 3_600_000
"""So long a removed name is remembered. A day: a worker that lives on out of reach for longer is looked after by hand. Not without end: while
it is remembered, a worker that is started with an adapter of that name is told to forget it, and names must not add up."""


class Version(NamedTuple):
    """One generation of a name, of which it is known what it is."""

    spec: pb.AdapterSpec
    """Not to be changed."""

    generation: int
    digest: str
    """Of its content."""


class AdapterRecord(NamedTuple):
    """A name as it is kept."""

    spec: pb.AdapterSpec
    """Not to be changed."""

    generation: int
    """Counts how often it was put, from 1; goes on over a removal that is still remembered."""

    digest: str
    """Of the content that this generation is; empty while no worker has loaded it."""

    removed_unix_ms: int = 0
    """When it was taken back, by the store's clock; 0: it is wished."""

    kept: Version | None = None
    """What the name means until it is known what this generation is: a folder that is not there must not cost anybody what was. None where
    that is known, or there was none."""

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.spec.name

    @property
    def key(self) -> str:
        """Where the store keeps it."""
        return ADAPTERS + self.spec.name

    @property
    def is_removed(self) -> bool:
        """Whether workers are to forget it."""
        return self.removed_unix_ms > 0

    def has_version(self, generation: int) -> bool:
        """Whether that is the newest, or the one that is kept."""
        return generation == self.generation or (self.kept is not None and generation == self.kept.generation)

    def is_over(self, unix_ms: int) -> bool:
        """Whether its removal needs to be remembered no more at this time of the store's clock."""
        return self.is_removed and unix_ms - self.removed_unix_ms >= REMOVED_FOR_MS


class _Stored(msgspec.Struct, frozen=True):
    format: int
    generation: StoredGeneration
    digest: str
    removed_unix_ms: StoredNumber
    spec: bytes
    """A serialised ``AdapterSpec``."""

    kept_spec: bytes = b""
    kept_generation: StoredNumber = 0
    """0: nothing is kept."""

    kept_digest: str = ""


class _Format(msgspec.Struct, frozen=True):
    format: int


def name_of(key: str) -> str | None:
    """The name that a key of the store is for; None for a key that is none of ours."""
    name = key.removeprefix(ADAPTERS)
    return name if name != key and is_adapter_name(name) else None


def encode(record: AdapterRecord) -> bytes:
    """As the store keeps it. O(1)."""
    kept = record.kept or Version(pb.AdapterSpec(), 0, "")
    spec, kept_spec = (one.SerializeToString(deterministic=True) for one in (record.spec, kept.spec))
    stored = _Stored(
        FORMAT,
        record.generation,
        record.digest,
        record.removed_unix_ms,
        spec,
        kept_spec,
        kept.generation,
        kept.digest,
    )
    return msgspec.json.encode(stored)


def decode(value: bytes) -> AdapterRecord:
    """A record that ``encode`` has made. Raises NewerRecordError for one of a later format, ValueError for what is none. O(1)."""
    try:
        newest = msgspec.json.decode(value, type=_Format).format
        if newest > FORMAT:
            raise NewerRecordError(f"it is of format {newest}; this version knows {FORMAT}")
        stored = msgspec.json.decode(value, type=_Stored)
        spec, kept_spec = (pb.AdapterSpec.FromString(one) for one in (stored.spec, stored.kept_spec))
        kept = Version(kept_spec, stored.kept_generation, stored.kept_digest)
        return AdapterRecord(
            spec,
            stored.generation,
            stored.digest,
            stored.removed_unix_ms,
            kept if stored.kept_generation else None,
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, DecodeError) as error:
        raise ValueError(f"it is no adapter ({error})") from error


def put_again(before: AdapterRecord | None, spec: pb.AdapterSpec) -> AdapterRecord:
    """The record after ``spec`` was put: always another generation, since nobody but a worker can tell what its folder holds by now."""
    if before is None:
        return AdapterRecord(spec, 1, digest="")
    kept = before.kept
    if before.digest:
        kept = Version(before.spec, before.generation, before.digest)
    return AdapterRecord(spec, before.generation + 1, digest="", kept=None if before.is_removed else kept)


def found(record: AdapterRecord, digest: str) -> AdapterRecord:
    """The record once it is known what its generation is: what was kept meanwhile is kept no more."""
    return record._replace(digest=digest, kept=None)


def removed(record: AdapterRecord, unix_ms: int) -> AdapterRecord:
    """The record once it was taken back at this time of the store's clock."""
    return record._replace(removed_unix_ms=max(1, unix_ms), kept=None)
