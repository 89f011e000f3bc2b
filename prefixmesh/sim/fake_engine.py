"""An engine that is real but for its model: page pool, cache, scheduler, sampling and recorder are those that serve.

``EngineCore`` takes its time from an ``EngineTime``, so the same engine runs in simulated time, where a step of 40 ms is over at once, and
in a process, where it takes 40 ms.
"""

import time
from dataclasses import dataclass
from random import Random
from typing import Final

from prefixmesh.cache.base import PrefixCache
from prefixmesh.cache.factory import make_prefix_cache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.model_files.linear_sizes import NO_LINEARS, LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.revision import model_revision
from prefixmesh.model_files.source import resolve_model
from prefixmesh.sim.fake_model import Chains, EngineTime, FakeRunner, NotedScheduler, kv_slots
from prefixmesh.sim.fake_mover import Alarm, FakeMover
from prefixmesh.sim.fake_pages import FakePages, fake_layout
from prefixmesh.sim.fake_tiers import FakeTiers, build_fake_tiers, host_allocator
from prefixmesh.sim.timing import TimingModel
from prefixmesh.text.tokenizer import load_tokenizer
from prefixmesh.worker.cache_recorder import CacheRecorder
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import cache_options
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.kv_desk import KvDesk
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.prefill_savings import PrefillShape
from prefixmesh.worker.prefix_desk import PrefixDesk
from prefixmesh.worker.scheduler import Scheduler
from prefixmesh.worker.scheduler_config import SchedulerConfig

DEFAULT_POOL_TOKENS: Final = 1 << 18
"""Of a fake worker whose ``max_total_tokens`` was not given: it has no memory to size a pool by."""

RATED_PROMPT_TOKENS: Final = 512
"""Prompt by which an engine rates itself before its first step, as a real one does at its start."""


_ELEMENT_BYTES: Final = 2
"""Of KV in bfloat16, in which such models are served."""

