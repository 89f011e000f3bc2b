"""From one version of a wish to the next: which pins of the old one may be let go, and when. Pure.

Both exist for a while. A worker's old pin goes

* when that worker holds the new version;
* when as many workers as are wanted hold the new version;
* when some do, and no worker can take the new version now;
* to make room on that worker, where nobody has room for both: one worker at a time, and only while some other holds the wish, whatever the version.

So the last holder of an old version stays until another worker holds the new one, or it does itself. A fleet of one worker, without room for
both, keeps the old version: an operator who would rather have a moment without any removes the pin, and puts it anew.
"""

from prefixmesh.ids import Incarnation
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.pins.scene import Carried, Scene
from prefixmesh.router.pins.site import Site
from prefixmesh.router.pins.standing import Standing


class Rolling:
    """Decides for one step after another; remembers where room was made last. Not thread-safe."""

    def __init__(self, patience_s: float) -> None:
        """``patience_s``: for so long no other worker makes room for a wish while the one that has made it does not hold the new version."""
        self._patience_s = patience_s
        self._made: dict[str, tuple[Endpoint, Incarnation, float]] = {}

    def superfluous(self, standing: Standing, scene: Scene) -> list[Carried]:
        """Old pins that nothing is gained from. O(those of the wish)."""
        old = scene.old.get(standing.wish.key, [])
        if standing.is_whole:
            return old
        return [carried for carried in old if carried.site in standing.held]

    def left_over(self, standing: Standing, scene: Scene) -> list[Carried]:
        """The same, when nobody can take the new version now."""
        is_all_there_can_be = standing.held and not standing.coming and not standing.away
        return scene.old.get(standing.wish.key, []) if is_all_there_can_be else []

    def may_go(self, standing: Standing, site: Site, scene: Scene) -> list[str]:
        """Old versions that ``site`` may let go of to make room for the new one."""
        key = standing.wish.key
        carried = scene.old.get(key, ())
        here = [pin_id for other, pin_id in carried if other is site]
        if not here or standing.coming or self._waits_for_another(standing, site):
            return []
        is_covered = bool(standing.held) or any(_holds(other) for other in carried if other.site is not site)
        return here if is_covered else []

    def made_room(self, key: str, site: Site, now: float) -> None:
        """An old version was let go of there for the new one."""
        self._made[key] = (site.seen.endpoint, site.seen.incarnation, now)

    def observe(self, standings: list[Standing], scene: Scene) -> None:
        """Forget where room was made for what is held there by now, for wishes that are no more, and long ago. O(places)."""
        if not self._made:
            return
        held = {
            standing.wish.key: {(site.seen.endpoint, site.seen.incarnation) for site in standing.held}
            for standing in standings
        }
        lives = {(site.seen.endpoint, site.seen.incarnation) for site in scene.sites}
        for key, (endpoint, incarnation, at) in list(self._made.items()):
            life = (endpoint, incarnation)
            is_over = life not in lives or life in held.get(key, {life})
            if is_over or scene.now - at >= self._patience_s:
                del self._made[key]

    def _waits_for_another(self, standing: Standing, site: Site) -> bool:
        made = self._made.get(standing.wish.key)
        return made is not None and made[0] != site.seen.endpoint


def _holds(carried: Carried) -> bool:
    site, pin_id = carried
    return site.seen.usable and site.has(pin_id) and site.pins[pin_id].missing_tokens <= 0
