"""What a router believes of all its workers' caches: one index, one view a worker, and how far each may be believed. Pure.

Each worker's stream of news goes to its own view; what comes out is told onward: a change of trust as a ``TrustChange`` (for whoever
logs and counts, and as a share for decisions), what the shell must do as a ``Need``, and where its blocks are in the index as
``slot_rows``.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from prefixmesh.cache.events import SnapshotPart
from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InvariantError
from prefixmesh.ids import Epoch, Fingerprint
from prefixmesh.proto.cache_news import EventBatch, News
from prefixmesh.router.block_index import BlockIndex, Matches
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_columns import FleetColumns
from prefixmesh.router.lingering import Lingering
from prefixmesh.router.matched_tokens import SlotRows
from prefixmesh.router.predictions import Prediction, Predictions
from prefixmesh.router.worker_view import SILENT_INTERVALS, Need, Trust, WorkerView

LEAST_SILENCE_S: Final = 2.0
"""A worker that has said nothing for less is not silent, however short its reports' interval: machines under load pause."""

TRUST_SHARES: Final = {Trust.EXACT: 1.0, Trust.CATCHING_UP: 0.9, Trust.STALE: 0.5, Trust.BLIND: 0.5}
"""How much of a match counts. A view that is being caught up with is mostly right, since what was cleared is never in it. A silent
worker may have evicted anything. Of one that nothing is known of, only this router's own predictions match at all."""

MAX_CHANGES: Final = 1024
"""Changes kept for whoever has not looked yet."""

SWEEP_BLOCKS: Final = 8_192
"""Blocks looked at in one review where the index has something to tidy: some three milliseconds."""


class TrustChange(NamedTuple):
    """A view is believed more or less than before."""

    endpoint: Endpoint
    before: Trust
    after: Trust
    cause: str


class Followed:
    """One worker's view, and its history."""

    __slots__ = ("changes", "lingering", "row", "slot", "trust", "view")

    def __init__(self, view: WorkerView, lingering: Lingering, row: int) -> None:
        self.view = view
        self.lingering = lingering
        self.row = row
        """The worker's place in ``FleetColumns``."""

        self.slot = view.slot
        self.trust = Trust.BLIND
        """As noted last."""

        self.changes: Counter[str] = Counter()
        """How often trust has become what it is called."""

    @property
    def blocks(self) -> int:
        """Blocks on the device, as the worker has told."""
        return self.view.state(Tier.DEVICE).count

    @property
    def host_blocks(self) -> int:
        """Blocks on the host, those on the device too among them."""
        return self.view.state(Tier.HOST).count