_NO_SHAPE: Final = PrefillShape(linear_flops_per_token=1000, attention_flops_per_pair=2)
"""Of no model: enough for savings to be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """Which model a fake worker passes for: all that others can tell it by."""

    name: str = "fake"
    revision: str = "fake"
    vocab_size: int = 1024
    """Every step fills so many logits for each who samples: small where many steps are simulated."""

    context_length: int = 1 << 17
    eos_token_ids: tuple[int, ...] = ()
    prefill_shape: PrefillShape = _NO_SHAPE
    linear_sizes: LinearSizes = NO_LINEARS
    kv_bytes_per_token: int = 128 << 10
    """What a host tier that is given in GiB is divided by, and copies are counted by."""

    @classmethod
    def of_files(cls, name_or_path: str) -> "ModelIdentity":
        """That of a real model, of which everything but the weights is read. Raises ModelFileError."""
        files = resolve_model(name_or_path)
        config = read_model_config(files)
        return cls(
            name=files.name,
            revision=model_revision(files),
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            # Some folders name the end of a turn only in the tokenizer's files.
            eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *load_tokenizer(files).eos_token_ids))),
            prefill_shape=PrefillShape.of(config),
            linear_sizes=LinearSizes.of(config),
            kv_bytes_per_token=config.kv_bytes_per_token(_ELEMENT_BYTES),
        )


class VirtualTime:
    """``EngineTime`` that is only a number: steps are over at once, and it says when they would have been."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """See ``EngineTime.now``."""
        return self._now

    def pass_until(self, when: float) -> None:
        """See ``EngineTime.pass_until``."""
        self._now = max(self._now, when)


class RealTime:
    """``EngineTime`` by the machine's clock: steps wait."""

    def now(self) -> float:
        """See ``EngineTime.now``."""
        return time.monotonic()

    def pass_until(self, when: float) -> None:
        """See ``EngineTime.pass_until``."""
        left_s = when - time.monotonic()
        if left_s > 0.0:
            time.sleep(left_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeEngine:
    """A core and what is inside it. What is inside may be looked at between steps."""

    core: EngineCore
    scheduler: NotedScheduler
    runner: FakeRunner
    mover: FakeMover | None
    """None without a host tier."""

    def next_due(self) -> float | None:
        """When an engine that is idle has something to do all the same: a copy has ended by then. None where there is none."""
        return None if self.mover is None else self.mover.next_due()


def build_fake_engine(
    config: EngineConfig,
    identity: ModelIdentity,
    timing: TimingModel,
    engine_time: EngineTime,
    *,
    decode_room_tokens: int | None = None,
    rng: Random | None = None,
    alarm: Alarm | None = None,
) -> FakeEngine:
    """An engine by the settings of a real one; those of the model and its device mean nothing. Raises ConfigError for settings that need a
    model. ``decode_room_tokens`` as in ``SchedulerConfig``. Of a host tier's copies ``rng`` draws when within their time their bytes move,
    and ``alarm`` is set to when they end."""
    if config.disk_cache_dir is not None:
        raise ConfigError("disk_cache_dir: a fake worker has no KV that could be kept")
    if config.adapter_root is not None:
        raise ConfigError("adapter_root: a fake worker has no weights for adapters to change")
    pages = (config.max_total_tokens or DEFAULT_POOL_TOKENS) // config.page_size
    allocator, recorder = PageAllocator(pages), CacheRecorder()
    rates = EngineRates(
        prefill_tokens_per_s=1e3 * RATED_PROMPT_TOKENS / _rated_prefill_ms(timing),
        decode_step_ms=timing.decode_step_ms(1, RATED_PROMPT_TOKENS),
        chunk_tokens=config.chunked_prefill_size,
        now=engine_time.now(),
    )
    host = host_allocator(config, pages, identity.kv_bytes_per_token)
    options = cache_options(config, recorder, host)
    cache = make_prefix_cache(config.prefix_cache, allocator, config.page_size, options)
    kv = kv_slots(pages * config.page_size)
    tiers: FakeTiers | None = None
    if host is not None:
        assert isinstance(cache, RadixCache)
        tiers = build_fake_tiers(
            config,
            timing,
            engine_time,
            kv=kv,
            kv_bytes_per_token=identity.kv_bytes_per_token,
            cache=cache,
            host_pages=host.total_pages,
            rates=rates,
            rng=rng or Random(0),  # noqa: S311  chance to repeat, not to hide
            alarm=alarm,
        )
    scheduler = NotedScheduler(
        _scheduler_config(config, identity, decode_room_tokens),
        allocator,
        cache,
        rates,
        None if tiers is None else tiers.keeper,
    )
    runner = FakeRunner(
        scheduler, timing, engine_time, kv, vocab_size=identity.vocab_size, never=identity.eos_token_ids
    )
    runner.arrivals = None if tiers is None else tiers.mover
    core = EngineCore(
        info=_info(config, identity, pages, scheduler.token_limit),
        scheduler=scheduler,
        runner=runner,
        rates=rates,
        queue_timeout_s=config.queue_timeout_s,
        recorder=recorder,
        prefixes=PrefixDesk(cache),
        copies=_copies(config, cache, scheduler, kv, tiers),
        clock=engine_time.now,
    )
    mover = None if tiers is None else tiers.mover
    return FakeEngine(core=core, scheduler=scheduler, runner=runner, mover=mover)


def _copies(
    config: EngineConfig, cache: PrefixCache, scheduler: Scheduler, kv: Chains, tiers: FakeTiers | None
) -> KvDesk | None:
    """What reads and writes KV for other workers; None without a radix cache."""
    if not isinstance(cache, RadixCache):
        return None
    pages = FakePages(kv, config.page_size, None if tiers is None else tiers.mover.read_host)
    return KvDesk(cache, scheduler.kv, pages, scheduler.keeper)


def _rated_prefill_ms(timing: TimingModel) -> float:
    return (
        timing.step_ms + timing.prefill_ms(RATED_PROMPT_TOKENS) or 1e-3
    )  # a model that takes no time at all


def _scheduler_config(
    config: EngineConfig, identity: ModelIdentity, decode_room_tokens: int | None
) -> SchedulerConfig:
    return SchedulerConfig(
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        chunked_prefill_size=config.chunked_prefill_size,
        schedule_policy=config.schedule_policy,
        max_passed_over=config.max_passed_over,
        queue_timeout_s=config.queue_timeout_s,
        context_length=identity.context_length,
        vocab_size=identity.vocab_size,
        shares_prefixes=config.prefix_cache != "off",
        decode_room_tokens=decode_room_tokens,
    )


def _info(config: EngineConfig, identity: ModelIdentity, pages: int, context_length: int) -> EngineInfo:
    return EngineInfo(
        model=identity.name,
        model_revision=identity.revision,
        vocab_size=identity.vocab_size,
        context_length=context_length,
        page_size=config.page_size,
        total_pages=pages,
        max_total_tokens=pages * config.page_size,
        max_running_requests=config.max_running_requests,
        prefix_cache=config.prefix_cache,
        device="none",
        dtype="none",
        eos_token_ids=identity.eos_token_ids,
        memory_sums=f"a timing model and {pages} pages of {config.page_size} tokens, of which none has memory",
        prefill_shape=identity.prefill_shape,
        linear_sizes=identity.linear_sizes,
        kv_layout=fake_layout(config.page_size) if config.prefix_cache == "radix" else None,
    )
