"""The sums that size the KV pool."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prefixmesh.errors import ConfigError
from prefixmesh.worker.model.memory import (
    CPU_POOL_CONTEXTS,
    GIB,
    GPU_WORKING_BYTES,
    MIB,
    DeviceMemory,
    MemorySums,
    read_cpu_memory,
    read_device_memory,
    size_host_pool,
    size_pool,
)

MEMORY = DeviceMemory(total=1000 * MIB, free=900 * MIB, source="test")


def size(
    *,
    memory: DeviceMemory = MEMORY,
    weights_bytes: int = 100 * MIB,
    page_size: int = 16,
    context_length: int = 10**9,
    mem_fraction_static: float = 0.5,
    max_total_tokens: int | None = None,
    on_cpu: bool = True,
) -> MemorySums:
    return size_pool(
        memory=memory,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=1024,
        page_size=page_size,
        context_length=context_length,
        mem_fraction_static=mem_fraction_static,
        max_total_tokens=max_total_tokens,
        on_cpu=on_cpu,
    )


def test_the_fraction_covers_weights_and_kv_together() -> None:
    """Half of 1000 MiB, less 100 MiB of weights, is 400 MiB of KV."""
    sums = size()
    assert sums.kv == 400 * MIB
    assert sums.total_tokens == 400 * 1024
    assert sums.num_pages == sums.total_tokens // 16
    assert "mem_fraction_static=0.5" in sums.reason


def test_a_cpu_pool_holds_a_few_contexts_unless_asked_for_more() -> None:
    """Free memory of a CPU machine is not taken for KV that no request can use; a GPU's is."""
    assert size(context_length=100).total_tokens == CPU_POOL_CONTEXTS * 100
    assert size(context_length=100, max_total_tokens=5000).total_tokens == 4992
    assert size(context_length=100, on_cpu=False).kv == 400 * MIB


