"""From an ``EngineConfig`` to an engine that is ready: the one place that joins model, pool, cache and scheduler."""

from collections.abc import Callable

from prefixmesh.cache.factory import make_prefix_cache
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixOptions
from prefixmesh.config import EngineConfig
from prefixmesh.model_files.revision import model_revision
from prefixmesh.model_files.source import resolve_model
from prefixmesh.text.tokenizer import load_tokenizer
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.grammar import GrammarCompiler
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.model.open_model import open_model
from prefixmesh.worker.prefill_savings import PrefillShape
from prefixmesh.worker.scheduler import Scheduler, SchedulerConfig


def build_engine(config: EngineConfig, progress: Callable[[str], None] | None = None) -> EngineCore:
    """Resolve the model (pulling a known one that is missing), load, size the pool, warm up and measure.

    ``progress`` is told what happens, a line at a time. Raises ConfigError and ModelFileError. Seconds; all of it is the model.
    """
    files = resolve_model(config.model, progress)
    opened = open_model(files, config, progress)
    allocator = PageAllocator(opened.sums.num_pages)
    scheduler = Scheduler(
        SchedulerConfig(
            max_running_requests=config.max_running_requests,
            max_queued_requests=config.max_queued_requests,
            chunked_prefill_size=config.chunked_prefill_size,
            schedule_policy=config.schedule_policy,
            context_length=opened.config.context_length,
            vocab_size=opened.config.vocab_size,
            shares_prefixes=config.prefix_cache != "off",
        ),
        allocator,
        make_prefix_cache(
            config.prefix_cache, allocator, config.page_size, RadixOptions(policy=config.eviction_policy)
        ),
    )
    info = EngineInfo(
        model=files.name,
        model_revision=model_revision(files),
        vocab_size=opened.config.vocab_size,
        context_length=scheduler.token_limit,
        page_size=config.page_size,
        total_pages=opened.sums.num_pages,
        max_total_tokens=opened.sums.total_tokens,
        max_running_requests=config.max_running_requests,
        prefix_cache=config.prefix_cache,
        device=str(opened.device),
        dtype=str(opened.dtype).removeprefix("torch."),
        eos_token_ids=opened.config.eos_token_ids,
        memory_sums=opened.sums.describe(),
        prefill_shape=PrefillShape.of(opened.config),
    )
    rates = EngineRates(
        prefill_tokens_per_s=opened.rates.prefill_tokens_per_s, decode_step_ms=opened.rates.decode_step_ms
    )
    return EngineCore(
        info=info,
        scheduler=scheduler,
        runner=opened.runner,
        rates=rates,
        compile_grammar=GrammarCompiler(lambda: load_tokenizer(files), opened.config.vocab_size).compile,
    )
