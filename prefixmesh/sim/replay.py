"""A workload replayed through a fleet, block by block: where requests go, what they find cached, and how long they wait.

The block-level form: fast enough to compare many policies on traces of ten thousands of requests, at the price of what it leaves out.

    real here            ``RouterCore`` and all that is in it: index, views, predictions, reservations, cost, every one of its policies
    in block form here   caches (``replay_cache``) and engines (``replay_worker``), whose modules say what they leave out
    by arithmetic        speeds, and how long loads of adapters take (``replay_adapters``)
    not here             networks, faults, pins, front ends

``fleet_run`` is the other form: real caches, schedulers and news over a network, some hundred times as slow. Nothing here is by the
machine's clock but the time of our router's decisions, which decides nothing, so a run repeats to the microsecond.
"""

from collections.abc import Callable

from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay_cache import unit_blocks
from prefixmesh.sim.replay_figures import ReplayFigures, figures_of
from prefixmesh.sim.replay_fleet import Fleet
from prefixmesh.sim.replay_spec import POLICIES, ReplaySpec
from prefixmesh.sim.workload import Workload
from prefixmesh.worker.adapters import MAX_NAMES


def replay(
    workload: Workload,
    spec: ReplaySpec,
    policy: str,
    progress: Callable[[int], None] | None = None,
) -> ReplayFigures:
    """Replay a workload by one policy. ``progress`` is told how many requests have ended, now and then.

    Some half a millisecond a request of this machine's time. Raises ConfigError for a policy that is none, for
    a cache that is too small for a request, and for more adapters than a worker knows.
    """
    if policy not in POLICIES:
        raise ConfigError(f"no policy is called {policy!r}; there are: {', '.join(POLICIES)}")
    _refuse_too_small(workload, spec)
    _refuse_too_many_adapters(workload, spec)
    fleet = Fleet(workload, spec, policy)
    fleet.run(progress)
    return figures_of(fleet.log, fleet.workers, spec.objective, fleet.decisions_s)


def _refuse_too_small(workload: Workload, spec: ReplaySpec) -> None:
    """A request that would never have room."""
    largest = max(one.input_length + one.output_length for one in workload.requests)
    size = workload.block_size * unit_blocks(spec.cache, workload.block_size)
    blocks = -(-largest // size)
    if spec.device_tokens // size < blocks:
        raise ConfigError(
            f"device_tokens must hold the largest request, {largest} tokens in blocks of {size}, got {spec.device_tokens}"
        )


def _refuse_too_many_adapters(workload: Workload, spec: ReplaySpec) -> None:
    """More than a worker can be told of."""
    adapters = {one.adapter for one in workload.requests if one.adapter}
    if spec.max_resident_adapters and len(adapters) > MAX_NAMES:
        raise ConfigError(
            f"adapter: a worker knows at most {MAX_NAMES} by name, the workload has {len(adapters)}; "
            "max_resident_adapters 0 has them all in memory"
        )
