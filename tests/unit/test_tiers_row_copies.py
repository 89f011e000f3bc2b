"""Copies within a CPU's memory: every byte where it belongs and no other touched, whatever pages are named."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.errors import ConfigError
from prefixmesh.worker.tiers import row_copies
from prefixmesh.worker.tiers.copies import CopyJob, CopyKind
from prefixmesh.worker.tiers.host_pool import HostPool
from tests.support.movers import Pools, pages_of

KINDS: tuple[CopyKind, ...] = ("offload", "restore", "fetch")


def run(pools: Pools, job: CopyJob) -> int:
    """Pieces that it took."""
    copies = pools.copies()
    return sum(1 for _ in (copies.offload(job) if job.kind == "offload" else copies.bring(job)))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_rows=st.sampled_from([1, 3, 1000]),
)
def test_every_job_gives_the_bytes_of_a_copy_page_by_page(
    kind: CopyKind, seed: int, page_size: int, dtype: torch.dtype, block_rows: int
) -> None:
    """Scattered pages, neighbours and in between, on both sides, with blocks that hold all rows, a few or one."""
    pools = Pools(page_size=page_size, dtype=dtype)
    job = pools.job(0, kind, np.random.default_rng(seed))
    expected = pools.snapshot()
    expected.copy(job)
    with pytest.MonkeyPatch.context() as patch:
        row_bytes = pools.host.page_bytes // (2 * pools.layers)
        patch.setattr(row_copies, "MIN_RUN_BYTES", 3 * row_bytes)
        patch.setattr(row_copies, "BLOCK_BYTES", block_rows * row_bytes)
        run(pools, job)
    expected.check(pools)


@pytest.mark.parametrize("kind", ["restore", "fetch"])
def test_layers_come_one_by_one_the_first_first(kind: CopyKind) -> None:
    """After each yield one more layer is there, and nothing of the next."""
    pools = Pools()
    job = pools.job(0, kind, np.random.default_rng(5))
    expected = pools.snapshot()
    before = pools.device.storage.clone()
    expected.copy(job)
    assert len(job.device_pages)
    for layer, _ in enumerate(pools.copies().bring(job)):
        assert torch.equal(pools.device.storage[: layer + 1], expected.device[: layer + 1])
        assert torch.equal(pools.device.storage[layer + 1 :], before[layer + 1 :])
    assert layer == pools.layers - 1


def test_a_long_offload_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them a mover sees to what is more urgent; the bytes are those of one copy."""
    pools = Pools()
    monkeypatch.setattr(row_copies, "PIECE_BYTES", 4 * pools.host.page_bytes)
    monkeypatch.setattr(row_copies, "BLOCK_BYTES", pools.host.page_bytes)
    pages = np.arange(40, dtype=np.int32)
    job = CopyJob(number=0, kind="offload", device_pages=pages, host_pages=pages[::-1].copy())
    expected = pools.snapshot()
    expected.copy(job)
    assert run(pools, job) == 10
    expected.check(pools)


@pytest.mark.parametrize(
    ("device", "host", "words"),
    [
        (pages_of(1, 40), pages_of(1, 2), "device pages 1 to 40 are not all of 40"),
        (pages_of(1, -1), pages_of(1, 2), "device pages -1 to 1 are not all of 40"),
        (pages_of(1, 2), pages_of(60, 2), "other pages 2 to 60 are not all of 60"),
        (pages_of(1, 2), pages_of(1), "2 device pages cannot be copied with 1 others"),
    ],
)
@pytest.mark.parametrize("kind", ["offload", "restore"])
def test_pages_that_are_not_there_are_refused_before_anything_is_copied(
    kind: CopyKind, device: "np.typing.NDArray[np.int32]", host: "np.typing.NDArray[np.int32]", words: str
) -> None:
    """Page 40 is the scratch page: nobody's."""
    pools = Pools()
    before = pools.snapshot()
    with pytest.raises(ValueError, match=words):
        run(pools, CopyJob(number=0, kind=kind, device_pages=device, host_pages=host))
    before.check(pools)


def test_a_buffer_that_holds_other_pages_is_refused() -> None:
    """Another page size, another type, a part of something larger: its bytes would land anywhere."""
    pools = Pools()
    good = pools.buffer(2)
    for buffer in (
        good[:1],
        good[:, :, :, :1],
        good.double(),
        good.flip(0).transpose(1, 2).contiguous()[:, :1],
    ):
        with pytest.raises(ValueError, match=r"buffer of|cannot be copied"):
            run(pools, CopyJob(number=0, kind="fetch", device_pages=pages_of(1, 2), buffer=buffer))


def test_a_host_pool_says_what_it_holds_and_refuses_what_it_cannot() -> None:
    """A page is one contiguous piece across all layers."""
    pools = Pools(page_size=2)
    host = pools.host
    assert host.storage.shape == (60, *host.page_shape) == (60, pools.layers, 2, 2, 2, 8)
    assert host.storage[3].is_contiguous()
    assert host.page_bytes == pools.layers * 2 * 2 * 2 * 8 * 4
    assert host.buffer(5).shape == (5, *host.page_shape)
    assert repr(host) == "HostPool(60 pages of 2, torch.float32, 0 MiB)"
    with pytest.raises(ConfigError, match="at least one page, got 0"):
        HostPool(pools.device, 0)
    with pytest.raises(ConfigError, match="cannot be had"):
        HostPool(pools.device, 2**50)
