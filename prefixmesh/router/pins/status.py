"""How far a wish is, and why not further, in an operator's words. Pure."""

from collections.abc import Iterator
from typing import Final

from prefixmesh.router.pins.failures import Failure, Memory
from prefixmesh.router.pins.scene import Scene
from prefixmesh.router.pins.site import NOT_TOLD, Site
from prefixmesh.router.pins.sizes import has_prompt
from prefixmesh.router.pins.standing import Standing
from prefixmesh.router.pins.wishes import ReplicaState, ReplicaStatus, Wish, WishStatus

NEXT: Final = "is next, when a move is free"

MAX_REASONS: Final = 8
"""Told at once: an operator reads the first few, and a fleet may have hundreds of workers."""


def status_of(standing: Standing, scene: Scene, memory: Memory) -> WishStatus:
    """What there is to tell. O(workers)."""
    wanted, held = standing.wanted, len(standing.held)
    replicas = [*_replicas(standing, scene, memory), *_old_replicas(standing, scene)]
    return WishStatus(
        wanted=wanted,
        held=min(held, wanted),
        why=_why(standing, scene, memory) if held < wanted or not wanted else "",
        replicas=replicas,
    )


# Replicas.


def _replicas(standing: Standing, scene: Scene, memory: Memory) -> Iterator[ReplicaStatus]:
    wish = standing.wish
    for site in scene.carries(wish):
        pin = site.pins.get(wish.pin_id)
        if not has_prompt(wish.version) and site not in standing.held and site not in standing.coming:
            continue
        state, problem = _state(standing, site, scene, memory)
        yield ReplicaStatus(
            endpoint=site.seen.endpoint,
            worker_id=site.seen.worker_id,
            state=state,
            held_tokens=pin.held_tokens if pin is not None else 0,
            generation=wish.version.generation,
            problem=problem,
        )


def _state(standing: Standing, site: Site, scene: Scene, memory: Memory) -> tuple[ReplicaState, str]:
    pin_id = standing.wish.pin_id
    if pin_id in site.leaving:
        return "leaving", ""
    if site.seen.draining:
        return "leaving", "the worker drains"
    if not site.seen.usable:
        return "waiting", "the worker is not ready"
    if site in standing.held:
        return "held", ""
    if pin_id in site.warming or pin_id in site.chosen:
        return "warming", ""
    return ("failed" if site in standing.doubtful else "waiting"), _lack(standing, site, scene.now, memory)


def _lack(standing: Standing, site: Site, now: float, memory: Memory) -> str:
    """Why a worker that has the pin does not hold it."""
    pin_id = standing.wish.pin_id
    life = (site.seen.endpoint, site.seen.incarnation, pin_id)
    failure = memory.warms.last(*life)
    if failure is not None:
        return _failed(failure, now)
    pin = site.pins.get(pin_id)
    if pin is not None and pin.missing_tokens <= 0 and pin_id not in site.shaky:
        return "waiting for its events to prove that it holds it"
    vain = memory.vain.last(*life)
    if vain is not None and vain.until > now:
        return _failed(vain, now)
    missing = pin.missing_tokens if pin is not None else site.size(standing.wish)
    return f"{missing} tokens are missing"


def _failed(failure: Failure, now: float) -> str:
    wait = failure.until - now
    when = f"asked again in {wait:.0f} s" if wait > 0 else "to be asked again"
    return f"failed {failure.times} times in a row, {when}: {failure.problem}"


def _old_replicas(standing: Standing, scene: Scene) -> Iterator[ReplicaStatus]:
    for site, pin_id in scene.old.get(standing.wish.key, ()):
        generation = pin_id.rpartition("@")[2]
        yield ReplicaStatus(
            endpoint=site.seen.endpoint,
            worker_id=site.seen.worker_id,
            state="leaving" if pin_id in site.leaving else "held",
            held_tokens=site.pins[pin_id].held_tokens,
            generation=int(generation) if generation.isdecimal() else 0,
            problem="the version before",
        )


# Why.


def _why(standing: Standing, scene: Scene, memory: Memory) -> str:
    reasons = list(_reasons(standing, scene, memory))
    if not scene.sites:
        return "there are no workers"
    if not reasons and standing.wanted > len(standing.held):
        reasons.append(f"{standing.wanted} workers are wanted, and {len(scene.sites)} are there")
    told = "; ".join(reasons[:MAX_REASONS])
    more = len(reasons) - MAX_REASONS
    return f"{told}; and {more} workers more" if more > 0 else told


def _reasons(standing: Standing, scene: Scene, memory: Memory) -> Iterator[str]:
    """One a worker that does not hold it, in the order of their addresses."""
    for site in scene.sites:
        if site in standing.held:
            continue
        name = site.seen.worker_id or site.seen.endpoint
        reason = _reason(standing, site, scene, memory)
        yield f"{name}: {reason}"


def _reason(standing: Standing, site: Site, scene: Scene, memory: Memory) -> str:
    wish, seen = standing.wish, site.seen
    pin_id = wish.pin_id
    if seen.draining:
        return "drains"
    if not seen.usable:
        return "is not ready"
    if seen.budget_tokens == NOT_TOLD:
        return "has not told yet what may be pinned there"
    if wish.version.adapter_digest and wish.version.adapter_digest not in seen.adapters:
        return (
            f"needs the adapter {wish.version.adapter or wish.version.adapter_digest!r}, and does not have it"
        )
    if pin_id in site.leaving:
        return "is letting go of it"
    if pin_id in site.warming:
        return "is being warmed"
    if pin_id in site.pins:
        return _lack(standing, site, scene.now, memory)
    failure = memory.warms.last(seen.endpoint, seen.incarnation, pin_id)
    if failure is not None and scene.now < failure.until:
        return _failed(failure, scene.now)
    if pin_id in site.chosen:
        return NEXT  # the room that is gone there is its own
    problem = no_room(wish, site)
    if problem and any(carried.site is site for carried in scene.old.get(wish.key, ())):
        problem += ", beside the version before, which stays until another worker holds this one"
    return problem or NEXT


def no_room(wish: Wish, site: Site) -> str:
    """The sums, where ``wish`` has no room on a worker as things are; else empty. O(1)."""
    size = site.size(wish)
    if not size and has_prompt(wish.version):
        return f"the prompt is shorter than a page of {site.seen.page_size} tokens"
    room, budget = site.room(wish.tier, wish.owner), site.budget(wish.tier)
    if room.holds(size):
        return ""
    return (
        f"no room for {size} tokens on the {wish.tier.name.lower()}: of {budget.owner_left} for pins of "
        f"{wish.owner!r} {max(0, room.owner_left)} are free, of {budget.left} for all pins {max(0, room.left)}"
    )
