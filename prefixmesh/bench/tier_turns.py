"""How much of many conversations' prompts is cached where the device holds a third of them: the part ``turns`` of the bench."""

from typing import Final

from prefixmesh.bench.tier_plan import DEVICE_SHARE
from prefixmesh.bench.tier_stage import Stage
from prefixmesh.bench.tier_talks import Heard, Talks, hold_talks, make_talks
from prefixmesh.worker.engine_stats import TierCounts

UNBOUNDED: Final = 2.0
"""Of the working set: a device that never evicts."""

EVERYTHING: Final = 1.1
"""Of the working set. What is cached on the device is on the host as well, so that a host tier that holds everything has room for all of
it, and some more for what is being written."""


def take_turns(stage: Stage) -> None:
    """The same conversations on a device of any size, on one of a third of them, and on that with host tiers of two sizes."""
    effort, size = stage.effort, stage.whole_pages
    working_set = effort.working_set
    third = size(working_set / DEVICE_SHARE)
    with stage.engine(max_total_tokens=size(working_set * UNBOUNDED)) as engine:
        talks = make_talks(effort, stage.draw, stage.rng)
        unbounded = hold_talks(engine.drive, talks)
    with stage.engine(max_total_tokens=third) as engine:
        alone = hold_talks(engine.drive, talks)
    sizes = {"working_set_tokens": float(working_set), "device_tokens": float(third)}
    stage.add("share_device_only", [alone.share], sizes | alone.notes(unbounded))
    host = _with_host(stage, talks, third, EVERYTHING * working_set, unbounded, "share_host")
    _with_host(stage, talks, third, working_set - third, unbounded, "share_host_rest")
    stage.add("share_unbounded", [unbounded.share], unbounded.notes(unbounded))
    stage.add("share_of_unbounded", [host.share / unbounded.share])


def _with_host(
    stage: Stage, talks: Talks, device: int, host_tokens: float, unbounded: Heard, name: str
) -> Heard:
    host = stage.whole_pages(host_tokens)
    with stage.engine(max_total_tokens=device, hicache_ratio=host / device) as engine:
        heard = hold_talks(engine.drive, talks)
        tiers = engine.drive.core.stats().tiers
    stage.add(name, [heard.share], {"host_tokens": float(host)} | heard.notes(unbounded) | _moved(tiers))
    return heard


def _moved(tiers: TierCounts) -> dict[str, float]:
    names = ("backed_up_tokens", "dropped_tokens", "loaded_back_tokens", "recomputed_tokens", "failed_copies")
    return {name: float(getattr(tiers, name)) for name in names}
