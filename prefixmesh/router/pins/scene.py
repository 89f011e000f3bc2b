"""The fleet in one step, and which worker carries which version of which wish. Pure: made anew in each step, O(workers' pins + wishes).

A pin of a worker is *current* when a wish asks for it by its id, *old* when its id is that of another version of a wish, and *stray* when
nobody wishes it, or not any more. What the controller did not name is none of these: it is charged, and left alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.site import NOT_TOLD, Site
from prefixmesh.router.pins.sizes import has_prompt
from prefixmesh.router.pins.under_way import UnderWay
from prefixmesh.router.pins.wishes import Wish, WorkerSeen

PIN_SOURCE: Final = "pin/"
HEAT_SOURCE: Final = "heat/"


class Carried(NamedTuple):
    """A pin on a worker."""

    site: Site
    pin_id: str


class Scene:
    """What one step looks at; ``take`` of its sites is all that changes in it."""

    def __init__(
        self, now: float, wishes: Iterable[Wish], workers: Mapping[Endpoint, WorkerSeen], under_way: UnderWay
    ) -> None:
        """Wishes that have expired are left out."""
        self.now = now
        self.wishes = {
            wish.key: wish
            for wish in sorted(wishes, key=_key)
            if wish.expires_at is None or now < wish.expires_at
        }
        """By key, in its order."""
        self.current = {wish.pin_id: wish for wish in self.wishes.values()}
        """By pin id."""
        self.heat = [wish.pin_id for wish in reversed(self.wishes.values()) if wish.source == "heat"]
        """Pin ids of what heat wishes, in the order in which it gives way."""
        self.sites = [Site(workers[name], under_way, self.current) for name in sorted(workers)]
        """In the order of their endpoints."""
        self.carriers: dict[str, list[Site]] = {}
        """Who has a current pin, or is getting it, by pin id."""
        self.old: dict[str, list[Carried]] = {}
        """By the key of the wish."""
        self.stray: list[Carried] = []
        for site in self.sites:
            for pin_id in site.pins:
                self._enter(site, pin_id)
            for pin_id in site.warming:
                if pin_id not in site.pins and pin_id in self.current:
                    self.carriers.setdefault(pin_id, []).append(site)
        self.stray_ids = {(carried.site.seen.endpoint, carried.pin_id) for carried in self.stray}

    def _enter(self, site: Site, pin_id: str) -> None:
        if pin_id in self.current:
            self.carriers.setdefault(pin_id, []).append(site)
        elif pin_id.startswith((PIN_SOURCE, HEAT_SOURCE)):
            key = pin_id.rpartition("@")[0]
            if key in self.wishes:
                self.old.setdefault(key, []).append(Carried(site, pin_id))
            else:
                self.stray.append(Carried(site, pin_id))

    def carries(self, wish: Wish) -> Sequence[Site]:
        """Who has the wish's version, or is getting it. An adapter alone is no pin: all workers are looked at."""
        return self.carriers.get(wish.pin_id, ()) if has_prompt(wish.version) else self.sites


def can_at_all(wish: Wish, site: Site) -> bool:
    """Whether the worker could hold ``wish`` if nothing else were pinned there: it can be used, has told its budgets, knows the adapter,
    and is large enough. O(1)."""
    seen = site.seen
    digest = wish.version.adapter_digest
    if not seen.usable or seen.budget_tokens == NOT_TOLD or (digest and digest not in seen.adapters):
        return False
    size = site.size(wish)
    return (size > 0 or not has_prompt(wish.version)) and site.budget(wish.tier).holds(size)


def _key(wish: Wish) -> str:
    return wish.key
