"""The two engines that ``prefixmesh bench engine`` measures: the default model in bfloat16 with the engine's defaults, and the same with
caching off. Loads torch and the model."""

import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter
from typing import Final

import torch

from prefixmesh.bench.engine_bench import Engines
from prefixmesh.bench.engine_drive import EngineDrive, TimedRunner
from prefixmesh.config import EngineConfig, describe
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.engine import Runner
from prefixmesh.worker.engine_builder import build_engine

BYTES: Final = 2
"""Of a bfloat16 weight."""

BENCH_CONFIG: Final = EngineConfig(dtype="bfloat16", device="cpu")


def open_engines(
    config: EngineConfig = BENCH_CONFIG,
    progress: Callable[[str], None] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Engines:
    """Load the model twice, once for each engine; both have a pool of the same size. Raises ConfigError and ModelFileError."""
    cached = open_drive(config, progress, clock)
    uncached = open_drive(
        dataclasses.replace(config, prefix_cache="off", max_total_tokens=cached.core.info.max_total_tokens),
        progress,
        clock,
    )
    model = read_model_config(resolve_model(config.model))
    step_weights = cached.core.info.prefill_shape.linear_flops_per_token // 2
    step_weights += model.vocab_size * model.hidden_size
    return Engines(
        cached=cached,
        uncached=uncached,
        step_bytes=step_weights * BYTES,
        threads=torch.get_num_threads(),
        versions={name: version(name) for name in ("prefixmesh", "torch", "numpy")},
        settings=describe(config),
    )


def open_drive(
    config: EngineConfig,
    progress: Callable[[str], None] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> EngineDrive:
    """One engine whose runner is timed."""
    timed: list[TimedRunner] = []

    def watch(runner: Runner) -> Runner:
        timed.append(TimedRunner(runner, clock))
        return timed[0]

    core = build_engine(config, progress, watch)
    return EngineDrive(core, timed[0], clock)