def test_the_line_shows_all_terms() -> None:
    line = size(max_total_tokens=2048).describe()
    for part in (
        "weights 100 MiB",
        "KV 2 MiB",
        "2,048 tokens of 1,024 bytes",
        "128 pages of 16",
        "1,000 MiB",
        "max_total_tokens=2048",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_total_tokens": 901 * 1024}, "do not fit"),
        ({"mem_fraction_static": 0.1}, "no KV page fits"),
        ({"mem_fraction_static": 0.05}, "no KV page fits"),
        (
            {
                "mem_fraction_static": 1.0,
                "memory": DeviceMemory(total=1000 * MIB, free=100 * MIB, source="test"),
            },
            "do not fit",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sums(settings: dict[str, object], problem: str) -> None:
    """The message holds the sums, so that the reader sees which term to change (first part of F55)."""
    with pytest.raises(ConfigError, match=problem) as refused:
        size(**settings)  # type: ignore[arg-type]
    assert "weights 100 MiB + KV" in str(refused.value)


def test_a_gpu_keeps_room_to_work_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces, recorded steps and activations are not the pool's; what loading left with torch is given back first."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))

    def ask(_: torch.device) -> tuple[int, int]:
        calls.append("ask")
        return 5000 * MIB, 8000 * MIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    memory = read_device_memory(torch.device("cuda", 0), 100 * MIB)
    assert (memory.total, memory.free) == (8000 * MIB, 5000 * MIB - GPU_WORKING_BYTES)
    assert calls == ["empty_cache", "ask"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 8000 * MIB))
    assert read_device_memory(torch.device("cuda", 0), 0).free == 0


def test_cpu_memory_is_the_smaller_of_machine_and_control_group(tmp_path: Path) -> None:
    """cgroup v2 and v1 limits count where they are tighter; ``max`` is no limit; weights already loaded count as total."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n")
    found = read_cpu_memory(1000, meminfo, tmp_path / "none")
    assert (found.free, found.total, found.source) == (
        2 * MIB,
        2 * MIB + 1000,
        "memory available on this machine",
    )
    (tmp_path / "memory.max").write_text("1500000\n")
    (tmp_path / "memory.current").write_text("500000\n")
    assert read_cpu_memory(0, meminfo, tmp_path).free == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert read_cpu_memory(0, meminfo, tmp_path).free == 2 * MIB
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("700000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("800000")
    found = read_cpu_memory(0, meminfo, tmp_path)
    assert (found.free, found.source) == (0, "memory left in the control group")
    with pytest.raises(ConfigError, match="max_total_tokens"):
        read_cpu_memory(0, tmp_path / "missing", tmp_path / "none")


def with_host(
    ratio: float = 0.0,
    size_gib: float = 0.0,
    *,
    tokens: int = 2048,
    staging_bytes: int = MIB,
    host_memory: DeviceMemory | None = None,
    adapter_bytes: int = 0,
) -> MemorySums:
    """Beside 100 MiB of weights and 1 KiB a token, of 900 MiB that are free."""
    sums = replace(size(max_total_tokens=tokens), adapters=adapter_bytes)
    return size_host_pool(
        sums, ratio=ratio, size_gib=size_gib, staging_bytes=staging_bytes, host_memory=host_memory
    )


def test_a_host_tier_is_a_multiple_of_the_pool_or_a_size() -> None:
    """The size wins; both are cut to whole pages."""
    assert with_host(ratio=2.5).host_pages == 320
    assert with_host(ratio=0.34).host_pages == 43
    assert with_host(size_gib=0.5).host == GIB // 2
    assert with_host(ratio=9.0, size_gib=16.5 * 1024 / GIB).host_pages == 1
    assert with_host(ratio=2.0).kv == size(max_total_tokens=2048).kv
    assert size().host == size().host_pages == 0


def test_the_line_shows_the_host_tier_where_there_is_one() -> None:
    """On a CPU in the same sum, beside a GPU apart."""
    assert with_host(ratio=3.0, adapter_bytes=5 * MIB).describe() == (
        "weights 100 MiB + adapters 5 MiB + KV 2 MiB (2,048 tokens of 1,024 bytes, 128 pages of 16) "
        "+ host tier 6 MiB (6,144 tokens, 384 pages) + staging 1.0 MiB = 114 MiB of 1,000 MiB (test); "
        "sizes set by max_total_tokens=2048 and hicache_ratio=3"
    )
    apart = DeviceMemory(total=64 * GIB, free=64 * GIB, source="the host's")
    assert with_host(size_gib=2.0, host_memory=apart).describe() == (
        "weights 100 MiB + KV 2 MiB (2,048 tokens of 1,024 bytes, 128 pages of 16) + staging 1.0 MiB = 103 MiB of 1,000 MiB "
        "(test); host tier 2,048 MiB (2,097,152 tokens, 131,072 pages) of 65,536 MiB (the host's); "
        "sizes set by max_total_tokens=2048 and hicache_size=2"
    )
    assert "host tier" not in size().describe()


def test_on_a_cpu_both_pools_come_out_of_the_same_memory() -> None:
    """F55: what does not fit is refused with all sums, one byte beyond what is free."""
    kv, adapters, staging = 100 * MIB, 50 * MIB, 3 * MIB
    left = MEMORY.free - kv - adapters - staging
    fits = with_host(size_gib=left / GIB, tokens=100 * 1024, adapter_bytes=adapters, staging_bytes=staging)
    assert fits.host == left
    with pytest.raises(ConfigError, match="do not fit") as raised:
        with_host(size_gib=left / GIB, tokens=100 * 1024, adapter_bytes=adapters, staging_bytes=staging + 1)
    for part in (
        "weights 100 MiB",
        "adapters 50 MiB",
        "KV 100 MiB",
        "host tier 747 MiB",
        "staging 3.0 MiB",
        "= 1,000 MiB of 1,000 MiB",
        "hicache_size",
        "only 900 MiB are free beside the weights",
    ):
        assert part in str(raised.value)


def test_beside_a_gpu_the_tier_is_held_to_the_hosts_memory_and_staging_to_the_gpus() -> None:
    apart = DeviceMemory(total=3 * GIB, free=2 * GIB, source="the host's")
    assert with_host(size_gib=2.0, host_memory=apart).host == 2 * GIB
    with pytest.raises(ConfigError, match=r"fit in the host's memory: .* only 2,048 MiB are free there"):
        with_host(size_gib=2.1, host_memory=apart)
    with pytest.raises(ConfigError, match=r"do not fit: .* staging 899.0 MiB"):
        with_host(size_gib=1.0, host_memory=apart, staging_bytes=899 * MIB)


@pytest.mark.parametrize("asked", [{"ratio": 0.001}, {"size_gib": 1e-6}])
def test_a_host_tier_without_a_page_is_refused(asked: dict[str, float]) -> None:
    """Who asks for a tier is to have one."""
    with pytest.raises(ConfigError, match=r"no page of 16,384 bytes fits in a host tier of hicache_"):
        with_host(**asked)  # type: ignore[arg-type]