class FleetView:
    """The views of all workers by address. Not thread-safe. What is said of an unknown address is late, and ignored.

    Told by a stream: ``opened``, then ``take`` for each message, at last ``ended``. ``review`` it a few times a second.
    """

    def __init__(self, max_blocks: int, columns: FleetColumns) -> None:
        self.index = BlockIndex(max_blocks)
        self.predictions = Predictions()
        self.slot_rows = SlotRows()
        """The row of the worker that is matched by a slot. A slot that is being filled has none."""

        self._columns = columns
        self._followed: dict[Endpoint, Followed] = {}
        self._changes: deque[TrustChange] = deque(maxlen=MAX_CHANGES)

    def __iter__(self) -> Iterator[tuple[Endpoint, Followed]]:
        return iter(self._followed.items())

    def __repr__(self) -> str:
        trusts = Counter(followed.trust.value for followed in self._followed.values())
        states = ", ".join(f"{count} {trust}" for trust, count in sorted(trusts.items()))
        return f"FleetView({states or 'nobody'} | {self.index!r}, {len(self.predictions)} predictions)"

    def get(self, endpoint: Endpoint) -> Followed | None:
        """What is known of a worker's cache; None when it is not followed."""
        return self._followed.get(endpoint)

    def add(self, endpoint: Endpoint, row: int, now: float) -> Followed:
        """Follow a worker from now on. It must not be followed already."""
        assert endpoint not in self._followed, endpoint
        view = WorkerView(self.index, self.predictions, report_interval_s=LEAST_SILENCE_S, now=now)
        followed = self._followed[endpoint] = Followed(view, Lingering(self.predictions), row)
        self.slot_rows.bind(view.slot, row)
        self._columns.set_trust(row, TRUST_SHARES[followed.trust])
        return followed

    def remove(self, endpoint: Endpoint) -> None:
        """Forget a worker and all that is expected there. O(different sets of holders)."""
        followed = self._followed.pop(endpoint, None)
        if followed is not None:
            self.slot_rows.unbind(followed.slot)
            followed.lingering.clear()
            followed.view.close()

    def opened(
        self, endpoint: Endpoint, report_interval_s: float, now: float, *, tells: bool = True
    ) -> tuple[Epoch, int] | None:
        """A stream is about to begin. Where it is to go on; None: with a snapshot. ``tells`` is whether it is of the cache at all, and not
        of the load alone."""
        followed = self._followed.get(endpoint)
        if followed is None:
            return None
        followed.view.silent_s = silence_of(report_interval_s)
        followed.lingering.tells = tells
        place = followed.view.resume_from
        followed.view.on_opened()
        self._note(endpoint, followed, "opened", now)
        return place

    def take(self, endpoint: Endpoint, news: News, now: float) -> Need:
        """A message of the stream. O(its fingerprints)."""
        followed = self._followed.get(endpoint)
        if followed is None:
            return Need.NOTHING
        view = followed.view
        if not followed.lingering.tells:
            view.heard(now)
            return Need.NOTHING
        asked = view.causes.total()
        need, cause = Need.NOTHING, "proved"
        if isinstance(news, SnapshotPart):
            cause = "snapshot"
            view.on_part(news, now)
        elif isinstance(news, EventBatch):
            cause = "cleared"
            for event in news.events:
                if view.on_event(event, now) is Need.SNAPSHOT:
                    need = Need.SNAPSHOT
        else:
            need = view.on_report(news.summary, now)
            followed.lingering.told(news.ended)
        if view.causes.total() != asked:
            cause = view.last_cause
        self._note(endpoint, followed, cause, now)
        return need

    def ended(self, endpoint: Endpoint, cause: str, now: float, *, is_void: bool = False) -> None:
        """The stream is over. ``is_void``: what it said last made no sense, and only a snapshot helps."""
        followed = self._followed.get(endpoint)
        if followed is not None:
            if is_void:
                followed.view.distrust(cause)
            followed.view.on_broken()
            self._note(endpoint, followed, cause, now)

    def tells_nothing(self, endpoint: Endpoint, now: float) -> None:
        """The worker's cache says nothing of its blocks: what was sent there is believed for a while."""
        followed = self._followed.get(endpoint)
        if followed is not None:
            followed.view.on_broken()
            followed.lingering.tells = False
            self._note(endpoint, followed, "tells_nothing", now)

    def new_life(self, endpoint: Endpoint, now: float) -> None:
        """The worker has restarted: its cache is empty, and nothing that was expected will come."""
        followed = self._followed.get(endpoint)
        if followed is not None:
            followed.lingering.clear()
            followed.view.on_new_life()
            self._note(endpoint, followed, "new_life", now)

    def find_matches(self, fingerprints: Sequence[Fingerprint]) -> Matches:
        """What every slot holds of a prompt, or is expected to. O(blocks walked)."""
        return self.index.find_matches(fingerprints, self.predictions.masks)

    def find_told(self, fingerprints: Sequence[Fingerprint]) -> Matches:
        """What every slot holds of a prompt by its worker's own word: nothing that is only expected. O(blocks walked)."""
        return self.index.find_matches(fingerprints)

    def expect(self, endpoint: Endpoint, fingerprints: Sequence[Fingerprint]) -> Prediction:
        """A request with these blocks goes to a worker. O(fingerprints)."""
        return self.predictions.expect(self._followed[endpoint].view.slot, fingerprints)

    def review(self, now: float) -> None:
        """See who has become silent, end what has lingered, and tidy the index a little. O(workers)."""
        for endpoint, followed in self._followed.items():
            followed.lingering.expire(now)
            self._note(endpoint, followed, "silence", now)
        if self.index.needs_sweep:
            self.index.sweep(SWEEP_BLOCKS)

    def take_changes(self) -> list[TrustChange]:
        """The changes of trust since the last call, oldest first."""
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def check_invariants(self) -> None:
        """Recompute everything; raises InvariantError. O(blocks)."""
        self.index.check_invariants()
        self.predictions.check_invariants()
        for endpoint, followed in self._followed.items():
            if followed.slot != followed.view.slot:
                raise InvariantError(f"{self!r}: {endpoint} is matched by a slot that is not its view's")

    def _note(self, endpoint: Endpoint, followed: Followed, cause: str, now: float) -> None:
        """Take over where the view is now, in the index and in trust."""
        slot = followed.view.slot
        if slot != followed.slot:
            self.slot_rows.unbind(followed.slot)
            self.slot_rows.bind(slot, followed.row)
            followed.slot = slot
        trust = followed.view.trust(now)
        if trust is not followed.trust:
            self._changes.append(TrustChange(endpoint, followed.trust, trust, cause))
            followed.trust = trust
            followed.changes[trust.value] += 1
            self._columns.set_trust(followed.row, TRUST_SHARES[trust])


def silence_of(report_interval_s: float) -> float:
    """After how long without news a worker is silent."""
    return max(SILENT_INTERVALS * report_interval_s, LEAST_SILENCE_S)
