"""Put a model together from the engine's settings: files, weights, a pool that fits, attention, and the figures measured."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import ModelConfig, read_model_config
from prefixmesh.model_files.source import ModelFiles
from prefixmesh.worker.model.attention_choice import check_backend, choose_attention
from prefixmesh.worker.model.cuda_graphs import record_on_gpu
from prefixmesh.worker.model.device import make_current, resolve_device, resolve_dtype
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.lora import LoraSlots
from prefixmesh.worker.model.memory import (
    MemorySums,
    read_cpu_memory,
    read_device_memory,
    size_host_pool,
    size_pool,
)
from prefixmesh.worker.model.runner import ModelRates, ModelRunner
from prefixmesh.worker.tiers.copies import Mover
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.open_mover import load_back_ms_per_token, open_mover, staging_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedModel:
    """A model that is ready to run."""

    config: ModelConfig
    runner: ModelRunner
    sums: MemorySums
    rates: ModelRates
    device: torch.device
    dtype: torch.dtype
    adapters: LoraSlots | None = None
    """Where adapters' weights go; None without an ``adapter_root``."""

    host: HostPool | None = None
    """The host tier's pages; None without one, as all that follows."""

    mover: Mover | None = None
    """Copies between the pool and the host tier. Whoever owns the model closes it."""

    load_back_ms_per_token: float | None = None
    """What it was measured to take to bring a token's KV back from the host."""


def open_model(
    files: ModelFiles,
    engine: EngineConfig,
    progress: Callable[[str], None] | None = None,
    on_copied: Callable[[], None] | None = None,
) -> OpenedModel:
    """Load, size, warm up and measure. ConfigError when settings do not fit the machine, ModelFileError for bad files.

    ``progress`` is told what happens, a line at a time. ``on_copied`` is called, on any thread, after each copy between the tiers that
    has ended, once the model is open. Sets torch's thread count, for the whole process, only when
    ``engine.threads`` names one.
    """
    tell = progress or (lambda _: None)
    if engine.threads:
        torch.set_num_threads(engine.threads)
    device = resolve_device(engine.device)
    make_current(device)
    dtype = resolve_dtype(engine.dtype, device)
    config = read_model_config(files)
    check_backend(engine.attention_backend, config, dtype, device)
    tell(f"loading {files.name} as {str(dtype).removeprefix('torch.')} on {device}")
    if config.sliding_window == config.context_length:
        tell(
            f"contexts of up to {config.context_length:,} tokens: beyond, its sliding_window would hide some"
        )
    adapters = _open_adapters(engine, config, dtype, device)
    weights = load_weights(files, config, dtype, device)
    sums = size_pool(
        memory=read_device_memory(device, weights.num_bytes),
        weights_bytes=weights.num_bytes,
        kv_bytes_per_token=config.kv_bytes_per_token(dtype.itemsize),
        page_size=engine.page_size,
        context_length=config.context_length,
        mem_fraction_static=engine.mem_fraction_static,
        max_total_tokens=engine.max_total_tokens,
        on_cpu=device.type == "cpu",
        adapter_bytes=0 if adapters is None else adapters.budget_bytes,
    )
    if engine.has_host_tier:
        sums = size_host_pool(
            sums,
            ratio=engine.hicache_ratio,
            size_gib=engine.hicache_size,
            staging_bytes=staging_bytes(device),
            host_memory=None if device.type == "cpu" else read_cpu_memory(0),
        )
    tell(sums.describe())
    logger.info("memory_sums %s", sums.describe())
    scratch_pages = 0 if device.type == "cpu" else 1  # for the dummies of recorded steps
    pool = KVPool(config, sums.num_pages, engine.page_size, dtype, device, scratch_pages=scratch_pages)
    attention = choose_attention(config, pool, engine.attention_backend)
    runner = ModelRunner(config, weights, pool, attention, adapters)
    if device.type != "cpu" and engine.cuda_graphs:
        tell(record_on_gpu(runner, attention, engine.max_running_requests))
    rates = runner.profile()
    logger.info(
        "model_profiled prefill_tokens_per_s=%.0f decode_step_ms=%.1f",
        rates.prefill_tokens_per_s,
        rates.decode_step_ms,
    )
    host = mover = load_back_ms = None
    if sums.host_pages:
        host = HostPool(pool, sums.host_pages)
        mover = open_mover(pool, host)
        load_back_ms = load_back_ms_per_token(mover, pool, host)
        logger.info("load_back_profiled ms_per_token=%.4f", load_back_ms)
        mover.on_done = on_copied
        pool.arrivals = mover
    return OpenedModel(
        config=config,
        runner=runner,
        sums=sums,
        rates=rates,
        device=device,
        dtype=dtype,
        adapters=adapters,
        host=host,
        mover=mover,
        load_back_ms_per_token=load_back_ms,
    )


def _open_adapters(
    engine: EngineConfig, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> LoraSlots | None:
    if engine.adapter_root is None:
        return None
    if not Path(engine.adapter_root).is_dir():
        raise ConfigError(f"adapter_root must be a folder, {engine.adapter_root} is none")
    root, sizes = AdapterRoot(engine.adapter_root), LinearSizes.of(config)
    return LoraSlots(root, sizes, dtype, device, max_resident=engine.max_resident_adapters)
