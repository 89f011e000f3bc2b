"""Takes the figures of ``prefixmesh bench tiers``, one part after another.

Everything goes through ``EngineCore`` in this process, as its own process drives it; neither gRPC nor a socket is in a figure. What is
compared is measured in one run, and what takes time in turns. Prompts are random ids from one seed.
"""

import dataclasses
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from time import perf_counter
from typing import Final

import torch

from prefixmesh.bench.engine_drive import EngineDrive, TimedRunner
from prefixmesh.bench.engine_figures import Setup
from prefixmesh.bench.tier_backups import take_backups
from prefixmesh.bench.tier_figures import Report
from prefixmesh.bench.tier_load_back import take_load_back
from prefixmesh.bench.tier_plan import FIGURES, PARTS, Effort, parts
from prefixmesh.bench.tier_restart import take_restart
from prefixmesh.bench.tier_stage import Stage, TierEngine
from prefixmesh.bench.tier_turns import take_turns
from prefixmesh.bench.timed_mover import TimedMover
from prefixmesh.config import EngineConfig, describe
from prefixmesh.worker.engine import Runner
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.runner import ModelRunner
from prefixmesh.worker.tiers.copies import Mover

BENCH_CONFIG: Final = EngineConfig(device="cpu")

TAKE: Final[Mapping[str, Callable[[Stage], None]]] = {
    "turns": take_turns,
    "load_back": take_load_back,
    "backups": take_backups,
    "restart": take_restart,
}


def run_tiers_bench(
    effort: Effort,
    config: EngineConfig = BENCH_CONFIG,
    only: frozenset[str] = frozenset(),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure every part that ``only`` names (empty for all); ``progress`` is told what comes next. Takes some minutes. Raises
    ConfigError and ModelFileError."""
    stage = Stage(effort, config, open_tier_engine)
    for part in parts(only):
        progress(f"{part}: " + ", ".join(FIGURES[name].title.strip() for name in PARTS[part]))
        TAKE[part](stage)
    info = stage.info
    return Report(
        setup=Setup(
            model=info.model,
            dtype=info.dtype,
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)),
            versions={
                "python": platform.python_version(),
                **{name: version(name) for name in ("prefixmesh", "torch", "numpy")},
            },
            sizes=dataclasses.asdict(effort),
            settings=describe(config),
        ),
        results=sorted(stage.results, key=lambda result: list(FIGURES).index(result.figure.name)),
    )


def open_tier_engine(config: EngineConfig) -> TierEngine:
    """An engine whose runner and, where it has one, mover are timed. Seconds."""
    runners: list[TimedRunner] = []
    movers: list[TimedMover] = []
    pools: list[KVPool] = []

    def watch(runner: Runner) -> Runner:
        assert isinstance(runner, ModelRunner)
        pools.append(runner.pool)
        runners.append(TimedRunner(runner, perf_counter))
        return runners[0]

    def watch_mover(mover: Mover) -> Mover:
        movers.append(TimedMover(mover, perf_counter))
        return movers[0]

    core = build_engine(config, watch=watch, watch_mover=watch_mover)
    if movers:
        pools[0].arrivals = movers[0]
    return TierEngine(drive=EngineDrive(core, runners[0], perf_counter), mover=movers[0] if movers else None)
