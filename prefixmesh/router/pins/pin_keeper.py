"""The loop that sees to it that pins are as they are wished: it gathers what is seen, asks the controller, and has done what that orders.

Every router runs it, so that each can tell how far a pin is; only the one that holds the lease has anything done. It runs some times a
second, and at once when something has changed; it waits for nobody, and no request waits for it.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from prefixmesh.errors import PrefixmeshError
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.acting_lease import ActingLease
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.controller import PinController
from prefixmesh.router.pins.pin_actions import PinActions
from prefixmesh.router.pins.pin_roster import KnownPin, PinRoster
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.pins.wishes import Action, PinVersion, Wish, WishStatus, WorkerSeen
from prefixmesh.router.pins.worker_pins import WorkerPins
from prefixmesh.router.pins.workers_seen import Proofs, prove, seen_workers
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.state_store import StateStore
from prefixmesh.router.workers import WorkerPool

_log = logging.getLogger(__name__)

ROUND_S: Final = 0.25
"""Between two rounds at most."""

LEAST_GAP_S: Final = 0.02
"""And at least: a thousand changes at once are one."""

MOST_SHARE: Final = 0.25
"""Of the loop's time that rounds may take: with very many pins, or workers, they come less often."""

_ON_THE_WAY: Final = frozenset({"warming", "waiting"})
"""States of a replica that is to come."""

WISHES_AT_A_TIME: Final = 64
"""Looked up in the index before others on the loop have their turn: a millisecond."""


class HeatWishes(Protocol):
    """Who wishes for prefixes because they are hot."""

    @property
    def is_known(self) -> bool:
        """Whether it has measured for long enough to say what is not hot."""
        ...

    def wishes(self, now: float, workers: Sequence[WorkerSeen]) -> Sequence[Wish]:
        """What is wished at ``now``, by the controller's clock."""
        ...


