"""What the store keeps of an adapter: read as it was written, by later versions and by earlier ones."""

import msgspec
import pytest

from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.adapters.records import (
    FORMAT,
    REMOVED_FOR_MS,
    AdapterRecord,
    Version,
    decode,
    encode,
    found,
    name_of,
    put_again,
    removed,
)
from prefixmesh.router.pins.records import NewerRecordError

SPEC = pb.AdapterSpec(name="clerk", path="some/folder", pinned=True)


def test_record_is_read_as_it_was_written() -> None:
    record = AdapterRecord(SPEC, 3, "d1", 12_345)
    assert decode(encode(record)) == record
    assert (record.name, record.key, record.is_removed) == ("clerk", "adapters/clerk", True)


def test_fields_of_a_later_version_stay_in_the_wish() -> None:
    """An older router writes them again as it has read them."""
    later = SPEC.SerializeToString() + b"\xfa\x3f\x03new"  # field 1023, a string
    record = decode(encode(AdapterRecord(pb.AdapterSpec.FromString(later), 1, "")))
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
        b'{"format":1,"generation":1,"digest":"","removed_unix_ms":0,"spec":"/w=="}',
    ],
)
def test_what_is_no_record_is_told_so(value: bytes) -> None:
    with pytest.raises(ValueError, match="it is no adapter"):
        decode(value)


@pytest.mark.parametrize(
    "numbers",
    [
        {"generation": 0},
        {"generation": 1 << 63},
        {"generation": 1 << 70},
        {"removed_unix_ms": -1},
        {"removed_unix_ms": 1 << 80},
        {"kept_generation": -1},
        {"kept_generation": 1 << 63},
    ],
    ids=str,
)
def test_record_of_numbers_that_cannot_be_is_none(numbers: dict[str, int]) -> None:
    """The wire could not tell them, and the answer about all adapters would fail with this one."""
    stored = {"format": FORMAT, "generation": 1, "digest": "", "removed_unix_ms": 0, "spec": ""}
    assert decode(msgspec.json.encode(stored)).generation == 1
    with pytest.raises(ValueError, match=f"it is no adapter.*{min(numbers)}"):
        decode(msgspec.json.encode(stored | numbers))


@pytest.mark.parametrize(
    "key", ["adapters/", "adapters/a/b", "adapters/-a", "adapters/" + "a" * 129, "clerk"]
)
def test_other_keys_name_none(key: str) -> None:
    assert name_of(key) is None
    assert name_of("adapters/clerk") == "clerk"


def test_put_again_is_another_generation_of_unknown_content() -> None:
    """Also over a removal that is still remembered: no two contents ever have one number."""
    first = put_again(None, SPEC)
    assert (first.generation, first.digest) == (1, "")
    again = put_again(removed(found(first, "d1"), 5), SPEC)
    assert (again.generation, again.digest, again.is_removed, again.kept) == (2, "", False, None)


def test_last_version_that_was_found_is_kept_until_another_is() -> None:
    """However often something is put in between that no worker can load; and none once the name was removed."""
    first = found(put_again(None, SPEC), "d1")
    wrong = put_again(put_again(first, pb.AdapterSpec(name="clerk", path="no")), pb.AdapterSpec(name="clerk"))
    assert wrong.kept == Version(SPEC, 1, "d1")
    assert decode(encode(wrong)) == wrong
    assert found(wrong, "d3").kept is None
    assert removed(wrong, 0).kept is None
    assert removed(wrong, 0).is_removed


def test_removal_is_remembered_for_a_day() -> None:
    removed = AdapterRecord(SPEC, 1, "d1", 1_000)
    assert [removed.is_over(now) for now in (0, 1_000 + REMOVED_FOR_MS - 1, 1_000 + REMOVED_FOR_MS)] == [
        False,
        False,
        True,
    ]
    assert not AdapterRecord(SPEC, 1, "d1").is_over(2**50)
