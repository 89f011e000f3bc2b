"""How large the KV pool may be: sums that are printed at start, and a refusal that shows them when they do not add up.

By ``mem_fraction_static`` the weights and the pool together take that share of the device's memory: of a GPU's whole memory,
or, on a CPU, of what was available before the weights were loaded (the smaller of the machine's and the control group's
figure). ``max_total_tokens`` asks for a size outright. On a CPU the pool is also held to a few contexts unless asked for, since
free memory there is rarely meant for KV alone.

The host tier's pool comes on top, of the size that was asked for or not at all: on a CPU out of the same memory, beside a GPU out of the
host's.

Workers on one machine that share a device share its memory, and none knows of the others: give each a fraction such that
they add up to less than one, or a ``max_total_tokens``. (CPU pools take memory only as pages are first used.)
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from prefixmesh.errors import ConfigError

CPU_POOL_CONTEXTS: Final = 8
"""On a CPU the pool holds at most this many full contexts unless ``max_total_tokens`` asks for more: enough for every
conversation such a machine can compute, and far from taking all its memory."""

MIB: Final = 2**20
GIB: Final = 2**30

GPU_WORKING_BYTES: Final = 1024 * MIB
"""On a GPU so much must be left beside weights and pool: two workspaces of FlashInfer, recorded decode steps, the activations of a
step and its logits. An estimate for chunks of 512 tokens and vocabularies of 150,000; more is better."""

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and usage of the control group, version 2 and 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """A device's memory, in bytes."""

    total: int
    """All of a GPU's memory; on a CPU, what is free now plus the weights that are loaded already."""

    free: int
    """What the pool may still take now; on a GPU without ``GPU_WORKING_BYTES``."""

    source: str
    """Where the figure is from, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySums:
    """The sums that sized a KV pool. Bytes unless the name says otherwise."""

    device: DeviceMemory
    weights: int
    kv_per_token: int
    page_size: int
    num_pages: int
    reason: str
    """What set the size."""

    adapters: int = 0
    """Set aside for the weights of resident LoRA adapters."""

    host_pages: int = 0
    """Pages of the host tier; 0 without one."""

    host_reason: str = ""
    """What set their number."""

    staging: int = 0
    """Set aside on the device for what copies between the tiers pass through."""

    host_memory: DeviceMemory | None = None
    """Where the host tier is; None where that is the device's own memory."""

    @property
    def host(self) -> int:
        """Bytes of the host tier."""
        return self.host_pages * self.page_size * self.kv_per_token

    @property
    def on_device(self) -> int:
        """All bytes in the device's memory."""
        beside = self.host if self.host_memory is None else 0
        return self.weights + self.adapters + self.kv + self.staging + beside

    @property
    def total_tokens(self) -> int:
        """Tokens the pool holds."""
        return self.num_pages * self.page_size

    @property
    def kv(self) -> int:
        """Bytes of the pool."""
        return self.total_tokens * self.kv_per_token

    def describe(self) -> str:
        """The sums in one line."""
        adapters = f"adapters {self.adapters / MIB:,.0f} MiB + " if self.adapters else ""
        kv = (
            f"weights {self.weights / MIB:,.0f} MiB + {adapters}KV {self.kv / MIB:,.0f} MiB "
            f"({self.total_tokens:,} tokens of {self.kv_per_token:,} bytes, {self.num_pages:,} pages of {self.page_size})"
        )
        all_of = (
            f"{self.on_device / MIB:,.0f} MiB of {self.device.total / MIB:,.0f} MiB ({self.device.source})"
        )
        if not self.host_pages:
            return f"{kv} = {all_of}; size set by {self.reason}"
        tokens = self.host_pages * self.page_size
        host = f"host tier {self.host / MIB:,.0f} MiB ({tokens:,} tokens, {self.host_pages:,} pages)"
        staging = f"staging {self.staging / MIB:,.1f} MiB"
        reasons = f"sizes set by {self.reason} and {self.host_reason}"
        if self.host_memory is None:
            return f"{kv} + {host} + {staging} = {all_of}; {reasons}"
        apart = f"{self.host_memory.total / MIB:,.0f} MiB ({self.host_memory.source})"
        return f"{kv} + {staging} = {all_of}; {host} of {apart}; {reasons}"


