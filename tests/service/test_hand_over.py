"""A worker that leaves, with processes: what callers ask for most is cached elsewhere when it is gone."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.client import AsyncClient
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.proto.v1 import router_pb2_grpc
from prefixmesh.rpc.channel import open_channel
from tests.support.failure_fleet import FailureFleet, until
from tests.support.pinning import Pins, ids_pin, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 640
PROMPTS = 6
WORKER = ("--max-total-tokens", "16384", "--step-ms", "2", "--prefill-ms-per-token", "0.2")


@pytest.fixture
def fleet(tmp_path: Path, tiny_model_folder: Path) -> Iterator[FailureFleet]:
    """A worker that is there alone at first."""
    with FailureFleet(tmp_path, model=str(tiny_model_folder), worker_arguments=WORKER) as fleet:
        fleet.start(1)
        yield fleet


async def warm_up(fleet: FailureFleet) -> list[list[int]]:
    """Prompts that the first worker has answered several times; then two more workers join."""
    await fleet.until_ready()
    prompts = [some_ids(seed, TOKENS, fleet.vocab_size) for seed in range(PROMPTS)]
    for _ in range(3):
        assert "w0" in {name for name, _ in await ask(fleet, prompts)}
    for worker in (fleet.add_worker(), fleet.add_worker()):
        await asyncio.to_thread(worker.start)
        await fleet.tell_router_of(worker)
    await fleet.until_ready()
    return prompts


async def ask(fleet: FailureFleet, prompts: list[list[int]]) -> list[tuple[str, int]]:
    """Who answered each, and how much of it was cached."""
    async with AsyncClient(fleet.router.address, timeout_s=60) as client:
        answers = [await client.generate([*ids, 3, 4, 5], max_tokens=1, temperature=0.0) for ids in prompts]
    return [(answer.worker_id, answer.cached_tokens) for answer in answers]


async def drain(fleet: FailureFleet, **fields: Any) -> None:
    async with open_channel(fleet.router.address) as channel:
        stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        await stub.DrainWorker(pb.DrainWorkerRequest(address="w0", **fields), timeout=120)


async def test_drained_workers_prefixes_hit_elsewhere_at_once(fleet: FailureFleet) -> None:
    """All that it was asked for, spread over the others; a pin of it is held elsewhere before it drains."""
    prompts = await warm_up(fleet)
    pins = Pins(fleet)
    pinned = some_ids(99, TOKENS, fleet.vocab_size)
    await pins.put(ids_pin("policy", pinned, replicas=2))
    await pins.until_held("policy", 2)
    await drain(fleet, hand_over_ms=60_000)
    answers = await ask(fleet, [*prompts, pinned])
    assert {name for name, _ in answers} == {"w1", "w2"}
    assert all(cached >= TOKENS for _, cached in answers), answers
    held = await pins.get("policy")
    assert held.held == 2
    copied = [view.copies.copied_tokens for name, view in (await fleet.views()).items() if name != "w0"]
    assert sum(copied) >= PROMPTS * TOKENS, "they were copied, and not computed"
    assert min(copied) > 0, "each took some over"


async def test_worker_that_is_told_to_stop_hands_over_while_its_streams_end(fleet: FailureFleet) -> None:
    """SIGTERM while an answer runs: by the time that it is gone, others have what it held."""
    prompts = await warm_up(fleet)
    async with AsyncClient(fleet.router.address, timeout_s=120) as client:
        running = asyncio.create_task(
            client.generate([*prompts[0], 9], max_tokens=1500, temperature=0.0, ignore_eos=True)
        )
        await until(lambda: _is_running(fleet), "an answer runs")
        fleet.worker("w0").send(signal.SIGTERM)

        async def has_copied() -> bool:
            views = await fleet.views()
            return int(sum(view.copies.copied_tokens for view in views.values())) >= PROMPTS * TOKENS

        await until(has_copied, "its prefixes are copied")
        answers = await ask(fleet, prompts)
        assert all(cached >= TOKENS for _, cached in answers), answers
        assert (await running).completion_tokens == 1500


async def _is_running(fleet: FailureFleet) -> bool:
    running: int = (await fleet.views())["w0"].running_requests
    return running > 0


async def test_drain_without_time_for_it_hands_nothing_over(fleet: FailureFleet) -> None:
    """And one that is undone takes requests again."""
    prompts = await warm_up(fleet)
    await drain(fleet)

    async def is_draining() -> bool:
        told: bool = (await fleet.views())["w0"].draining
        return told

    await until(is_draining, "it says that it drains")
    views = await fleet.views()
    assert sum(view.copies.copied_tokens for view in views.values()) == 0
    await drain(fleet, undo=True)
    await fleet.until_ready()
    assert "w0" in {name for name, _ in await ask(fleet, prompts)}
