"""What the store keeps of a pin: read as it was written, by later versions and by earlier ones."""

import msgspec
import pytest

from prefixmesh.proto.v1 import inference_pb2
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.pins.records import (
    FORMAT,
    NewerRecordError,
    PinName,
    PinRecord,
    decode,
    encode,
    is_same,
    name_of,
    renewed,
    without_prompt,
)
from prefixmesh.router.state_store import MAX_KEY_BYTES

SPEC = pb.PinSpec(name="a", owner="acme", tenant="acme", text="hello", replicas=2, ttl_ms=1000)


def changed(**fields: object) -> pb.PinSpec:
    spec = pb.PinSpec()
    spec.CopyFrom(SPEC)
    spec.MergeFrom(pb.PinSpec(**fields))  # type: ignore[arg-type]
    return spec


def test_record_is_read_as_it_was_written() -> None:
    record = PinRecord(SPEC, 3, 12_345)
    assert decode(encode(record)) == record
    assert record.name == PinName("acme", "a")


def test_fields_of_a_later_version_stay_in_the_wish() -> None:
    """An older router writes them again as it has read them."""
    later = SPEC.SerializeToString() + b"\xfa\x3f\x03new"  # field 1023, a string
    record = decode(encode(PinRecord(pb.PinSpec.FromString(later), 1, 0)))
    assert b"\xfa\x3f\x03new" in record.spec.SerializeToString()


def test_record_of_a_later_format_is_not_read() -> None:
    value = msgspec.json.encode({"format": FORMAT + 1, "who": "knows"})
    with pytest.raises(NewerRecordError, match=f"format {FORMAT + 1}"):
        decode(value)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"no json",
        b"[]",
        b'{"format":1}',
        b'{"format":1,"generation":1,"expires_unix_ms":0,"spec":"/w=="}',
    ],
)
def test_what_is_no_record_is_told_so(value: bytes) -> None:
    with pytest.raises(ValueError, match="it is no pin"):
        decode(value)


@pytest.mark.parametrize(
    "numbers",
    [{"generation": 0}, {"generation": 1 << 63}, {"expires_unix_ms": -1}, {"expires_unix_ms": 1 << 80}],
    ids=str,
)
def test_record_of_numbers_that_cannot_be_is_none(numbers: dict[str, int]) -> None:
    """The wire could not tell them, and the answer about all pins would fail with this one."""
    stored = {"format": FORMAT, "generation": 1, "expires_unix_ms": 0, "spec": ""}
    assert decode(msgspec.json.encode(stored)).generation == 1
    with pytest.raises(ValueError, match=f"it is no pin.*{min(numbers)}"):
        decode(msgspec.json.encode(stored | numbers))


@pytest.mark.parametrize("owner", ["acme", "a/b", "ünïcode?", "%41", "@", "a b", "x" * 128, "/" * 128])
def test_key_names_one_pin(owner: str) -> None:
    """Whatever signs a tenant's name has, and however long it is."""
    pin = PinName(owner, "n" * 128)
    assert name_of(pin.key) == pin
    assert len(pin.key.encode()) <= MAX_KEY_BYTES


@pytest.mark.parametrize("key", ["pins/", "pins/a", "pins/a/b/c", "pins/%61/b", "pins/\xff/b", "pins/a b/c"])
def test_other_keys_name_none(key: str) -> None:
    assert name_of(key) is None


def test_another_prompt_is_another_generation() -> None:
    """Anything that makes its tokens or its namespace; not how many, how long or where."""
    first = renewed(None, SPEC, 5_000)
    assert (first.generation, first.expires_unix_ms) == (1, 6_000)
    assert renewed(first, changed(replicas=3, ttl_ms=9), 5_000).generation == 1
    for fields in (
        {"text": "hullo"},
        {"extra_key": "k"},
        {"adapter": "x"},
        {"tenant": "b"},
        {"public": True},
    ):
        assert renewed(first, changed(**fields), 0).generation == 2
    tokens = pb.PinSpec(name="a", owner="acme", tenant="acme", tokens=inference_pb2.TokenPrompt(ids=b"1234"))
    assert renewed(first, tokens, 0).generation == 2


def test_the_same_for_longer_is_the_same() -> None:
    """With an end or without one is not."""
    assert is_same(SPEC, changed(ttl_ms=5))
    forever = changed()
    forever.ttl_ms = 0
    assert not is_same(SPEC, forever)
    assert not is_same(SPEC, changed(replicas=1, tier=1))


def test_record_ends_by_its_time() -> None:
    assert not PinRecord(SPEC, 1, 0).is_over(2**50)
    assert [PinRecord(SPEC, 1, 100).is_over(now) for now in (99, 100)] == [False, True]


def test_lists_show_no_prompt() -> None:
    shown = without_prompt(SPEC)
    assert shown.WhichOneof("prompt") is None
    assert (shown.name, shown.replicas, SPEC.text) == ("a", 2, "hello")
