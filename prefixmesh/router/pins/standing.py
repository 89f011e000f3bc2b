"""How a wish stands: which workers hold it, which will, and how many are still to be found. Pure.

A worker *holds* a wish when it can be used, says that it has the pin with nothing missing, and its events prove it. It is *coming* while that can be
expected without choosing anybody else; it is *doubtful* when it cannot: it has failed and is left alone for a while, or its proof does not
come. A doubtful worker's pin stays until enough others hold, and is let go then, so that no replica is given up for one that is not there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from prefixmesh.ids import Incarnation
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.config import PinControllerConfig
from prefixmesh.router.pins.failures import Memory
from prefixmesh.router.pins.scene import Scene, can_at_all
from prefixmesh.router.pins.site import NOT_TOLD, Site
from prefixmesh.router.pins.sizes import has_prompt, proof_tokens
from prefixmesh.router.pins.wishes import PinSeen, Wish, WorkerSeen

RENEWAL_SLACK_S: Final = 1.0
"""A worker's pin that ends by so much before its wish is asked for again: less is the time that a call takes."""


@dataclass(kw_only=True, slots=True)
class Standing:
    """One wish, one step."""

    wish: Wish
    wanted: int
    held: list[Site] = field(default_factory=list)
    coming: list[Site] = field(default_factory=list)
    doubtful: list[Site] = field(default_factory=list)
    away: list[Site] = field(default_factory=list)
    """Expected back, or to tell for the first time: they may hold it."""

    again: list[Site] = field(default_factory=list)
    """Of those that hold or come: a ``Warm`` is due, for what is missing or for a time that is to begin anew."""

    @property
    def short(self) -> int:
        """Workers that are still to be found."""
        return max(0, self.wanted - len(self.held) - len(self.coming) - len(self.away))

    @property
    def is_whole(self) -> bool:
        """Whether all that are wanted hold it. Where nobody can at all, nobody does."""
        return len(self.held) >= max(1, self.wanted)


class Standings:
    """Judges how wishes stand; remembers since when workers cannot be used, and since when proofs are waited for."""

    def __init__(self, config: PinControllerConfig, memory: Memory) -> None:
        self._config = config
        self._memory = memory
        self._away_since: dict[Endpoint, float] = {}
        self._expected: frozenset[Endpoint] = frozenset()
        self._unproven_since: dict[tuple[Endpoint, Incarnation, str], float] = {}
        self._unproven_now: dict[tuple[Endpoint, Incarnation, str], float] = {}

    def observe(self, workers: dict[Endpoint, WorkerSeen], now: float) -> None:
        """A step begins. O(workers)."""
        self._away_since = {
            name: self._away_since.get(name, now)
            for name, seen in workers.items()
            if not seen.draining and (not seen.usable or seen.budget_tokens == NOT_TOLD)
        }
        patience = self._config.patience_s
        self._expected = frozenset(n for n, since in self._away_since.items() if now - since < patience)

    def judge_all(self, scene: Scene) -> list[Standing]:
        """All wishes of a step, in the order of their keys. O(pins), and O(workers) for each wish of all workers."""
        self._unproven_now = {}
        standings = [self.judge(wish, scene) for wish in scene.wishes.values()]
        self._unproven_since = self._unproven_now
        return standings

    def judge(self, wish: Wish, scene: Scene) -> Standing:
        """One wish."""
        standing = Standing(wish=wish, wanted=wish.replicas or _all_that_can(wish, scene))
        if wish.replicas and self._expected:
            standing.away = [site for site in scene.sites if self._may_come_back(wish, site)]
        usable = [site for site in scene.carries(wish) if site.seen.usable]
        if not has_prompt(wish.version):
            _judge_adapter(standing, usable)
            return standing
        pin_id = wish.pin_id  # made once: a fleet has thousands of pins
        for site in usable:
            self._judge_pin(standing, site, pin_id, scene.now)
        return standing

    def is_paused(self, wish: Wish, site: Site, now: float) -> bool:
        """Whether the worker has failed at it, and is left alone for now."""
        return self._memory.warms.is_paused(site.seen.endpoint, site.seen.incarnation, wish.pin_id, now)

    def is_in_vain(self, wish: Wish, site: Site, now: float) -> bool:
        """Whether the worker has said lately that it was done, and was not seen to hold it since."""
        return self._memory.vain.is_paused(site.seen.endpoint, site.seen.incarnation, wish.pin_id, now)

    def _may_come_back(self, wish: Wish, site: Site) -> bool:
        """A worker that has told nothing yet may hold anything."""
        if site.seen.endpoint not in self._expected:
            return False
        return site.has(wish.pin_id) or site.seen.budget_tokens == NOT_TOLD

    def _judge_pin(self, standing: Standing, site: Site, pin_id: str, now: float) -> None:
        wish, pin = standing.wish, site.pins.get(pin_id)
        if pin_id in site.leaving:
            return
        is_whole = pin is not None and pin.missing_tokens <= 0 and pin_id not in site.shaky
        if pin is not None and is_whole and self._is_proven(wish, site, pin_id):
            standing.held.append(site)
            self._memory.vain.succeeded(site.seen.endpoint, site.seen.incarnation, pin_id)
            if _ends_early(pin, wish) and pin_id not in site.warming and not self.is_paused(wish, site, now):
                standing.again.append(site)
        elif pin_id in site.warming:
            standing.coming.append(site)
        elif self._is_doubtful(wish, site, now, is_whole=is_whole):
            standing.doubtful.append(site)
        else:
            standing.coming.append(site)
            if not is_whole:
                standing.again.append(site)

    def _is_doubtful(self, wish: Wish, site: Site, now: float, *, is_whole: bool) -> bool:
        if self.is_paused(wish, site, now):
            return True
        if is_whole:
            return self._waits_too_long(wish.pin_id, site, now)
        return self.is_in_vain(wish, site, now)

    def is_proven(self, wish: Wish, site: Site) -> bool:
        """Whether the worker's events prove that it has all of the version's whole blocks."""
        return self._is_proven(wish, site, wish.pin_id)

    def _is_proven(self, wish: Wish, site: Site, pin_id: str) -> bool:
        least = proof_tokens(wish.version, site.seen.page_size, self._config.block_size)
        return site.seen.proven.get(pin_id, 0) >= least

    def _waits_too_long(self, pin_id: str, site: Site, now: float) -> bool:
        key = (site.seen.endpoint, site.seen.incarnation, pin_id)
        since = self._unproven_since.get(key, now)
        self._unproven_now[key] = since
        return now - since >= self._config.proof_within_s


def _judge_adapter(standing: Standing, sites: Iterable[Site]) -> None:
    for site in sites:
        if standing.wish.version.adapter_digest in site.resident:
            standing.held.append(site)
        elif standing.wish.pin_id in site.warming:
            standing.coming.append(site)


def _all_that_can(wish: Wish, scene: Scene) -> int:
    return sum(can_at_all(wish, site) for site in scene.sites)


def _ends_early(pin: PinSeen, wish: Wish) -> bool:
    if pin.expires_at is None:
        return False
    return wish.expires_at is None or pin.expires_at < wish.expires_at - RENEWAL_SLACK_S
