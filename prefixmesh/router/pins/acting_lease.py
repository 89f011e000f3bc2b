"""Which of several routers acts for the pins: the one that holds the lease in their common state.

Whoever holds it renews it several times before it ends, and stops acting by its end at the latest, reckoned by a clock that never jumps, from
before it was asked for: so there is never a second one, however late an answer is, and however the machines' clocks differ. While the
store is out of reach nobody renews, and soon nobody acts; serving needs neither.

Only a store that was emptied lets a second one act: the lease is gone with the rest, another router may take it before the first puts it back, and the
first learns of that when it asks next, within ``RENEW_S``, or at the end of its time. Both go by what they see, so what one does too much is undone.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from prefixmesh.errors import PrefixmeshError
from prefixmesh.router.pins.store_clock import StoreClock
from prefixmesh.router.state_lease import Lease, release_lease, renew_lease, take_lease
from prefixmesh.router.state_store import StateStore

_log = logging.getLogger(__name__)

LEASE: Final = "leases/pins"

LEASE_S: Final = 5.0
"""So long nobody acts for the pins when the router that did has died. Workers keep what they have meanwhile."""

RENEW_S: Final = 1.0
"""A fifth of it: some attempts may fail. Others look as often whether it is free."""


class ActingLease:
    """``start`` it once, ``close`` it at the end. Of a state that no other router can use, the lease is always held, and never written."""

    def __init__(
        self,
        store: StateStore,
        clock: StoreClock,
        owner: str,
        on_change: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_change`` is called when it was taken or lost."""
        self._store = store
        self._clock = clock
        self._owner = owner
        self._on_change = on_change
        self._monotonic = monotonic
        self._lease: Lease | None = None
        self._held_until = -math.inf
        self._was_held = False
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this router is the one that acts. O(1)."""
        return self._monotonic() < self._held_until

    def start(self) -> None:
        """Take it as soon as it is free, and keep it. Needs a running event loop."""
        self._keeping = asyncio.create_task(self._keep(), name="pin-lease")

    async def close(self) -> None:
        """Let another router have it at once."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        self._held_until = -math.inf
        if self._lease is not None:
            with suppress(PrefixmeshError):
                await release_lease(self._store, self._lease)

    async def ask(self) -> None:
        """Take or renew it, where that can be. Raises UnavailableError while the store cannot be asked."""
        began = self._monotonic()
        now = (
            await self._clock.ask()
        )  # not before `began`: so the entry in the store ends no sooner than what is held here
        if not self._store.is_shared:
            self._held_until = math.inf
            return
        renewed = None
        if self._lease is not None:
            renewed = await renew_lease(self._store, self._lease, LEASE_S, now)
        self._lease = renewed or await take_lease(self._store, LEASE, self._owner, LEASE_S, now)
        self._held_until = -math.inf if self._lease is None else began + LEASE_S

    async def _keep(self) -> None:
        is_lost = False
        while True:
            try:
                await self.ask()
                is_lost = False
            except PrefixmeshError as error:
                if not is_lost:
                    _log.warning("pins_lease_not_asked problem=%r", str(error))
                is_lost = True
            except Exception:  # a bug of ours: pins go on as they are, and it is tried again
                _log.exception("pins_lease_failed")
            self._tell()
            await asyncio.sleep(RENEW_S)

    def _tell(self) -> None:
        if self.is_held != self._was_held:
            self._was_held = self.is_held
            _log.info("pins_acting router=%s acting=%s", self._owner, self._was_held)
            self._on_change()
