"""What a caller sees of the host and disk tiers, with a real engine behind real sockets: what the device gave up comes back, with the
same answer."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixmesh import fleet_secret
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.errors import ConfigError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.worker.server import WorkerServer
from tests.support.router_kit import token_request
from tests.support.servers import Answer, Worker, eventually, real_worker, running_worker
from tests.support.tiny_model import VOCAB_SIZE, TinyShape, make_tiny_model

GREEDY = pb.Sampling(temperature=0, max_tokens=6, ignore_eos=True)
PAGE = 16
DEVICE_TOKENS = 1024
PATIENCE_S = 60.0
"""For what nobody announces, on a machine that has other work."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, and yet deep enough that computing a prefix takes longer than copying it."""
    shape = TinyShape(num_layers=8, hidden_size=128, intermediate_size=512, head_dim=32)
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), shape)


def engine(model: Path, **changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "dtype": "float32",
        "page_size": PAGE,
        "max_total_tokens": DEVICE_TOKENS,
        "hicache_ratio": 40.0,
        "threads": 1,
    }
    return EngineConfig(**(fields | changes))


@pytest.fixture
async def worker(model: Path) -> AsyncIterator[Worker]:
    async with real_worker(engine(model)) as running:
        yield running


def some_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, count)]


def life(settings: EngineConfig, secret: FleetSecret) -> AbstractAsyncContextManager[Worker]:
    """One life of a worker of a fleet with this secret."""
    return running_worker(WorkerServer(WorkerConfig(engine=settings, in_process=True), secret), secret)


async def ask(worker: Worker, ids: Sequence[int]) -> Answer:
    return await worker.generate(token_request(ids, sampling=GREEDY), timeout_s=PATIENCE_S)


async def describe(worker: Worker) -> control_pb.DescribeResponse:
    told: control_pb.DescribeResponse = await worker.control.Describe(
        control_pb.DescribeRequest(), metadata=worker.control_metadata()
    )
    return told


async def is_at_rest(worker: Worker) -> bool:
    """Nothing runs, nothing is copied, no lock is held, and pages add up, on both tiers."""
    told = await describe(worker)
    return (
        told.running_requests == told.queued_requests == told.tiers.copies_in_flight == 0
        and told.pool.protected_pages == told.host_pool.protected_pages == 0
        and told.pool.free_pages + told.pool.evictable_pages == told.pool.total_pages
        and told.host_pool.free_pages + told.host_pool.evictable_pages == told.host_pool.total_pages
    )


async def rest(worker: Worker) -> control_pb.DescribeResponse:
    await eventually(lambda: is_at_rest(worker), PATIENCE_S)
    return await describe(worker)


