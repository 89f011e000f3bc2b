"""Pins as the state's store keeps them: one entry a pin, the wish as its owner gave it. Pure.

A record holds the prompt as it was given, not its tokens: each router makes those with its own tokenizer, so that a pin outlives a model.
The wish itself is the wire's own message, so fields that a later version has added stay in it when it is written again. A record of a
later format is not read, and never written over: what this version cannot understand it must not lose.
"""

from typing import Annotated, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec
from google.protobuf.message import DecodeError

from prefixmesh.adapter_names import is_adapter_name
from prefixmesh.proto.v1 import router_pb2 as pb

PINS: Final = "pins/"
"""Keys are this, the owner, percent-encoded, a slash, and the name."""

FORMAT: Final = 1

_RENEWED: Final = ("ttl_ms",)
"""What of a wish says for how long, and not what."""

_PROMPT: Final = ("tenant", "adapter", "extra_key", "public", "text", "chat", "tokens")
"""What of a wish makes its prompt, and the namespace that is for."""


class PinName(NamedTuple):
    """A pin among all pins."""

    owner: str
    name: str

    @property
    def key(self) -> str:
        """Where the store keeps it."""
        return f"{PINS}{quote(self.owner, safe='')}/{self.name}"


class PinRecord(NamedTuple):
    """A pin as it is kept."""

    spec: pb.PinSpec
    """With owner and tenant as they were meant. Not to be changed."""

    generation: int
    """Counts the versions of its prompt, from 1."""

    expires_unix_ms: int
    """By the store's clock; 0: it does not."""

    @property
    def name(self) -> PinName:
        """Whose it is, and what it is called."""
        return PinName(self.spec.owner, self.spec.name)

    def is_over(self, unix_ms: int) -> bool:
        """Whether it has ended by itself at this time of the store's clock."""
        return 0 < self.expires_unix_ms <= unix_ms


MAX_STORED: Final = 1 << 53
"""Of a record's numbers: what is much larger the wire cannot tell, and one such record would cost the answer about all others."""

StoredNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_STORED)]
StoredGeneration = Annotated[int, msgspec.Meta(ge=1, le=MAX_STORED)]


class _Stored(msgspec.Struct, frozen=True):
    format: int
    generation: StoredGeneration
    expires_unix_ms: StoredNumber
    spec: bytes
    """A serialised ``PinSpec``."""


class _Format(msgspec.Struct, frozen=True):
    format: int


class NewerRecordError(ValueError):
    """A record that a later version has written."""


def key_of(spec: pb.PinSpec) -> str:
    """Where the store keeps a wish."""
    return PinName(spec.owner, spec.name).key


def name_of(key: str) -> PinName | None:
    """The pin that a key of the store is for; None for a key that is none of ours."""
    owner, _, name = key.removeprefix(PINS).partition("/")
    pin = PinName(unquote(owner), name)
    return pin if pin.key == key and is_adapter_name(name) else None


def encode(record: PinRecord) -> bytes:
    """As the store keeps it. O(prompt)."""
    spec = record.spec.SerializeToString(deterministic=True)
    return msgspec.json.encode(_Stored(FORMAT, record.generation, record.expires_unix_ms, spec))


def decode(value: bytes) -> PinRecord:
    """A record that ``encode`` has made. Raises NewerRecordError for one of a later format, ValueError for what is none. O(prompt)."""
    try:
        newest = msgspec.json.decode(value, type=_Format).format
        if newest > FORMAT:
            raise NewerRecordError(f"it is of format {newest}; this version knows {FORMAT}")
        stored = msgspec.json.decode(value, type=_Stored)
        return PinRecord(pb.PinSpec.FromString(stored.spec), stored.generation, stored.expires_unix_ms)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, DecodeError) as error:
        raise ValueError(f"it is no pin ({error})") from error


def renewed(before: PinRecord | None, spec: pb.PinSpec, unix_ms: int) -> PinRecord:
    """The record after ``spec`` was asked for at this time of the store's clock: its time begins anew, and another prompt is another
    generation. O(prompt)."""
    generation = 1
    if before is not None:
        generation = before.generation + (not is_same_prompt(before.spec, spec))
    return PinRecord(spec, generation, unix_ms + spec.ttl_ms if spec.ttl_ms else 0)


def is_same(one: pb.PinSpec, other: pb.PinSpec) -> bool:
    """Whether two ask for the same, for however long. O(prompt)."""
    return _without(one, _RENEWED) == _without(other, _RENEWED) and bool(one.ttl_ms) == bool(other.ttl_ms)


def is_same_prompt(one: pb.PinSpec, other: pb.PinSpec) -> bool:
    """Whether two are for the same prompt in the same namespace. O(prompt)."""
    return one.WhichOneof("prompt") == other.WhichOneof("prompt") and all(
        getattr(one, field) == getattr(other, field) for field in _PROMPT
    )


def without_prompt(spec: pb.PinSpec) -> pb.PinSpec:
    """The same without what was said in it: for lists. O(prompt)."""
    return _without(spec, ("text", "chat", "tokens"))


def _without(spec: pb.PinSpec, fields: tuple[str, ...]) -> pb.PinSpec:
    copy = pb.PinSpec()
    copy.CopyFrom(spec)
    for field in fields:
        copy.ClearField(field)
    return copy
