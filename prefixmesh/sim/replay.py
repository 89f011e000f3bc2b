"""A workload replayed through a fleet, block by block: where requests go, what they find cached, and how long they wait.

The block-level form: fast enough to compare many policies on traces of ten thousands of requests, at the price of what it leaves out.

    real here            ``RouterCore`` and all that is in it: index, views, predictions, reservations, cost, every one of its policies
    in block form here   caches (``replay_cache``) and engines (``replay_worker``), whose modules say what they leave out
    pins                 placed by the real controller once, before the first request (``replay_pins``)
    by arithmetic        speeds, and how long loads of adapters take (``replay_adapters``)
    not here             networks, faults, front ends

``fleet_run`` is the other form: real caches, schedulers and news over a network, some hundred times as slow. Nothing here is by the
machine's clock but the time of our router's decisions, which decides nothing, so a run repeats to the microsecond.
"""

from array import array
from collections.abc import Callable
from typing import Final

from prefixmesh.errors import ConfigError
from prefixmesh.sim.replay_cache import unit_blocks
from prefixmesh.sim.replay_figures import ReplayFigures, figures_of
from prefixmesh.sim.replay_fleet import MAX_SIMULATED_S, Fleet, blocks_of_largest
from prefixmesh.sim.replay_spec import POLICIES, ReplaySpec
from prefixmesh.sim.workload import Workload
from prefixmesh.worker.adapters import MAX_NAMES

_MS_PER_S: Final = 1e3


def replay(
    workload: Workload,
    spec: ReplaySpec,
    policy: str,
    progress: Callable[[int], None] | None = None,
) -> ReplayFigures:
    """Replay a workload by one policy. ``progress`` is told how many requests have ended, now and then.

    Some half a millisecond a request of this machine's time. Raises ConfigError for a policy that is none, for
    a cache that is too small for a request, for more adapters than a worker knows, and for what lasts longer than ``MAX_SIMULATED_S``.
    """
    if policy not in POLICIES:
        raise ConfigError(f"no policy is called {policy!r}; there are: {', '.join(POLICIES)}")
    _refuse_too_small(workload, spec)
    _refuse_too_many_adapters(workload, spec)
    _refuse_too_long(workload, spec)
    fleet = Fleet(workload, spec, policy)
    fleet.run(progress)
    return figures_of(fleet.log, fleet.workers, spec.objective, fleet.decisions_s, fleet.pins)


def _refuse_too_small(workload: Workload, spec: ReplaySpec) -> None:
    """A request that would never have room."""
    largest = max(one.input_length + one.output_length for one in workload.requests)
    unit = unit_blocks(spec.cache, workload.block_size)
    size, blocks = workload.block_size * unit, blocks_of_largest(workload.requests, workload.block_size, unit)
    if spec.device_tokens // size < blocks:
        raise ConfigError(
            f"device_tokens must hold the largest request, {largest} tokens in blocks of {size}, got {spec.device_tokens}: "
            f"that takes {blocks * size}"
        )


def _refuse_too_many_adapters(workload: Workload, spec: ReplaySpec) -> None:
    """More than a worker can be told of."""
    adapters = {one.adapter for one in workload.requests if one.adapter}
    if spec.max_resident_adapters and len(adapters) > MAX_NAMES:
        raise ConfigError(
            f"adapter: a worker knows at most {MAX_NAMES} by name, the workload has {len(adapters)}; "
            "max_resident_adapters 0 has them all in memory"
        )


def _refuse_too_long(workload: Workload, spec: ReplaySpec) -> None:
    """Arrivals, pauses and answers that last too long even where nobody waits for anybody. O(requests)."""
    timing, ends_s = spec.timing, array("d")
    for number, request in enumerate(workload.requests):
        length, answer = request.input_length, request.output_length
        if request.after is not None:
            comes_s = ends_s[request.after] + request.pause_ms / _MS_PER_S
        elif spec.concurrency:
            comes_s = 0.0
        else:
            comes_s = (request.arrival_ms or 0) / _MS_PER_S / spec.speed
        # All of the prompt found, as it may be, but for its last token.
        alone_ms = timing.step_ms + timing.prefill_ms(1, length - 1)
        alone_ms += max(0, answer - 1) * timing.decode_step_ms(1, length)
        ends_s.append(comes_s + alone_ms / _MS_PER_S)
        if ends_s[-1] > MAX_SIMULATED_S:
            raise ConfigError(
                f"request {number} comes after {comes_s:.6g} s by the workload and speed {spec.speed:g}, and takes {alone_ms:.6g} ms alone by "
                f"the profile: a replay lasts at most {MAX_SIMULATED_S:,.0f} s"
            )
