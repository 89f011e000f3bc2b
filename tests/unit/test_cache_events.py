"""The words a cache uses about itself, the sink for a cache that nobody watches, and the log of numbered events."""

import pytest

from prefixmesh.cache.event_log import REMOVED, STORED, EventLog
from prefixmesh.cache.events import (
    NO_EVENTS,
    CacheSummary,
    Cleared,
    Event,
    EventSink,
    Removed,
    SnapshotPart,
    Stored,
    TierState,
)
from prefixmesh.cache.publisher import CachePublisher
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError
from prefixmesh.ids import Epoch, Fingerprint

EPOCH = Epoch(2**64 - 1)
OTHER = Epoch(7)


def names(*numbers: int) -> tuple[Fingerprint, ...]:
    return tuple(map(Fingerprint, numbers))


def stored(sequence: int, *numbers: int) -> Event:
    return Stored(EPOCH, sequence, Tier.DEVICE, None, names(*numbers))


def log_of(*runs: tuple[int, ...], max_events: int = 100, max_blocks: int = 100) -> EventLog:
    log = EventLog(EPOCH, max_events, max_blocks)
    for run in runs:
        log.append((STORED + Tier.DEVICE, None, names(*run)))
    return log


def test_the_tiers_have_the_numbers_of_the_wire() -> None:
    assert [(tier.name, tier.value) for tier in Tier] == [("DEVICE", 0), ("HOST", 1)]


def test_every_word_has_its_fields_in_this_order() -> None:
    """Cheap tuples, made in the order in which the wire and the tests spell them out."""
    fields = {word.__name__: word._fields for word in (Stored, Removed, Cleared)}
    assert fields == {
        "Stored": ("epoch", "sequence", "tier", "parent", "fingerprints"),
        "Removed": ("epoch", "sequence", "tier", "fingerprints"),
        "Cleared": ("epoch", "sequence"),
    }
    assert SnapshotPart._fields == ("epoch", "sequence", "tier", "fingerprints", "last")
    assert TierState(count=1, digest=2) == TierState(1, 2)
    assert CacheSummary._fields == ("epoch", "sequence", "states")


def test_nobody_hears_what_is_told_to_no_events() -> None:
    """The sink of a cache that nobody watches takes everything, keeps nothing, and has no room to keep it."""
    sink: EventSink = NO_EVENTS
    sink.stored(Tier.DEVICE, None, names(1, 2))
    sink.removed(Tier.HOST, names(3))
    sink.cleared()
    assert not hasattr(sink, "__dict__")
    assert repr(sink) == "NO_EVENTS"


def test_a_publisher_is_a_sink() -> None:
    """Without a dict of its own, like every sink: attributes are read on the cache's hot path."""
    sink: EventSink = CachePublisher(lambda: EPOCH)
    sink.stored(Tier.DEVICE, None, names(1))
    assert not hasattr(sink, "__dict__")


def test_the_log_gives_the_events_after_a_number() -> None:
    log = log_of((1, 2), (3,))
    log.append((REMOVED + Tier.HOST, None, names(9)))
    log.append((STORED + Tier.HOST, Fingerprint(4), names(5)))
    everything = [
        stored(1, 1, 2),
        stored(2, 3),
        Removed(EPOCH, 3, Tier.HOST, names(9)),
        Stored(EPOCH, 4, Tier.HOST, Fingerprint(4), names(5)),
    ]
    for sequence in range(5):
        assert log.since(EPOCH, sequence) == everything[sequence:]
    assert isinstance(everything[0], Stored)
    assert [type(event) for event in log.since(EPOCH, 1) or ()] == [Stored, Removed, Stored]


def test_the_log_says_when_it_cannot_tell() -> None:
    """Too long ago, not yet happened, another epoch: None, and never a list with a hole."""
    log = log_of((1,), (2,), (3,), max_events=2)
    assert log.since(EPOCH, 0) is None
    assert log.since(EPOCH, 1) == [stored(2, 2), stored(3, 3)]
    assert log.since(EPOCH, 3) == []
    assert log.since(EPOCH, 4) is None
    assert log.since(EPOCH, -1) is None
    assert log.since(OTHER, 1) is None
    assert log.since(OTHER, 3) is None


def test_the_log_is_bounded_in_events() -> None:
    log = log_of(*((number,) for number in range(50)), max_events=3)
    assert len(log) == 3
    assert log.sequence == 50
    log.check_invariants()


def test_the_log_is_bounded_in_blocks() -> None:
    """Few long events weigh as much as many short ones."""
    log = log_of((1, 2, 3), (4, 5), (6, 7), max_blocks=4)
    assert log.since(EPOCH, 1) == [stored(2, 4, 5), stored(3, 6, 7)]
    assert log.since(EPOCH, 0) is None
    log.check_invariants()


def test_an_event_too_long_for_the_log_leaves_it_empty() -> None:
    """It is numbered like any other; whoever has not got it takes a snapshot, whoever has goes on."""
    log = log_of((1,), tuple(range(10, 20)), max_blocks=4)
    assert len(log) == 0
    assert log.sequence == 2
    assert log.since(EPOCH, 1) is None
    assert log.since(EPOCH, 2) == []
    log.append((STORED, None, names(1)))
    assert log.since(EPOCH, 2) == [stored(3, 1)]
    log.check_invariants()


def test_a_new_epoch_begins_at_nought_with_an_empty_log() -> None:
    log = log_of((1,), (2, 3))
    log.begin(OTHER)
    assert (log.epoch, log.sequence, len(log)) == (OTHER, 0, 0)
    assert log.since(EPOCH, 1) is None
    assert log.since(OTHER, 0) == []
    log.check_invariants()
    log.append((STORED, None, names(1)))
    assert log.since(OTHER, 0) == [Stored(OTHER, 1, Tier.DEVICE, None, names(1))]


@pytest.mark.parametrize("wrong", ["_blocks", "sequence"])
def test_the_check_of_the_log_sees_a_wrong_count(wrong: str) -> None:
    log = log_of((1,), (2, 3))
    setattr(log, wrong, 1)
    with pytest.raises(InvariantError, match="EventLog"):
        log.check_invariants()


def test_the_log_shows_itself_in_one_line() -> None:
    assert repr(log_of((1,), (2, 3))) == (
        "EventLog(epoch=ffffffffffffffff, sequence=2, events=2/100, blocks=3/100)"
    )
