"""What copies between the tiers do: bytes a second by page size and by where the pages lie, beside one plain copy of as many bytes.

On a GPU the plain copy is of pinned memory over the bus; on a CPU, one core's memcpy, and both are told by the time that the core gave to
them, so that others on the machine change little. Medians, of whole jobs through the mover.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from prefixmesh.bench.gpu_model import ModelShape, config_of
from prefixmesh.cache.base import PageIndices
from prefixmesh.worker.model.device import wait_for_device
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.tiers.copies import CopyJob, CopyKind, Mover
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.open_mover import open_mover

SPREAD: Final = 4
"""The pools are so many times as large as what is copied, so that scattered pages are."""

JOB_S: Final = 60.0
"""No copy takes longer and is worth a figure."""


def copy_rates(
    shape: ModelShape,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """A row for each kind of job, and for neighbouring and scattered pages. ValueError when a byte is wrong or a copy fails."""
    pages = max(1, tokens // page_size)
    pool = KVPool(config_of(shape, tokens), SPREAD * pages, page_size, dtype, device)
    host = HostPool(pool, SPREAD * pages)
    pool.storage.normal_(generator=torch.Generator(device).manual_seed(0))
    mover = open_mover(pool, host, clock=_clock(device))
    rows = []
    try:
        for name, chosen in _choices(pages).items():
            _timed(mover, "offload", *chosen)  # the host's pages have memory behind them from then on
            plain = {kind: _plain_s(kind, pages * host.page_bytes, device, repeats) for kind in _KINDS}
            for kind in _KINDS:
                seconds = statistics.median(_timed(mover, kind, *chosen) for _ in range(repeats))
                rows.append(
                    {
                        "copy": kind,
                        "page size": page_size,
                        "pages": name,
                        "GB/s": pages * host.page_bytes / seconds / 1e9,
                        "of a plain copy": plain[kind] / seconds,
                        "tokens/s": pages * page_size / seconds,
                    }
                )
            _compare(pool, host, *chosen)
    finally:
        mover.close()
    return rows


_KINDS: Final[tuple[CopyKind, ...]] = ("offload", "restore")


def _choices(pages: int) -> dict[str, tuple[PageIndices, PageIndices]]:
    """On the device, and on the host."""
    rng = np.random.default_rng(0)
    every = np.arange(SPREAD * pages, dtype=np.int32)
    return {
        "neighbours": (every[pages : 2 * pages], every[2 * pages : 3 * pages]),
        "scattered": (rng.permutation(every)[:pages], rng.permutation(every)[:pages]),
    }


def _timed(mover: Mover, kind: CopyKind, device_pages: PageIndices, host_pages: PageIndices) -> float:
    mover.start(CopyJob(number=0, kind=kind, device_pages=device_pages, host_pages=host_pages))
    mover.wait_done(JOB_S)
    (outcome,) = mover.take_done()
    if outcome.error:
        raise ValueError(f"a copy failed: {outcome.error}")
    return outcome.elapsed_s


def _plain_s(kind: CopyKind, num_bytes: int, device: torch.device, repeats: int) -> float:
    if device.type == "cpu":
        source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        return _median_s(lambda: np.copyto(target, source), device, repeats)
    on_host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    into, of = (on_host, on_device) if kind == "offload" else (on_device, on_host)
    return _median_s(lambda: into.copy_(of, non_blocking=True), device, repeats)


def _clock(device: torch.device) -> Callable[[], float]:
    return time.thread_time if device.type == "cpu" else time.perf_counter


def _median_s(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    call()
    seconds, clock = [], _clock(device)
    for _ in range(repeats):
        wait_for_device(device)
        started = clock()
        call()
        wait_for_device(device)
        seconds.append(clock() - started)
    return statistics.median(seconds)


def _compare(pool: KVPool, host: HostPool, device_pages: PageIndices, host_pages: PageIndices) -> None:
    """What was copied there and back is the same on both sides, to the bit."""
    on_device = pool.storage[:, :, device_pages.tolist()].cpu().permute(2, 0, 1, 3, 4, 5)
    if not torch.equal(on_device, host.storage[host_pages.tolist()]):
        raise ValueError(f"{len(device_pages)} pages of {pool.page_size} are not what was copied")
