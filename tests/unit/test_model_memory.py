"""The sums that size the KV pool."""

from pathlib import Path

import pytest
import torch

from prefixmesh.errors import ConfigError
from prefixmesh.worker.model.memory import (
    CPU_POOL_CONTEXTS,
    GPU_WORKING_BYTES,
    MIB,
    DeviceMemory,
    MemorySums,
    read_cpu_memory,
    read_device_memory,
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
