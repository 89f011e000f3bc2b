"""A router's view of one worker: what it takes in, what it leaves out, when it asks for a snapshot, and how far it may be believed."""

from prefixmesh.cache.events import CacheSummary, Cleared, Removed, SnapshotPart, Stored, TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch, Fingerprint
from prefixmesh.router.block_index import BlockIndex, Fall
from prefixmesh.router.predictions import Predictions
from prefixmesh.router.worker_view import Need, Trust, WorkerView

E1, E2 = Epoch(11), Epoch(22)
A, B, C = (Fingerprint(n << 56 | n) for n in (1, 2, 3))


class Scene:
    def __init__(self) -> None:
        self.index, self.predictions = BlockIndex(1000), Predictions()
        self.view = WorkerView(self.index, self.predictions, report_interval_s=1.0, now=0.0)

    def load(self, *names: Fingerprint, epoch: Epoch = E1, sequence: int = 0) -> None:
        self.view.on_opened()
        self.view.on_part(SnapshotPart(epoch, sequence, Tier.DEVICE, names, last=True), 0.0)

    @property
    def held(self) -> set[Fingerprint]:
        return self.index.held(self.view.slot, Tier.DEVICE)


def stored(sequence: int, *names: Fingerprint, epoch: Epoch = E1) -> Stored:
    return Stored(epoch, sequence, Tier.DEVICE, None, names)


def summary(sequence: int, *names: int, epoch: Epoch = E1) -> CacheSummary:
    digest = 0
    for name in names:
        digest ^= name
    return CacheSummary(epoch, sequence, (TierState(len(names), digest), TierState(0, 0)))


def test_nothing_of_a_snapshot_shows_before_its_last_part() -> None:
    scene = Scene()
    assert scene.view.trust(0.0) is Trust.BLIND
    scene.view.on_opened()
    scene.view.on_part(SnapshotPart(E1, 5, Tier.DEVICE, (A,), last=False), 0.0)
    assert (scene.held, scene.view.trust(0.0)) == (set(), Trust.CATCHING_UP)
    scene.view.on_part(SnapshotPart(E1, 5, Tier.DEVICE, (B,), last=True), 0.0)
    assert scene.held == {A, B}
    assert scene.view.resume_from == (E1, 5)
    assert scene.view.trust(0.0) is Trust.CATCHING_UP, "proved only by a report"
    assert scene.view.on_report(summary(5, A, B), 0.0) is Need.NOTHING
    assert scene.view.trust(0.0) is Trust.EXACT


def test_events_are_counted_once_and_in_order() -> None:
    scene = Scene()
    scene.load()
    assert scene.view.on_event(stored(1, A), 0.0) is Need.NOTHING
    assert scene.view.on_event(stored(1, A), 0.0) is Need.NOTHING
    assert scene.view.on_event(Removed(E1, 2, Tier.DEVICE, (A,)), 0.0) is Need.NOTHING
    assert scene.view.on_event(stored(1, A), 0.0) is Need.NOTHING, "overtaken"
    assert (scene.held, scene.view.state(Tier.DEVICE)) == (set(), TierState(0, 0))
    assert not scene.view.causes


def test_a_gap_asks_for_one_snapshot_and_the_old_stream_is_heard_no_more() -> None:
    scene = Scene()
    scene.load(A)
    assert scene.view.on_event(stored(2, B), 0.0) is Need.SNAPSHOT
    assert scene.view.on_event(stored(3, C), 0.0) is Need.NOTHING
    assert scene.view.on_report(summary(3, A), 0.0) is Need.NOTHING
    assert (scene.held, scene.view.resume_from) == ({A}, None), (
        "what was known counts until the snapshot has come"
    )
    scene.load(A, B, C, sequence=3)
    assert scene.view.on_report(summary(3, A, B, C), 0.0) is Need.NOTHING
    assert scene.view.causes == {"gap": 1}


