"""From an ``EngineConfig`` to an engine that is ready: the one place that joins model, pool, cache and scheduler."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from prefixmesh.adapter_names import split_adapter_setting
from prefixmesh.cache.base import PrefixCache
from prefixmesh.cache.factory import make_prefix_cache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.pins import PinBudget
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.config import EngineConfig
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.revision import model_revision
from prefixmesh.model_files.source import resolve_model
from prefixmesh.text.tokenizer import load_tokenizer
from prefixmesh.worker.adapter_desk import NO_SHOP, AdapterDesk, AdapterShop
from prefixmesh.worker.cache_recorder import CacheRecorder
from prefixmesh.worker.engine import EngineCore, Runner
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.grammar import GrammarCompiler
from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.kv_copies.page_store import open_pages
from prefixmesh.worker.kv_copies.parts import MAX_PART_BYTES
from prefixmesh.worker.kv_desk import KvDesk
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.model.open_model import OpenedModel, open_model
from prefixmesh.worker.prefill_savings import PrefillShape
from prefixmesh.worker.prefix_desk import PrefixDesk
from prefixmesh.worker.scheduler import Scheduler, SchedulerConfig
from prefixmesh.worker.tiers.copies import Mover
from prefixmesh.worker.tiers.disk_runs import DiskIdentity, KvLayout
from prefixmesh.worker.tiers.disk_tier import DiskTier
from prefixmesh.worker.tiers.keeper import Keeper, KeeperConfig


def build_engine(
    config: EngineConfig,
    progress: Callable[[str], None] | None = None,
    watch: Callable[[Runner], Runner] | None = None,
    recorder: CacheRecorder | None = None,
    *,
    watch_mover: Callable[[Mover], Mover] | None = None,
    on_copied: Callable[[], None] | None = None,
) -> EngineCore:
    """Resolve the model (pulling a known one that is missing), load, size the pool, warm up and measure.

    ``progress`` is told what happens, a line at a time. ``watch`` may put something around the runner, such as a clock, and
    ``recorder`` stand for the engine's own; ``watch_mover`` is ``watch`` for the host tier's mover. ``on_copied`` is called, on any thread,
    when there may be a copy to acknowledge: whoever waits for work looks again. Raises ConfigError and ModelFileError. Seconds; all of it is
    the model.
    """
    files = resolve_model(config.model, progress)
    opened = open_model(files, config, progress, on_copied)
    allocator = PageAllocator(opened.sums.num_pages)
    recorder = CacheRecorder() if recorder is None else recorder
    rates = EngineRates(
        prefill_tokens_per_s=opened.rates.prefill_tokens_per_s,
        decode_step_ms=opened.rates.decode_step_ms,
        chunk_tokens=config.chunked_prefill_size,
        now=time.monotonic(),
    )
    revision = model_revision(files)
    disk = _open_disk(config, opened, revision, on_copied)
    host = PageAllocator(opened.sums.host_pages) if opened.sums.host_pages else None
    options = cache_options(config, recorder, host)
    cache = make_prefix_cache(config.prefix_cache, allocator, config.page_size, options)
    scheduler = Scheduler(
        SchedulerConfig(
            max_running_requests=config.max_running_requests,
            max_queued_requests=config.max_queued_requests,
            chunked_prefill_size=config.chunked_prefill_size,
            schedule_policy=config.schedule_policy,
            max_passed_over=config.max_passed_over,
            queue_timeout_s=config.queue_timeout_s,
            context_length=opened.config.context_length,
            vocab_size=opened.config.vocab_size,
            shares_prefixes=config.prefix_cache != "off",
        ),
        allocator,
        cache,
        rates,
        _open_keeper(config, opened, cache, rates, watch_mover, disk),
    )
    desk = _open_desk(config, opened, progress)
    layout = _copy_layout(config, opened)
    info = EngineInfo(
        model=files.name,
        model_revision=revision,
        vocab_size=opened.config.vocab_size,
        context_length=scheduler.token_limit,
        page_size=config.page_size,
        total_pages=opened.sums.num_pages,
        max_total_tokens=opened.sums.total_tokens,
        max_running_requests=config.max_running_requests,
        prefix_cache=config.prefix_cache,
        device=str(opened.device),
        dtype=_name(opened.dtype),
        eos_token_ids=opened.config.eos_token_ids,
        memory_sums=opened.sums.describe(),
        prefill_shape=PrefillShape.of(opened.config),
        linear_sizes=LinearSizes.of(opened.config),
        adapters=desk.infos(),
        kv_layout=layout,
    )
    return EngineCore(
        info=info,
        scheduler=scheduler,
        runner=opened.runner if watch is None else watch(opened.runner),
        rates=rates,
        compile_grammar=GrammarCompiler(lambda: load_tokenizer(files), opened.config.vocab_size).compile,
        adapters=desk,
        queue_timeout_s=config.queue_timeout_s,
        recorder=recorder,
        prefixes=PrefixDesk(cache),
        copies=_open_copies(opened, cache, scheduler, layout),
    )


def cache_options(
    config: EngineConfig, recorder: CacheRecorder, host: PageAllocator | None = None
) -> RadixOptions:
    """What its cache has beside its pages; ``host`` are the host tier's. The other caches tell nothing of their blocks, and take no other
    options either."""
    if config.prefix_cache == "radix":
        budget = PinBudget(pool_share=config.pin_share, owner_share=config.pin_owner_share)
        return RadixOptions(
            policy=config.eviction_policy,
            events=recorder,
            host=host,
            pin_budget=budget,
            host_pin_budget=budget,
        )
    return RadixOptions(policy=config.eviction_policy)


def _open_keeper(
    config: EngineConfig,
    opened: OpenedModel,
    cache: PrefixCache,
    rates: EngineRates,
    watch_mover: Callable[[Mover], Mover] | None,
    disk: DiskTier | None,
) -> Keeper | None:
    """The host tier's; None without one."""
    mover = opened.mover
    if mover is None or not isinstance(cache, RadixCache):
        return None
    return Keeper(
        cache,
        mover if watch_mover is None else watch_mover(mover),
        rates,
        KeeperConfig(
            device_pages=opened.sums.num_pages,
            write_policy=config.hicache_write_policy,
            load_back_ms_per_token=opened.load_back_ms_per_token or 0.0,
        ),
        disk,
    )