async def push_out(worker: Worker, seed: int) -> None:
    """Ask for as much as the device holds and none of which anybody asks for again, with the backups of all before it done."""
    await rest(worker)
    for number in range(2):
        await ask(worker, some_tokens(1_000 * seed + number, DEVICE_TOKENS // 2 + 5 * PAGE))
    await rest(worker)


async def test_what_the_device_gave_up_comes_back_from_the_host_with_the_same_answer(worker: Worker) -> None:
    """The caller is told where its prompt was found, and how long it waited for it; the worker counts it once."""
    prompt = some_tokens(1, 30 * PAGE + 5)
    cold = await ask(worker, prompt)
    await push_out(worker, 1)
    back = await ask(worker, prompt)
    found = back.started.cached_tokens
    assert cold.started.cached_tokens.host == cold.started.cached_tokens.device == 0
    assert found.host >= 25 * PAGE
    assert found.host + found.device == 30 * PAGE
    assert back.token_ids == cold.token_ids
    assert back.finished.usage.cached_tokens == found
    assert back.finished.timings.load_back_ms > 0
    told = await rest(worker)
    assert told.tiers.loaded_back_tokens == found.host == told.cache.hit_tokens.host
    assert told.tiers.failed_copies == 0


@pytest.mark.parametrize(
    "count", [pytest.param(24, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.deep)]
)
async def test_cold_warm_and_restored_answers_are_the_same(worker: Worker, count: int) -> None:
    """F44: each prompt is asked for three times, the third time after the device gave it up; a third of the last is really restored."""
    rng = np.random.default_rng(7)
    prompts = [some_tokens(100 + number, int(rng.integers(40, 240))) for number in range(count)]
    answers = [[await ask(worker, prompt), await ask(worker, prompt)] for prompt in prompts]
    for prompt, told in zip(prompts, answers, strict=True):
        told.append(await ask(worker, prompt))
    assert all(len(told[0].token_ids) == GREEDY.max_tokens for told in answers)
    assert [told[1].token_ids for told in answers] == [told[0].token_ids for told in answers]
    assert [told[2].token_ids for told in answers] == [told[0].token_ids for told in answers]
    warm = sum(told[1].started.cached_tokens.device for told in answers)
    restored = sum(told[2].started.cached_tokens.host for told in answers)
    assert warm >= 0.8 * sum(map(len, prompts))
    assert restored >= sum(map(len, prompts)) / 3
    await rest(worker)


async def test_an_idle_worker_completes_its_backups_and_gives_their_locks_back(worker: Worker) -> None:
    """F54: after one request none follows; what the device has is on the host soon, and nothing is locked. (Who looks does call: that the
    loop needs no call either, ``unit/test_tier_backups.py`` holds.)"""
    await ask(worker, some_tokens(2, 20 * PAGE))

    async def is_backed_up() -> bool:
        told = await describe(worker)
        return told.tiers.backed_up_tokens == told.pool.evictable_pages * PAGE >= 20 * PAGE

    await eventually(is_backed_up, PATIENCE_S)
    assert await is_at_rest(worker)


@pytest.mark.slow
async def test_a_request_that_leaves_while_its_prefix_is_loaded_back_holds_nothing(worker: Worker) -> None:
    """F20: whether it leaves before, during or after the load-back, both tiers come to rest, and the prefix is still found."""
    prompt = some_tokens(3, 30 * PAGE + 5)
    cold = await ask(worker, prompt)
    for number, reads in enumerate((0, 1, 2)):
        await push_out(worker, 2 + number)
        call = worker.inference.Generate(token_request(prompt, sampling=GREEDY))
        for _ in range(reads):
            await call.read()
        call.cancel()
        await rest(worker)
    again = await ask(worker, prompt)
    assert again.started.cached_tokens.host + again.started.cached_tokens.device == 30 * PAGE
    assert again.token_ids == cold.token_ids


async def test_a_host_tier_that_does_not_fit_is_refused_at_start_with_the_sums(model: Path) -> None:
    """F55: weights, pool, host tier and staging, and what memory there is."""
    with pytest.raises(ConfigError) as refused:
        async with real_worker(engine(model, hicache_size=1e6)):
            pass
    told = str(refused.value)
    for part in ("weights", "KV", "host tier", "staging", "hicache_size=1e+06", "MiB are free"):
        assert part in told


@pytest.mark.slow
async def test_a_worker_that_starts_again_finds_its_prefixes_on_the_disk(model: Path, tmp_path: Path) -> None:
    """At least nine tenths of the prefix, for the same answer; a worker with another revision of the model finds nothing (F33)."""
    folder = tmp_path / "cache"
    settings = engine(model, disk_cache_dir=str(folder))
    secret = (
        fleet_secret.generate()
    )  # a fleet's is in a file, and the same in each life: namespaces are made with it
    prompt = some_tokens(4, 30 * PAGE)
    async with life(settings, secret) as worker:
        cold = await ask(worker, prompt)

        async def is_written() -> bool:
            return (await describe(worker)).tiers.disk_written_tokens >= 0.9 * len(prompt)

        await eventually(is_written, PATIENCE_S)
    async with life(settings, secret) as worker:
        warm = await ask(worker, prompt)
        await rest(worker)
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")  # the same weights under another revision
    async with life(engine(other, disk_cache_dir=str(folder)), secret) as worker:
        foreign = await ask(worker, prompt)
    assert warm.started.cached_tokens.disk >= 0.9 * len(prompt)
    assert warm.token_ids == cold.token_ids == foreign.token_ids
    assert list(foreign.started.cached_tokens.ListFields()) == []
