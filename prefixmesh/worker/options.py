"""The flags of a worker's engine, in one place for every command that starts one. Imports no torch.

Each flag is one field of ``EngineConfig`` and carries its default.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import click

from prefixmesh.config import (
    DEFAULT_MODEL,
    AttentionBackendName,
    Dtype,
    EngineConfig,
    EvictionPolicy,
    HostWritePolicy,
    PrefixCacheKind,
    SchedulePolicy,
)

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEFAULTS = EngineConfig()

_OPTIONS = (
    click.option(
        "--model",
        default=DEFAULT_MODEL,
        show_default=True,
        help="A known model's name, a Hugging Face folder, or a GGUF file.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(get_args(Dtype)),
        default=_DEFAULTS.dtype,
        show_default=True,
        help="Type of weights and KV; auto is bfloat16 where the device is fast in it.",
    ),
    click.option(
        "--device",
        default=_DEFAULTS.device,
        show_default=True,
        help="A torch device; auto is the first GPU, else the CPU.",
    ),
    click.option(
        "--page-size",
        type=int,
        default=_DEFAULTS.page_size,
        show_default=True,
        help="Tokens per KV page, a power of two from 1 to 256.",
    ),
    click.option(
        "--prefix-cache",
        type=click.Choice(get_args(PrefixCacheKind)),
        default=_DEFAULTS.prefix_cache,
        show_default=True,
        help="radix shares any common prefix, hash whole 16-token blocks, off nothing.",
    ),
    click.option("--disable-radix-cache", is_flag=True, help="The same as --prefix-cache off."),
    click.option(
        "--eviction-policy",
        type=click.Choice(get_args(EvictionPolicy)),
        default=_DEFAULTS.eviction_policy,
        show_default=True,
        help="What a full radix cache gives up first: lru the least recently used, lfu the least often, priority the lowest.",
    ),
    click.option(
        "--mem-fraction-static",
        type=float,
        default=_DEFAULTS.mem_fraction_static,
        show_default=True,
        help="Share of the device's memory for weights and KV together.",
    ),
    click.option(
        "--max-total-tokens",
        type=int,
        default=_DEFAULTS.max_total_tokens,
        help="Size of the KV pool in tokens; overrides --mem-fraction-static.",
    ),
    click.option(
        "--hicache-ratio",
        type=float,
        default=_DEFAULTS.hicache_ratio,
        show_default=True,
        help="Size of the host tier as a multiple of the KV pool; 0 with no --hicache-size is no host tier.",
    ),
    click.option(
        "--hicache-size",
        type=float,
        default=_DEFAULTS.hicache_size,
        show_default=True,
        help="Size of the host tier in GiB; overrides --hicache-ratio.",
    ),
    click.option(
        "--hicache-write-policy",
        type=click.Choice(get_args(HostWritePolicy)),
        default=_DEFAULTS.hicache_write_policy,
        show_default=True,
        help="What gets a copy on the host: all that is cached, or what was asked for twice.",
    ),
    click.option(
        "--disk-cache-dir",
        default=_DEFAULTS.disk_cache_dir,
        help="A folder in which prefixes outlive a worker; of a fleet, each has its own below it. Needs a host tier.",
    ),
    click.option(
        "--disk-cache-size",
        type=float,
        default=_DEFAULTS.disk_cache_size,
        show_default=True,
        help="Most GiB of files in --disk-cache-dir, of each worker.",
    ),
    click.option(
        "--pin-share",
        type=float,
        default=_DEFAULTS.pin_share,
        show_default=True,
        help="Share of the KV pool, and of the host tier, that all pins together may have.",
    ),
    click.option(
        "--pin-owner-share",
        type=float,
        default=_DEFAULTS.pin_owner_share,
        show_default=True,
        help="The same for the pins of one owner.",
    ),
    click.option(
        "--kv-copy-rate",
        type=float,
        default=_DEFAULTS.kv_copy_rate,
        show_default=True,
        help="Most MB of KV a second that it gives to other workers; 0 sets no bound.",
    ),
    click.option(
        "--max-running-requests",
        type=int,
        default=_DEFAULTS.max_running_requests,
        show_default=True,
        help="Most requests computed together in one step.",
    ),
    click.option(
        "--max-queued-requests",
        type=int,
        default=_DEFAULTS.max_queued_requests,
        show_default=True,
        help="Most requests waiting; one more is refused at once.",
    ),
    click.option(
        "--chunked-prefill-size",
        type=int,
        default=_DEFAULTS.chunked_prefill_size,
        show_default=True,
        help="Most prompt tokens computed in one step; 0 means no chunking.",
    ),
    click.option(
        "--schedule-policy",
        type=click.Choice(get_args(SchedulePolicy)),
        default=_DEFAULTS.schedule_policy,
        show_default=True,
        help="lpm: longest cached prefix first; fcfs: in order of arrival; priority: the callers' priorities, then lpm.",
    ),
    click.option(
        "--max-passed-over",
        type=int,
        default=_DEFAULTS.max_passed_over,
        show_default=True,
        help="With lpm and priority: most later arrivals that may go before a waiting request.",
    ),
    click.option(
        "--queue-timeout-s",
        type=float,
        default=_DEFAULTS.queue_timeout_s,
        show_default=True,
        help="Seconds after which a request that was never admitted ends; 0 lets it wait.",
    ),
    click.option(
        "--attention-backend",
        type=click.Choice(get_args(AttentionBackendName)),
        default=_DEFAULTS.attention_backend,
        show_default=True,
        help="auto is flashinfer on a GPU where it can serve the model, else torch.",
    ),
    click.option(
        "--disable-cuda-graphs",
        is_flag=True,
        help="Compute every decode step on a GPU without replaying graphs.",
    ),
    click.option(
        "--threads",
        type=int,
        default=_DEFAULTS.threads,
        show_default=True,
        help="CPU threads for the model's arithmetic; 0 lets torch choose.",
    ),
    click.option(
        "--adapter-root",
        default=_DEFAULTS.adapter_root,
        help="The folder that LoRA adapters lie below; without it none can be loaded.",
    ),
    click.option(
        "--adapter",
        "adapters",
        multiple=True,
        metavar="NAME=PATH",
        help="A LoRA adapter to load at start, its path relative to --adapter-root; may be given several times.",
    ),
    click.option(
        "--max-resident-adapters",
        type=int,
        default=_DEFAULTS.max_resident_adapters,
        show_default=True,
        help="Most adapters whose weights are in the device's memory at once.",
    ),
)

_FIELDS = tuple(EngineConfig.__dataclass_fields__)


def engine_options(command: _Command) -> _Command:
    """Decorator: give a click command every flag of the engine. ``engine_config_from`` reads them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_config_from(values: Mapping[str, Any]) -> EngineConfig:
    """The engine's settings from a command's parsed values; others among them are ignored. Raises ConfigError."""
    fields = {name: values[name] for name in _FIELDS if name in values}
    if values.get("disable_radix_cache"):
        fields["prefix_cache"] = "off"
    if values.get("disable_cuda_graphs"):
        fields["cuda_graphs"] = False
    return EngineConfig(**fields)
