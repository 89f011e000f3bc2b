"""What ``prefixmesh bench serve`` does with workers of its own: caches compared, a profile measured; and the same in simulated time beside it."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prefixmesh.errors import ConfigError

if TYPE_CHECKING:
    from prefixmesh.bench.serve_drive import ServeRun, ServeSpec
    from prefixmesh.bench.serve_pair import PairSpec
    from prefixmesh.sim.replay_figures import Objective, ReplayFigures
    from prefixmesh.sim.workload import Workload

SMALL_SERVICE: Final[Mapping[str, int]] = {
    "requests": 24,
    "concurrent": 2,
    "policies": 2,
    "policy_tokens": 512,
    "question_tokens": 30,
    "answer_tokens": 16,
    "least_turns": 2,
    "most_turns": 4,
}
"""Customer service that a small model on one core a worker serves in a minute or two."""

_CACHE: Final = "cache="


def small_service(seed: int, requests: int | None) -> "Workload":
    """What is sent where no workload is named."""
    from random import Random

    from prefixmesh.sim.workloads.catalogue import make_workload

    settings = SMALL_SERVICE if requests is None else {**SMALL_SERVICE, "requests": requests}
    return make_workload("customer-service", Random(seed).random, **settings)  # noqa: S311  to repeat


def caches_of(compare: str) -> Sequence[str]:
    """The kinds in ``cache=off,hash,radix``. Raises ConfigError for anything else."""
    from prefixmesh.sim.replay_cache import CACHE_KINDS

    kinds = tuple(dict.fromkeys(compare.removeprefix(_CACHE).split(",")))
    if not compare.startswith(_CACHE) or not all(kind in CACHE_KINDS for kind in kinds):
        raise ConfigError(f"compare must be {_CACHE} and some of {','.join(CACHE_KINDS)}, got {compare!r}")
    return kinds


def run_pairs(
    kinds: Sequence[str],
    pair: "PairSpec",
    make_spec: "Callable[[str], ServeSpec]",
    drive: "Callable[[ServeSpec, str], tuple[ServeRun, bool]]",
    tell: Callable[[str], None],
) -> "tuple[dict[str, ServeRun], bool]":
    """The workload on a fresh pair for each kind of cache, in turn; False where Ctrl-C ended that."""
    from prefixmesh.bench.serve_pair import running_pair

    found: dict[str, ServeRun] = {}
    for kind in kinds:
        tell(f"starting {pair.workers} workers of {pair.model} with --prefix-cache {kind}")
        with running_pair(pair, kind) as running:
            if not running.has_cores:
                tell("workers share cores here: figures are of that")
            found[kind], is_whole = drive(make_spec(running.router), kind)
        if not is_whole:
            return found, False
    return found, True


def calibrate(
    path: Path, pair: "PairSpec", seed: int, ids: int, tell: Callable[[str], None]
) -> Mapping[str, Any]:
    """Measure a pair and write its profile; what was written. Raises ConfigError when it cannot be."""
    import asyncio
    from dataclasses import asdict

    from prefixmesh.bench.serve_calibrate import Calibration, Effort, fit
    from prefixmesh.bench.serve_pair import running_pair

    tell(f"starting {pair.workers} workers of {pair.model}")
    with running_pair(pair, "off") as running:
        points = asyncio.run(Calibration(running.workers, Effort(), seed, ids, tell).measure())
        cores = "one core apiece" if running.has_cores else "sharing cores"
    source = (
        f"prefixmesh bench serve --calibrate: {pair.model}, {pair.workers} workers, all busy, {cores}, of "
        f"{os.cpu_count()} cores ({platform.machine()})"
    )
    profile = {"source": source, "timing": asdict(fit(points))}
    try:
        path.write_text(json.dumps(profile, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"calibrate {path}: {error.strerror}") from error
    measured = {
        "prefill": [point._asdict() for point in points.prefill],
        "decode": [point._asdict() for point in points.decode],
    }
    return profile | {"measured": measured}


def simulated(
    workload: "Workload",
    profile: str,
    *,
    cache: str,
    workers: int,
    device_tokens: int,
    spec: "ServeSpec",
    objective: "Objective",
) -> "ReplayFigures":
    """The same load in simulated time, by our policy."""
    from prefixmesh.sim.replay import replay
    from prefixmesh.sim.replay_profiles import read_profile
    from prefixmesh.sim.replay_spec import ReplaySpec

    kind: Any = cache
    fleet = ReplaySpec(
        workers=workers,
        device_tokens=device_tokens,
        cache=kind,
        timing=read_profile(profile).timing,
        speed=spec.speed,
        concurrency=spec.concurrency,
        seed=spec.seed,
        objective=objective,
    )
    return replay(workload, fleet, "cost")
