"""Which worker is warmed next for a wish that is short of one. Pure.

Of those that can take it, with room as things are, in this order:

1. who has failed at it least often lately;
2. who has all of it cached already, so that nothing needs to move;
3. who has an older version: that is where its traffic goes, and where room is let go of once the new version is held;
4. the fewest replicas of it on the same host;
5. a place among its moves free;
6. who can copy it from one that holds it, or will;
7. the least work, in steps of ``WORK_STEP_MS``;
8. the smallest part of its budget taken;
9. its address.

Load tells only where a replica comes to be. None is ever moved for it, so a load that swings moves nothing back and forth. When nobody has
room as things are, it is looked for where pins are to go: strays, what heat has made (which gives way to what operators ask for), and,
of the wish itself, an older version that others hold as well.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prefixmesh.router.pins.failures import Memory
from prefixmesh.router.pins.rolling import Rolling
from prefixmesh.router.pins.scene import Scene, can_at_all
from prefixmesh.router.pins.site import Room, Site
from prefixmesh.router.pins.standing import Standing, Standings
from prefixmesh.router.pins.wishes import Wish

WORK_STEP_MS: Final = 500.0
"""Differences in accepted work below this are those of a moment; a pin stays for hours."""

Rank = tuple[int, int, int, int, int, int, int, float, str]


class Choice(NamedTuple):
    """A worker, and which of its pins must go before it can take the wish."""

    site: Site
    must_go: Sequence[str] = ()


class Chooser:
    """Chooses for one step after another; remembers nothing itself."""

    def __init__(self, standings: Standings, memory: Memory, rolling: Rolling, moves_per_worker: int) -> None:
        self._standings = standings
        self._memory = memory
        self._rolling = rolling
        self._moves_per_worker = moves_per_worker

    def choose(self, standing: Standing, scene: Scene) -> Choice | None:
        """The worker to warm; None where nobody can take it now. O(workers), and O(pins of each) where nobody has room."""
        wish = standing.wish
        able = [site for site in scene.sites if self.is_candidate(wish, site, scene.now)]
        roomy = [site for site in able if site.room(wish.tier, wish.owner).holds(site.size(wish))]
        if roomy:
            hosts = Counter(site.seen.host for site in (*standing.held, *standing.coming, *standing.away))
            layouts = {site.seen.kv_layout for site in (*standing.held, *standing.coming)} - {""}
            old = {carried.site.seen.endpoint for carried in scene.old.get(wish.key, ())}
            return Choice(min(roomy, key=lambda site: self._rank(wish, site, hosts, layouts, old)))
        return self._where_pins_go(standing, scene, able)

    def is_candidate(self, wish: Wish, site: Site, now: float) -> bool:
        """Whether it could be asked for it now, room aside. O(1)."""
        return (
            site.lacks(wish)
            and can_at_all(wish, site)
            and not self._standings.is_paused(wish, site, now)
            and not self._standings.is_in_vain(wish, site, now)
        )

    def _rank(
        self, wish: Wish, site: Site, hosts: Counter[str], layouts: set[str], old: Iterable[str]
    ) -> Rank:
        seen = site.seen
        life = (seen.endpoint, seen.incarnation, wish.pin_id)
        failure = self._memory.warms.last(*life) or self._memory.vain.last(*life)
        budget = site.budget(wish.tier).left
        return (
            failure.times if failure else 0,
            0 if self._standings.is_proven(wish, site) else 1,
            0 if seen.endpoint in old else 1,
            hosts[seen.host],
            0 if site.moves < self._moves_per_worker else 1,
            0 if not layouts or seen.kv_layout in layouts else 1,
            int(seen.work_ms // WORK_STEP_MS),
            site.charged(wish.tier) / budget if budget > 0 else 0.0,
            seen.endpoint,
        )

    def _where_pins_go(self, standing: Standing, scene: Scene, able: Sequence[Site]) -> Choice | None:
        """The worker where the fewest tokens must go."""
        best: tuple[int, str, Choice] | None = None
        for site in able:
            must_go = self._must_go(standing, site, scene)
            if must_go is None:
                continue
            tokens = sum(site.charge_of(pin_id).size for pin_id in must_go if pin_id not in site.leaving)
            offer = (tokens, site.seen.endpoint, Choice(site, must_go))
            if best is None or offer[:2] < best[:2]:
                best = offer
        return best[2] if best else None

    def _must_go(self, standing: Standing, site: Site, scene: Scene) -> list[str] | None:
        """Pins that leave room for the wish when they are gone; None where that is not enough. O(its pins)."""
        wish = standing.wish
        room = site.room(wish.tier, wish.owner)
        size = site.size(wish)
        must_go: list[str] = []
        for pin_id in self._may_go(standing, site, scene):
            tier, owner, freed = site.charge_of(pin_id)
            if tier is not wish.tier:
                continue
            must_go.append(pin_id)
            room = Room(room.left + freed, room.owner_left + (freed if owner == wish.owner else 0))
            if room.holds(size):
                return must_go
        return None

    def _may_go(self, standing: Standing, site: Site, scene: Scene) -> list[str]:
        """In the order in which they are to go: what leaves already, strays, an older version of the wish, heat."""
        wish, seen = standing.wish, site.seen
        stray = [pin_id for pin_id in site.pins if (seen.endpoint, pin_id) in scene.stray_ids]
        old = self._rolling.may_go(standing, site, scene)
        heat = [pin_id for pin_id in scene.heat if pin_id in site.pins] if wish.source == "pin" else []
        order = dict.fromkeys([*sorted(site.leaving), *stray, *old, *heat])
        return [
            pin_id
            for pin_id in order
            if pin_id in site.pins
            and not self._memory.unpins.is_paused(seen.endpoint, seen.incarnation, pin_id, scene.now)
        ]