def size_pool(
    *,
    memory: DeviceMemory,
    weights_bytes: int,
    kv_bytes_per_token: int,
    page_size: int,
    context_length: int,
    mem_fraction_static: float,
    max_total_tokens: int | None,
    on_cpu: bool,
    adapter_bytes: int = 0,
) -> MemorySums:
    """Decide the pool's size. Raises ConfigError with the sums when weights and pool do not fit, or no page does."""
    if max_total_tokens is not None:
        tokens, reason = max_total_tokens, f"max_total_tokens={max_total_tokens}"
    else:
        budget = int(memory.total * mem_fraction_static) - weights_bytes - adapter_bytes
        tokens, reason = budget // kv_bytes_per_token, f"mem_fraction_static={mem_fraction_static:g}"
        cap = CPU_POOL_CONTEXTS * context_length
        if on_cpu and tokens > cap:
            tokens, reason = cap, f"the CPU's bound of {CPU_POOL_CONTEXTS} contexts of {context_length}"
    sums = MemorySums(
        device=memory,
        weights=weights_bytes,
        kv_per_token=kv_bytes_per_token,
        page_size=page_size,
        num_pages=tokens // page_size,
        reason=reason,
        adapters=adapter_bytes,
    )
    if sums.num_pages < 1:
        raise ConfigError(
            f"no KV page fits beside the weights: {sums.describe()}; raise mem_fraction_static or free memory"
        )
    if sums.kv + sums.adapters > memory.free:
        raise ConfigError(
            f"weights and KV pool do not fit: {sums.describe()}; only {memory.free / MIB:,.0f} MiB are free beside the weights"
        )
    return sums


def size_host_pool(
    sums: MemorySums,
    *,
    ratio: float,
    size_gib: float,
    staging_bytes: int,
    host_memory: DeviceMemory | None,
) -> MemorySums:
    """The sums with a host tier of ``size_gib``, or, where that is 0, of ``ratio`` times the pool.

    ``host_memory`` is where it goes; None for the device's own memory. Raises ConfigError with all sums when that, or the staging beside
    what the device holds, does not fit, or no page does: a smaller tier than was asked for would be a surprise later.
    """
    page_bytes = sums.page_size * sums.kv_per_token
    sums = replace(
        sums,
        host_pages=int(size_gib * GIB) // page_bytes if size_gib else int(sums.num_pages * ratio),
        host_reason=f"hicache_size={size_gib:g}" if size_gib else f"hicache_ratio={ratio:g}",
        staging=staging_bytes,
        host_memory=host_memory,
    )
    if sums.host_pages < 1:
        raise ConfigError(
            f"no page of {page_bytes:,} bytes fits in a host tier of {sums.host_reason}: {sums.describe()}"
        )
    lower = "lower hicache_size, hicache_ratio, max_total_tokens or mem_fraction_static, or free memory"
    if sums.on_device - sums.weights > sums.device.free:
        raise ConfigError(
            f"weights, KV pool and host tier do not fit: {sums.describe()}; only {sums.device.free / MIB:,.0f} MiB are free "
            f"beside the weights; {lower}"
        )
    if host_memory is not None and sums.host > host_memory.free:
        raise ConfigError(
            f"the host tier does not fit in the host's memory: {sums.describe()}; only {host_memory.free / MIB:,.0f} MiB are "
            f"free there; {lower}"
        )
    return sums


def read_device_memory(device: torch.device, weights_bytes: int) -> DeviceMemory:
    """Measure, after ``weights_bytes`` of weights were loaded."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading used and torch keeps is free
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, free=max(0, free - GPU_WORKING_BYTES), source="GPU memory")
    return read_cpu_memory(weights_bytes)


def read_cpu_memory(
    weights_bytes: int, meminfo: Path = _MEMINFO, cgroup_root: Path = _CGROUP_ROOT
) -> DeviceMemory:
    """The smaller of what the machine and the control group still have. ConfigError where neither can be read."""
    found = [(free, source) for free, source in _free_figures(meminfo, cgroup_root) if free is not None]
    if not found:
        raise ConfigError(
            "cannot tell how much memory there is (no /proc/meminfo): give max_total_tokens a value"
        )
    free, source = min(found)
    return DeviceMemory(total=free + weights_bytes, free=free, source=source)


def _free_figures(meminfo: Path, cgroup_root: Path) -> list[tuple[int | None, str]]:
    figures = [(_mem_available(meminfo), "memory available on this machine")]
    for limit_name, usage_name in _CGROUP_FILES:
        limit, usage = _number(cgroup_root / limit_name), _number(cgroup_root / usage_name)
        if limit is not None and usage is not None:
            figures.append((max(0, limit - usage), "memory left in the control group"))
    return figures


def _mem_available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    """A file's number; None when there is no such file or it says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
