"""Copies between a GPU's memory and the host's: byte for byte, in order beside kernels that read and write the same pages, and a whole model that
computes while its KV is on its way."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixmesh.config import EngineConfig
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.open_model import OpenedModel, open_model
from prefixmesh.worker.tiers.copies import CopyJob, CopyKind, Mover
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.open_mover import open_mover
from tests.support.movers import WAIT_S, outcomes, pages_of, some_pages
from tests.support.paged_attention import config_of
from tests.support.plans import PagedSequence, Piece, make_plan
from tests.support.tiny_model import TinyShape, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles kernels at their first use
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
PAGES = 512

LOGIT_TOLERANCE = 1e-3
"""The same kernels on the same KV, in float32."""


class Pools:
    """A GPU's pool and a pinned one, of different numbers everywhere, and a mover between them."""

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        self.device = KVPool(config_of(8, 4), PAGES, page_size, dtype, DEVICE, scratch_pages=1)
        self.host = HostPool(self.device, 2 * PAGES)
        self.device.storage.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        self.host.storage.normal_(generator=torch.Generator().manual_seed(1))
        self.mover = open_mover(self.device, self.host)

    def run(self, job: CopyJob) -> None:
        self.mover.start(job)
        assert [outcome.error for outcome in outcomes(self.mover, 1)] == [""]


@pytest.fixture(params=[1, 16])
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    made = Pools(request.param, torch.bfloat16)
    yield made
    made.mover.close()


@pytest.mark.parametrize("kind", ["offload", "restore", "fetch"])
def test_every_byte_is_where_it_belongs_and_no_other_changed(pools: Pools, kind: CopyKind) -> None:
    rng = np.random.default_rng(3)
    for number in range(10):
        count = int(rng.integers(1, PAGES))
        device, host = some_pages(rng, PAGES, count), some_pages(rng, 2 * PAGES, count)
        buffer = pools.host.buffer(count).normal_() if kind == "fetch" else None
        on_device, on_host = pools.device.storage.cpu(), pools.host.storage.clone()
        if kind == "offload":
            on_host[host.tolist()] = on_device[:, :, device.tolist()].permute(2, 0, 1, 3, 4, 5)
        else:
            source = on_host[host.tolist()] if buffer is None else buffer
            on_device[:, :, device.tolist()] = source.permute(1, 2, 0, 3, 4, 5)
        host_pages = host if buffer is None else None
        pools.run(
            CopyJob(number=number, kind=kind, device_pages=device, host_pages=host_pages, buffer=buffer)
        )
        assert torch.equal(pools.device.storage.cpu(), on_device)
        assert torch.equal(pools.host.storage, on_host)


def busy() -> None:
    """Milliseconds of the loop's stream that the host does not wait for."""
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]


def test_a_backup_copies_what_is_still_to_be_computed_when_it_is_started(pools: Pools) -> None:
    pages = np.arange(PAGES, dtype=np.int32)
    busy()
    pools.device.storage.fill_(5.0)
    pools.run(CopyJob(number=0, kind="offload", device_pages=pages, host_pages=pages))
    assert (pools.host.storage[:PAGES] == 5).all()


def test_a_load_back_overwrites_nothing_that_is_still_to_be_read(pools: Pools) -> None:
    pages, before = np.arange(PAGES, dtype=np.int32), pools.device.storage.clone()
    busy()
    read = pools.device.storage.clone()
    pools.run(CopyJob(number=0, kind="restore", device_pages=pages, host_pages=pages))
    assert torch.equal(read, before)


def test_layers_are_read_after_they_have_come_though_the_host_does_not_wait(pools: Pools) -> None:
    pages = np.arange(PAGES, dtype=np.int32)
    expected = pools.host.storage[:PAGES].permute(1, 2, 0, 3, 4, 5).to(DEVICE)
    for number in range(20):
        pools.device.storage.zero_()
        pools.mover.start(CopyJob(number=number, kind="restore", device_pages=pages, host_pages=pages))
        pools.mover.expect([number], WAIT_S)
        read = []
        for layer in range(pools.device.num_layers):
            pools.mover.await_layer(layer)
            read.append(pools.device.storage[layer, :, :PAGES].clone())
        assert torch.equal(torch.stack(read), expected)
        outcomes(pools.mover, 1)


def test_copies_beside_a_computing_loop_lose_nothing(pools: Pools) -> None:
    """Backups and load-backs there and back while another thread keeps the GPU busy."""
    over = threading.Event()

    def compute() -> None:
        x = torch.randn(1024, 1024, device=DEVICE)
        while not over.is_set():
            x = (x @ x).tanh()
            torch.cuda.synchronize(DEVICE)

    loop = threading.Thread(target=compute)
    loop.start()
    try:
        before, rng = pools.device.storage[:, :, :PAGES].clone(), np.random.default_rng(0)
        pages = np.arange(PAGES, dtype=np.int32)
        for number in range(0, 20, 2):
            host = rng.permutation(2 * PAGES)[:PAGES].astype(np.int32)
            pools.run(CopyJob(number=number, kind="offload", device_pages=pages, host_pages=host))
            pools.device.storage.zero_()
            pools.run(CopyJob(number=number + 1, kind="restore", device_pages=pages, host_pages=host))
            assert torch.equal(pools.device.storage[:, :, :PAGES], before)
    finally:
        over.set()
        loop.join()


def opened(folder: Path, page_size: int) -> OpenedModel:
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "hicache_ratio": 2.0,
    }
    return open_model(resolve_model(str(folder)), EngineConfig(page_size=page_size, **settings))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_step_that_begins_before_its_prefix_has_come_gives_the_same_logits(
    tmp_path: Path, page_size: int
) -> None:
    model = opened(
        make_tiny_model(tmp_path, TinyShape(hidden_size=256, num_heads=6, num_kv_heads=2, head_dim=64)),
        page_size,
    )
    mover, pool = model.mover, model.runner.pool
    assert mover is not None
    assert model.load_back_ms_per_token is not None
    count = 256 // page_size
    pages = list(range(3, 3 + count))
    tokens = np.random.default_rng(0).integers(3, 500, 256 + 9).tolist()
    model.runner.forward(make_plan([Piece(PagedSequence(tokens=tokens[:256], pages=pages), 256)], page_size))
    rest = make_plan(
        [
            Piece(
                PagedSequence(
                    tokens=tokens,
                    pages=[*pages, *range(1000 // page_size, 1000 // page_size + 9)],
                    computed=256,
                ),
                9,
            )
        ],
        page_size,
    )
    expected = model.runner.forward(rest).clone()
    both = {"device_pages": pages_of(*pages), "host_pages": pages_of(*range(count))}
    run(mover, CopyJob(number=1, kind="offload", **both))
    pool.storage[:, :, pages] = torch.nan
    mover.start(CopyJob(number=2, kind="restore", **both))
    mover.expect([2], WAIT_S)
    found = model.runner.forward(rest)
    torch.testing.assert_close(found, expected, atol=LOGIT_TOLERANCE, rtol=0)
    mover.close()


def run(mover: Mover, job: CopyJob) -> None:
    mover.start(job)
    assert [outcome.error for outcome in outcomes(mover, 1)] == [""]
