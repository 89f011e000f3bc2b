"""All views together: whose blocks a match is, how trust changes and what is told of that."""

from prefixmesh.cache.events import CacheSummary, Cleared, SnapshotPart, Stored, TierState
from prefixmesh.cache.tier import Tier
from prefixmesh.ids import Epoch, Fingerprint
from prefixmesh.proto.cache_news import EventBatch
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_columns import FleetColumns
from prefixmesh.router.fleet_view import MAX_CHANGES, TRUST_SHARES, FleetView, TrustChange, silence_of
from prefixmesh.router.worker_view import SILENT_INTERVALS, Need, Trust
from prefixmesh.worker_report import WorkerReport

A, B, C = (Fingerprint(n << 56 | n) for n in (1, 2, 3))
E = Epoch(7)
ONE, TWO = Endpoint("one"), Endpoint("two")
NOW = 10.0


class Scene:
    def __init__(self) -> None:
        self.columns = FleetColumns()
        self.view = FleetView(1000, self.columns)
        self.rows = {}
        for endpoint in (ONE, TWO):
            row = self.rows[endpoint] = self.columns.open_row(endpoint)
            self.view.add(endpoint, row, NOW)

    def load(self, endpoint: Endpoint, *names: Fingerprint, tier: Tier = Tier.DEVICE) -> None:
        self.view.opened(endpoint, 0.1, NOW)
        self.view.take(endpoint, SnapshotPart(E, 0, tier, names, last=True), NOW)

    def store(self, endpoint: Endpoint, sequence: int, *names: Fingerprint) -> Need:
        batch = EventBatch([Stored(E, sequence, Tier.DEVICE, None, names)])
        return self.view.take(endpoint, batch, NOW)

    def report(self, endpoint: Endpoint, sequence: int, *names: int, now: float = NOW) -> Need:
        digest = 0
        for name in names:
            digest ^= name
        states = (TierState(len(names), digest), TierState(0, 0))
        return self.view.take(endpoint, WorkerReport(summary=CacheSummary(E, sequence, states)), now)

    def matched(self, *names: Fingerprint) -> list[float]:
        """Blocks on the device, by row."""
        self.view.check_invariants()
        found = self.view.find_matches(names)
        return list(self.view.slot_rows.spread(found, 1, self.columns.rows).device)

    @property
    def changes(self) -> list[tuple[str, str, str, str]]:
        return [(c.endpoint, c.before.value, c.after.value, c.cause) for c in self.view.take_changes()]


def test_a_match_is_the_workers_whichever_slot_its_view_has_now() -> None:
    """A snapshot is filled into another slot, and counts for nobody before its last part."""
    scene = Scene()
    scene.load(ONE, A, B)
    scene.load(TWO, A)
    assert scene.matched(A, B) == [2.0, 1.0]
    scene.view.opened(ONE, 0.1, NOW)
    scene.view.take(ONE, SnapshotPart(Epoch(8), 0, Tier.DEVICE, (A, C), last=False), NOW)
    assert scene.matched(A, C) == [1.0, 1.0]
    scene.view.take(ONE, SnapshotPart(Epoch(8), 0, Tier.DEVICE, (B,), last=True), NOW)
    assert scene.matched(A, C) == [2.0, 1.0]


def test_each_change_of_trust_is_told_once_with_its_cause_and_weighs_in_decisions() -> None:
    scene = Scene()
    scene.load(ONE, A)
    scene.report(ONE, 0, A)
    assert scene.changes == [
        ("one", "blind", "catching_up", "snapshot"),
        ("one", "catching_up", "exact", "proved"),
    ]
    assert scene.columns.trust[scene.rows[ONE]] == 1.0
    scene.store(ONE, 1, B)
    scene.report(ONE, 1, A, B)
    assert scene.changes == [], "events change what is held, and nothing else"
    assert scene.store(ONE, 5, C) is Need.SNAPSHOT
    assert scene.changes == [("one", "exact", "catching_up", "gap")]
    assert scene.columns.trust[scene.rows[ONE]] == TRUST_SHARES[Trust.CATCHING_UP]
    followed = scene.view.get(ONE)
    assert followed is not None
    assert followed.changes == {"catching_up": 2, "exact": 1}
    assert followed.view.causes == {"gap": 1}


def test_flush_is_caught_up_with_by_the_next_report() -> None:
    scene = Scene()
    scene.load(ONE, A)
    scene.report(ONE, 0, A)
    scene.view.take_changes()
    scene.view.take(ONE, EventBatch([Cleared(Epoch(9), 0)]), NOW)
    assert scene.matched(A) == [0.0, 0.0]
    assert scene.changes == [("one", "exact", "catching_up", "cleared")]