def test_sums_that_differ_ask_for_a_snapshot() -> None:
    scene = Scene()
    scene.load(A)
    assert scene.view.on_report(summary(0, A, B), 0.0) is Need.SNAPSHOT
    assert scene.view.causes == {"sums_differ": 1}


def test_a_report_from_before_is_no_proof_and_one_from_ahead_shows_a_loss() -> None:
    scene = Scene()
    scene.load(A)
    scene.view.on_event(stored(1, B), 0.0)
    assert scene.view.on_report(summary(0, C), 0.0) is Need.NOTHING
    assert scene.view.trust(0.0) is Trust.CATCHING_UP
    assert scene.view.on_report(summary(2, A, B), 0.0) is Need.SNAPSHOT


def test_what_was_cleared_is_not_believed_even_on_a_stream_that_is_heard_no_more() -> None:
    scene = Scene()
    scene.load(A)
    assert scene.view.on_event(stored(5, B), 0.0) is Need.SNAPSHOT
    assert scene.view.on_event(Cleared(E2, 0), 0.0) is Need.NOTHING
    assert (scene.held, scene.view.resume_from) == (set(), None)


def test_after_a_flush_events_alone_make_the_view_exact() -> None:
    scene = Scene()
    scene.load(A)
    scene.view.on_event(Cleared(E2, 0), 0.0)
    scene.view.on_event(stored(1, B, epoch=E2), 0.0)
    assert scene.view.on_report(summary(1, B, epoch=E2), 0.0) is Need.NOTHING
    assert (scene.held, scene.view.trust(0.0)) == ({B}, Trust.EXACT)


def test_an_epoch_whose_beginning_was_lost_empties_the_view_and_asks() -> None:
    scene = Scene()
    scene.load(A)
    assert scene.view.on_event(stored(1, B, epoch=E2), 0.0) is Need.SNAPSHOT
    assert (scene.held, scene.view.trust(0.0)) == (set(), Trust.BLIND)


def test_anything_before_the_last_part_shows_that_a_part_was_lost() -> None:
    scene = Scene()
    scene.view.on_opened()
    scene.view.on_part(SnapshotPart(E1, 0, Tier.DEVICE, (A,), last=False), 0.0)
    assert scene.view.on_event(stored(1, B), 0.0) is Need.SNAPSHOT
    assert scene.view.causes == {"part_lost": 1}
    scene.index.check_invariants()


def test_a_broken_stream_may_be_resumed_and_silence_makes_the_view_stale() -> None:
    scene = Scene()
    scene.load(A)
    scene.view.on_report(summary(0, A), 1.0)
    scene.view.on_broken()
    assert (scene.view.trust(1.0), scene.view.resume_from) == (Trust.CATCHING_UP, (E1, 0))
    assert scene.view.trust(4.5) is Trust.STALE
    assert scene.held == {A}
    scene.view.on_opened()
    assert scene.view.on_event(stored(1, B), 5.0) is Need.NOTHING
    assert scene.view.on_report(summary(1, A, B), 5.0) is Need.NOTHING
    assert scene.view.trust(5.0) is Trust.EXACT


def test_predictions_outlive_a_snapshot_and_a_flush_but_not_the_worker() -> None:
    scene = Scene()
    scene.load(A)
    scene.predictions.expect(scene.view.slot, [A, B])
    for change in (lambda: scene.load(A, sequence=7), lambda: scene.view.on_event(Cleared(E2, 0), 0.0)):
        change()
        found = scene.index.find_matches([A, B, C], scene.predictions.masks)
        assert found.device == [Fall(1 << scene.view.slot, 2)]
    scene.view.on_new_life()
    assert (len(scene.predictions), scene.held, scene.view.trust(0.0)) == (0, set(), Trust.BLIND)


def test_a_closed_view_gives_back_its_slots() -> None:
    scene = Scene()
    scene.load(A)
    scene.view.on_opened()
    scene.view.on_part(SnapshotPart(E1, 9, Tier.DEVICE, (A,), last=False), 0.0)
    scene.view.close()
    assert scene.index.open_slot() == 0
    scene.index.check_invariants()