class PinKeeper:
    """``start`` it once, ``close`` it at the end."""

    def __init__(
        self,
        *,
        core: RouterCore,
        pool: WorkerPool,
        roster: PinRoster,
        store: StateStore,
        clock: StoreClock,
        router_id: str,
        now: Callable[[], float],
        block_size: int,
        set_public: Callable[[Sequence[PinVersion], int], object],
        heat: HeatWishes | None = None,
        config: PinControllerConfig | None = None,
    ) -> None:
        """``now`` is the core's clock, and the controller's. ``set_public`` takes the public pins that there are, and the largest page size
        of all workers, whenever either may have changed."""
        self._core = core
        self._roster = roster
        self._store = store
        self._clock = clock
        self._now = now
        self._block_size = block_size
        self._set_public = set_public
        self._heat = heat
        self._config = config or PinControllerConfig(block_size=block_size)
        self._changed = asyncio.Event()
        self.controller = PinController(self._config)
        self.actions = PinActions(pool, core.registry, self._config, now, self._note_end)
        self._told = WorkerPins(core.registry, pool, self.wake)
        self._lease = ActingLease(store, clock, router_id, self.wake)
        self._ordered: dict[int, Action] = {}
        """By this term's controller, and not ended."""

        self._was_acting = False
        self._judged: frozenset[str] = frozenset()
        """Pins, by their ids on workers, that the last round looked at."""

        self._running: asyncio.Task[None] | None = None
        self._removing: asyncio.Task[None] | None = None
        self.workers: Sequence[WorkerSeen] = ()
        """As they were seen in the last round."""

        self._wishes: Sequence[Wish] = ()
        """That the last round went by."""

        self._spent_s = 0.0
        """By the last round, of the loop's time."""

        self._has_heard = asyncio.Event()
        """Set once every worker that can be used had told of its pins."""

    @property
    def is_acting(self) -> bool:
        """Whether this router is the one that has pins kept. O(1)."""
        return self._lease.is_held

    def wake(self) -> None:
        """Something has changed: look at once."""
        self._changed.set()

    def wishes_changed(self) -> None:
        """There are other wishes: what every tenant may match is another at once."""
        self._tell_public(self._clock.unix_ms)
        self.wake()

    async def hear_of_all(self, patience_s: float) -> None:
        """Return once every worker has told what may be pinned there, or after ``patience_s``. At once but for a router that has just begun."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._has_heard.wait()

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        self._lease.start()
        self._running = asyncio.create_task(self._run(), name="pin-keeper")

    async def close(self) -> None:
        """Act no more, and let another router do so."""
        tasks = [task for task in (self._running, self._removing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.actions.close()
        await self._told.close()
        await self._lease.close()

    def status(self, pin: KnownPin) -> WishStatus | None:
        """How far a pin is, as of the last round; None where that has not looked at it yet. O(workers)."""
        if pin.wish is None or pin.wish.pin_id not in self._judged:
            return None
        return self.controller.status(pin.wish)

    def pins_to_move(self, endpoint: Endpoint) -> int:
        """Pins of a worker that leaves which others are getting, or are about to be asked for, as of the last round. What nobody has room for
        is none of them. O(wishes * workers)."""
        theirs = next((seen.pins for seen in self.workers if seen.endpoint == endpoint), {})
        statuses = [self.controller.status(wish) for wish in self._wishes if wish.pin_id in theirs]
        return sum(
            status.missing > 0 and any(one.state in _ON_THE_WAY for one in status.replicas)
            for status in statuses
        )

    async def _run(self) -> None:
        while True:
            self._spent_s = 0.0
            try:
                await self._round()
            except Exception:  # a bug of ours: what was ordered goes on, and the next round may find it well
                _log.exception("pins_round_failed")
            gap_s = max(LEAST_GAP_S, self._spent_s / MOST_SHARE)
            await asyncio.sleep(gap_s)
            await self._until_changed(max(0.0, ROUND_S - gap_s))

    async def _until_changed(self, patience_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._changed.wait()

    async def _round(self) -> None:
        """See, decide, have done."""
        self._changed.clear()
        self._roster.review()
        unix_ms = self._clock.unix_ms
        self._tell_public(unix_ms)
        self._told.refresh(self._now)
        # All of one moment: what comes to be known meanwhile would be missing from the wishes, and workers would let go of it.
        is_known, hidden = self._roster.is_settled, self._roster.unresolved()
        self._wishes = wishes = self._roster.wishes(unix_ms)
        if self._heat is not None:
            wishes.extend(self._heat.wishes(self._now(), self.workers))
        proofs: Proofs = {}
        for start in range(0, len(wishes), WISHES_AT_A_TIME):
            began = self._now()
            prove(self._core.view, wishes[start : start + WISHES_AT_A_TIME], self._block_size, proofs)
            self._spent_s += self._now() - began
            await asyncio.sleep(0)
        began = self._now()
        self.workers = seen_workers(self._core.fleet, self._told.told, proofs, hidden)
        usable = [worker for worker in self.workers if worker.usable]
        if usable and all(worker.pins_at > -math.inf for worker in usable):
            self._has_heard.set()
        self.actions.begin(self._decide(wishes if is_known else None))
        self._spent_s += self._now() - began
        self._remove_what_is_over(unix_ms)

    def _decide(self, wishes: Sequence[Wish] | None) -> Sequence[Action]:
        is_acting = self.is_acting
        if is_acting != self._was_acting:
            # Whoever acts anew goes by what it sees, and by nothing that was ordered in another term.
            self.controller = PinController(self._config)
            self._ordered = {}
            self._was_acting = is_acting
        self._judged = frozenset(wish.pin_id for wish in wishes or ())
        actions = self.controller.step(
            self._now(),
            wishes,
            self.workers,
            heat_is_known=self._heat is None or self._heat.is_known,
            acts=is_acting,
        )
        self._ordered.update((action.number, action) for action in actions)
        return actions

    def _note_end(self, action: Action, problem: str) -> None:
        if self._ordered.get(action.number) is action:  # else it was ordered in another term
            del self._ordered[action.number]
            self.controller.ended(action.number, problem, self._now())
        self._told.expect_change(action.endpoint)
        self.wake()

    def _tell_public(self, unix_ms: int) -> None:
        sizes = (entry.facts.page_size for entry in self._core.registry if entry.facts is not None)
        self._set_public(self._roster.public_versions(unix_ms), max(sizes, default=1))

    def _remove_what_is_over(self, unix_ms: int) -> None:
        over = self._roster.over(unix_ms)
        if over and self.is_acting and (self._removing is None or self._removing.done()):
            self._removing = asyncio.create_task(self._remove(over))

    async def _remove(self, over: Sequence[KnownPin]) -> None:
        """Forget pins that have ended by themselves, unless they are others by now."""
        for pin in over:
            try:
                if await self._store.delete(pin.record.name.key, expect=pin.store_version):
                    _log.info("pin_over owner=%r name=%r", *pin.record.name)
                    self._roster.drop(pin)
            except PrefixmeshError:
                await asyncio.sleep(ROUND_S)  # the store is gone: nobody wishes for them all the same
