"""The host tier of a fake engine: a real keeper over the fake mover, sized by the settings of a real worker."""

from random import Random
from typing import NamedTuple

from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.sim.fake_model import Chains, EngineTime
from prefixmesh.sim.fake_mover import Alarm, FakeMover
from prefixmesh.sim.timing import TimingModel
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.tiers.copies import CopyJob
from prefixmesh.worker.tiers.keeper import Keeper, KeeperConfig

_GIB = 1 << 30


class FakeTiers(NamedTuple):
    """What stands behind the device of a fake engine."""

    mover: FakeMover
    keeper: Keeper


def host_allocator(config: EngineConfig, device_pages: int, kv_bytes_per_token: int) -> PageAllocator | None:
    """The host's pages, by the settings; None without a host tier. Raises ConfigError for one that holds no page."""
    if not config.has_host_tier:
        return None
    page_bytes = config.page_size * kv_bytes_per_token
    if config.hicache_size:
        pages, reason = int(config.hicache_size * _GIB) // page_bytes, f"hicache_size={config.hicache_size:g}"
    else:
        pages, reason = int(config.hicache_ratio * device_pages), f"hicache_ratio={config.hicache_ratio:g}"
    if pages < 1:
        raise ConfigError(f"no page of {page_bytes:,} bytes fits in a host tier of {reason}")
    return PageAllocator(pages)


def build_fake_tiers(
    config: EngineConfig,
    timing: TimingModel,
    time: EngineTime,
    *,
    kv: Chains,
    kv_bytes_per_token: int,
    cache: RadixCache,
    host_pages: int,
    rates: EngineRates,
    rng: Random,
    alarm: Alarm | None,
) -> FakeTiers:
    """Keeper and mover between the slots of ``kv`` and as many of a host's as ``host_pages`` have."""

    def ms_per_token(job: CopyJob) -> float:
        return timing.offload_ms_per_token if job.kind == "offload" else timing.load_back_ms_per_token

    mover = FakeMover(
        kv,
        page_size=config.page_size,
        host_pages=host_pages,
        page_bytes=config.page_size * kv_bytes_per_token,
        ms_per_token=ms_per_token,
        time=time,
        rng=rng,
        alarm=alarm,
    )
    keeper_config = KeeperConfig(
        device_pages=len(kv) // config.page_size,
        write_policy=config.hicache_write_policy,
        load_back_ms_per_token=timing.load_back_ms_per_token,
    )
    return FakeTiers(mover, Keeper(cache, mover, rates, keeper_config))