def _open_disk(
    config: EngineConfig, opened: OpenedModel, revision: str, on_copied: Callable[[], None] | None
) -> DiskTier | None:
    """What stands behind the host tier; None without a folder for it."""
    if config.disk_cache_dir is None or opened.host is None:
        return None
    layout = KvLayout(
        dtype=_name(opened.dtype),
        num_layers=opened.config.num_layers,
        num_kv_heads=opened.config.num_kv_heads,
        head_dim=opened.config.head_dim,
        page_size=config.page_size,
    )
    try:
        return DiskTier(
            Path(config.disk_cache_dir),
            DiskIdentity(revision=revision, layout=layout),
            opened.host,
            int(config.disk_cache_size * 2**30),
            on_copied,
        )
    except BaseException:
        if opened.mover is not None:
            opened.mover.close()
        raise


def _copy_layout(config: EngineConfig, opened: OpenedModel) -> CopyLayout | None:
    """How its KV lies in copies to other workers; None where there are none: without a radix cache, and where one page is more than a message
    may carry."""
    layout = CopyLayout(
        dtype=_name(opened.dtype),
        layers=opened.config.num_layers,
        kv_heads=opened.config.num_kv_heads,
        head_dim=opened.config.head_dim,
        page_size=config.page_size,
    )
    return layout if config.prefix_cache == "radix" and layout.page_bytes <= MAX_PART_BYTES else None


def _open_copies(
    opened: OpenedModel, cache: PrefixCache, scheduler: Scheduler, layout: CopyLayout | None
) -> KvDesk | None:
    """What reads and writes KV for other workers; None without a layout."""
    if layout is None or not isinstance(cache, RadixCache):
        return None
    pages = open_pages(layout, opened.runner.pool, opened.host)
    return KvDesk(cache, scheduler.kv, pages, scheduler.keeper)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open_desk(
    config: EngineConfig, opened: OpenedModel, progress: Callable[[str], None] | None
) -> AdapterDesk:
    """The engine's adapters, those loaded that the settings name."""
    slots = opened.adapters
    if slots is None:
        return AdapterDesk(NO_SHOP)
    desk = AdapterDesk(
        AdapterShop(
            root=slots.root,
            sizes=slots.sizes,
            slots=slots,
            element_bytes=slots.element_bytes,
            max_resident=slots.max_resident,
            budget_bytes=slots.budget_bytes,
            max_waiting=config.max_queued_requests,
        )
    )
    for setting in config.adapters:
        name, path = split_adapter_setting(setting)
        desk.load_now(name, path)
        if progress is not None:
            progress(f"loaded adapter {name} from {path}")
    return desk