def test_silence_is_noticed_by_the_review_and_forgotten_with_the_next_word() -> None:
    scene = Scene()
    scene.load(ONE, A)
    scene.report(ONE, 0, A)
    scene.view.take_changes()
    scene.view.review(NOW + silence_of(0.1) - 0.01)
    assert scene.changes == []
    scene.view.review(NOW + silence_of(0.1) + 0.01)
    assert scene.changes == [("one", "exact", "stale", "silence")]
    assert scene.matched(A) == [1.0, 0.0], "what was known counts, by half"
    scene.report(ONE, 0, A, now=NOW + 5.0)
    assert scene.changes == [("one", "stale", "exact", "proved")]


def test_end_of_a_stream_keeps_what_is_known_and_where_to_go_on() -> None:
    scene = Scene()
    scene.load(ONE, A)
    scene.report(ONE, 0, A)
    scene.view.ended(ONE, "unavailable", NOW)
    assert scene.changes[-1] == ("one", "exact", "catching_up", "unavailable")
    assert scene.view.opened(ONE, 0.1, NOW) == (E, 0)


def test_what_made_no_sense_is_not_gone_on_from() -> None:
    scene = Scene()
    scene.load(ONE, A)
    scene.view.ended(ONE, "malformed", NOW, is_void=True)
    assert scene.view.opened(ONE, 0.1, NOW) is None
    assert scene.matched(A) == [1.0, 0.0], "what was known counts until the snapshot has come"


def test_new_life_empties_the_view_and_what_lingers_there() -> None:
    scene = Scene()
    scene.load(ONE, A)
    scene.report(ONE, 0, A)
    followed = scene.view.get(ONE)
    assert followed is not None
    followed.lingering.keep("r", scene.view.expect(ONE, [A, B]), [], NOW)
    assert scene.matched(A, B) == [2.0, 0.0]
    scene.view.new_life(ONE, NOW)
    assert scene.matched(A, B) == [0.0, 0.0]
    assert scene.changes[-1] == ("one", "exact", "blind", "new_life")
    assert len(scene.view.predictions) == 0


def test_a_snapshot_takes_along_what_is_predicted_in_pieces() -> None:
    """An answer's blocks go on from its prompt's, in a prediction of their own; with the worker's slot all of them move."""
    scene = Scene()
    scene.load(ONE, A)
    lingering = next(followed for endpoint, followed in scene.view if endpoint == ONE).lingering
    later, sooner = scene.view.expect(ONE, [A, B]), scene.view.expect(ONE, [A])
    lingering.keep("sooner", sooner, [scene.view.expect(ONE, [B, C])], NOW)
    lingering.keep("later", later, [scene.view.expect(ONE, [C])], NOW)
    for sequence in range(3):
        scene.view.opened(ONE, 0.1, NOW)
        scene.view.take(ONE, SnapshotPart(Epoch(50 + sequence), 0, Tier.DEVICE, (), last=True), NOW)
        assert scene.matched(A, B, C) == [3.0, 0.0]
    lingering.told(["later"])
    assert scene.matched(A, B, C) == [3.0, 0.0]
    lingering.clear()
    assert scene.matched(A, B, C) == [0.0, 0.0]


def test_removed_worker_leaves_nothing_in_the_index() -> None:
    scene = Scene()
    scene.load(ONE, A, B)
    scene.load(TWO, A)
    scene.view.expect(ONE, [A, B, C])
    scene.view.remove(ONE)
    assert scene.matched(A, B, C) == [0.0, 1.0]
    while scene.view.index.needs_sweep:
        scene.view.review(NOW)
    assert (len(scene.view.index), len(scene.view.predictions)) == (1, 0)


def test_host_blocks_are_counted_by_their_own_tier() -> None:
    """F26: the view never shows more than the worker's own sums."""
    scene = Scene()
    scene.load(ONE, A, B, tier=Tier.HOST)
    followed = scene.view.get(ONE)
    assert followed is not None
    assert [followed.view.state(tier).count for tier in Tier] == [0, 2]
    found = scene.view.find_matches([A, B])
    spread = scene.view.slot_rows.spread(found, 1, scene.columns.rows)
    assert (list(spread.device), list(spread.total)) == ([0.0, 0.0], [2.0, 0.0])


def test_changes_that_nobody_looks_at_are_bounded() -> None:
    scene = Scene()
    for number in range(MAX_CHANGES):
        scene.load(ONE, A)
        scene.view.new_life(ONE, NOW + number)
    changes = scene.view.take_changes()
    assert len(changes) == MAX_CHANGES
    assert changes[-1] == TrustChange(ONE, Trust.CATCHING_UP, Trust.BLIND, "new_life")


def test_a_silence_is_at_least_three_intervals_and_no_hiccup() -> None:
    """F30."""
    assert SILENT_INTERVALS >= 3.0
    assert silence_of(5.0) == SILENT_INTERVALS * 5.0
    assert silence_of(0.05) >= 2.0


def test_it_shows_what_it_is() -> None:
    scene = Scene()
    scene.load(ONE, A)
    assert repr(scene.view).startswith("FleetView(1 blind, 1 catching_up | <BlockIndex 1 of")
