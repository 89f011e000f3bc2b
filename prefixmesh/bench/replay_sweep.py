"""The same replay with other sizes: what more room, or more workers, would change."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay import replay
from prefixmesh.sim.replay_figures import ReplayFigures
from prefixmesh.sim.replay_log import ReplayLog
from prefixmesh.sim.replay_spec import MAX_WORKERS, ReplaySpec
from prefixmesh.sim.workload import Workload

FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of each size: two doublings either way, in which a share that grows with room is seen to bend."""


class Run(NamedTuple):
    """One policy on one fleet."""

    policy: str
    spec: ReplaySpec


class Sweep(NamedTuple):
    """Figures by size, of every run by its label. Of those that were replayed for it the logs are left out: there are many, as long as the
    workload."""

    by_device_tokens: Mapping[str, Mapping[int, ReplayFigures]]
    by_workers: Mapping[str, Mapping[int, ReplayFigures]]


def sweep(
    workload: Workload,
    runs: Mapping[str, Run],
    found: Mapping[str, ReplayFigures],
    progress: Callable[[str], None] | None = None,
) -> Sweep:
    """Every run again with its workers' room, and then their number, times ``FACTORS``; ``found`` has those at 1. ``progress`` is told of each
    before it begins. Sizes that a replay refuses are left out: where a request would have no room, beside what is pinned too, or would wait for
    more than a week. So are fleets beyond ``MAX_WORKERS``."""

    def figures(label: str, policy: str, specs: Mapping[int, ReplaySpec]) -> dict[int, ReplayFigures]:
        of = {}
        for size, spec in specs.items():
            if spec == runs[label].spec:
                of[size] = found[label]
                continue
            if progress is not None:
                progress(f"{label}, {spec.workers:,} workers of {spec.device_tokens:,} tokens")
            with suppress(ConfigError):
                of[size] = replace(replay(workload, spec, policy), log=ReplayLog())
        return of

    rooms, fleets = {}, {}
    for label, (policy, spec) in runs.items():
        tokens = [size for one in FACTORS if (size := round(one * spec.device_tokens))]
        rooms[label] = figures(label, policy, {one: replace(spec, device_tokens=one) for one in tokens})
        sizes = {max(1, round(one * spec.workers)) for one in FACTORS}
        workers = [size for size in sorted(sizes) if size <= MAX_WORKERS]
        fleets[label] = figures(label, policy, {one: replace(spec, workers=one) for one in workers})
    return Sweep(rooms, fleets)
