"""A mirror of a shared store's entries: what is told in order, what was missed, and which store it is."""

import random

import pytest

from prefixmesh.router import state_mirror
from prefixmesh.router.state_mirror import StateMirror
from prefixmesh.router.state_store import Change, Entry
from prefixmesh.router.state_table import StateTable


def test_told_changes_in_order_are_taken() -> None:
    mirror = StateMirror()
    assert mirror.heard(1)
    assert mirror.apply(Change("a", b"x", 1))
    assert mirror.heard(2)
    assert mirror.apply(Change("a", None, 2))
    assert mirror.entries("") == []


def test_number_that_is_not_the_next_shows_what_was_missed() -> None:
    """A repeated one does not."""
    mirror = StateMirror()
    mirror.replace(b"store", 7, {})
    assert mirror.heard(8)
    assert mirror.heard(8)
    assert not mirror.heard(10)
    assert mirror.told == 8


def test_own_write_is_taken_before_it_is_told() -> None:
    """And its telling, or that of an older one of the same key, changes nothing any more."""
    mirror = StateMirror()
    assert mirror.apply(Change("a", b"mine", 2))
    assert mirror.heard(1)
    assert not mirror.apply(Change("a", b"theirs", 1))
    assert mirror.heard(2)
    assert not mirror.apply(Change("a", b"mine", 2))
    assert mirror.entries("") == [Entry("a", b"mine", 2)]


def test_older_change_does_not_bring_a_removed_key_back() -> None:
    mirror = StateMirror()
    mirror.apply(Change("a", b"x", 1))
    mirror.apply(Change("a", None, 3))
    assert not mirror.apply(Change("a", b"y", 2))
    assert mirror.entries("") == []


def test_older_change_does_not_bring_back_what_a_whole_reading_has_not() -> None:
    """The answer to a write of ours may be read after that of a reading which was later: in between somebody removed the key again."""
    mirror = StateMirror()
    mirror.replace(b"store", 3, {})
    assert not mirror.apply(Change("a", b"mine", 2))
    assert mirror.entries("") == []
    assert mirror.apply(Change("a", b"mine", 4))


def test_removed_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a router that lives long, in a fleet that adds and removes all the time: read anew, nothing has to be remembered of them."""
    monkeypatch.setattr(state_mirror, "MAX_ENTRIES", 2)
    mirror, readings = StateMirror(), 0
    for version in range(1, 101):
        if not mirror.heard(version):
            mirror.replace(b"store", version, {})
            readings += 1
        mirror.apply(Change(f"key {version}", None, version))
        assert len(mirror._removed) <= 3
    assert 20 < readings < 40


def test_whole_reading_tells_what_is_different() -> None:
    mirror = StateMirror()
    mirror.replace(b"store", 3, {key: Entry(key, b"", 1) for key in ("a", "b", "c")})
    found = {"a": Entry("a", b"", 1), "b": Entry("b", b"new", 9), "d": Entry("d", b"", 8)}
    changes = mirror.replace(b"store", 9, found)
    assert set(changes) == {Change("b", b"new", 9), Change("d", b"", 8), Change("c", None, 9)}


def test_emptied_store_and_another_one_are_recognised() -> None:
    """A store that nobody has written to yet is no loss."""
    mirror = StateMirror()
    assert not mirror.is_lost(b"")
    mirror.replace(b"", 0, {})
    assert not mirror.is_lost(b"one")
    mirror.replace(b"one", 1, {})
    assert not mirror.is_lost(b"one")
    assert mirror.is_lost(b"")
    assert mirror.is_lost(b"two")


def test_store_without_anything_that_we_have_written_was_emptied() -> None:
    """Also before it was ever read."""
    mirror = StateMirror()
    mirror.apply(Change("a", b"x", 1))
    assert mirror.is_lost(b"")
    assert not mirror.is_lost(b"one")


def test_mirror_equals_the_store_whatever_is_lost_and_repeated() -> None:
    """Own writes are taken at once, tellings are dropped and repeated at random, and a gap is followed by a whole reading."""
    for seed in range(50):
        rng = random.Random(seed)
        table, mirror, told = StateTable(), StateMirror(), list[Change]()
        for _ in range(200):
            key = rng.choice("abcd")
            change = table.delete(key, None) if rng.random() < 0.4 else table.put(key, rng.randbytes(2), None)
            if change is None:
                continue
            if rng.random() < 0.3:
                mirror.apply(change)
            told += [] if rng.random() < 0.1 else [change] * rng.choice((1, 1, 2))
            while told and rng.random() < 0.6:
                heard = told.pop(0)
                if mirror.heard(heard.version):
                    entry = table.get(heard.key)
                    now = Change(heard.key, None, heard.version) if entry is None else Change(*entry)
                    mirror.apply(now)
                else:
                    mirror.replace(b"store", table.version, {entry.key: entry for entry in table.entries("")})
        if mirror.told < table.version:  # what a poll finds
            mirror.replace(b"store", table.version, {entry.key: entry for entry in table.entries("")})
        assert mirror.entries("") == table.entries("")
