"""From whom a worker may copy a wish's KV, the best first. Pure."""

from typing import Final

from prefixmesh.kv_source import KvSource
from prefixmesh.router.pins.scene import Scene
from prefixmesh.router.pins.site import Site
from prefixmesh.router.pins.wishes import Wish

MAX_SOURCES: Final = 3
"""Each that fails costs a call's time before the prefix is computed after all."""


def sources_for(wish: Wish, site: Site, scene: Scene) -> list[KvSource]:
    """Other workers of the same layout that have some of it, pinned or not: who has most, then who has least to do. A worker that drains is as good as
    any. O(workers)."""
    layout = site.seen.kv_layout
    if not layout:
        return []
    offers: list[tuple[int, float, str, Site]] = []
    for other in scene.sites:
        seen = other.seen
        if other is site or seen.kv_layout != layout or not (seen.usable or seen.draining):
            continue
        tokens = _has(wish, other)
        if tokens > 0:
            offers.append((-tokens, seen.work_ms, seen.endpoint, other))
    offers.sort(key=lambda offer: offer[:3])
    return [
        KvSource(
            address=other.seen.endpoint,
            incarnation=other.seen.incarnation,
            tokens=-tokens,
            boundary_tokens=wish.version.boundary_tokens,
        )
        for tokens, _, _, other in offers[:MAX_SOURCES]
    ]


def _has(wish: Wish, site: Site) -> int:
    """Leading tokens that it has on its device, by its events, or by its own word."""
    pin = site.pins.get(wish.pin_id)
    told = pin.held_tokens if pin is not None else 0
    return min(site.size(wish), max(told, site.seen.proven.get(wish.pin_id, 0)))
