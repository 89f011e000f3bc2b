"""Balance and bursts over each data path, with real fronts, caches and reports: where tokens pass must not change where requests go."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from prefixmesh.client import AsyncClient
from prefixmesh.router import placements
from tests.support.fake_worker import Script
from tests.support.router_kit import running_router
from tests.support.servers import eventually
from tests.support.timed_fleet import TimedFleet, ask, timed_fleet

VOCABULARY = 250


@pytest.fixture(params=[False, True], ids=["proxy", "direct"])
def is_direct(request: pytest.FixtureRequest) -> bool:
    direct: bool = request.param
    return direct


@pytest.fixture
async def pair() -> AsyncIterator[TimedFleet]:
    async with timed_fleet(2) as fleet:
        yield fleet


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


@pytest.mark.slow
async def test_unique_prompts_are_shared_out_evenly(is_direct: bool) -> None:
    """200 of them, 32 at once, two workers: each gets 40 to 60 % (F2). Afterwards no load is left."""
    rng = random.Random(2)
    places = asyncio.Semaphore(32)
    async with running_router(2) as router, AsyncClient(router.address, direct=is_direct) as client:

        async def one(ids: list[int]) -> str:
            async with places:
                return (await client.generate(ids)).worker_id

        chosen = Counter(await asyncio.gather(*(one(prompt(rng, 200)) for _ in range(200))))
        assert sum(chosen.values()) == 200
        assert min(chosen.values()) >= 80, chosen
        await eventually(lambda: router.loads() == [0, 0])


@pytest.mark.slow
async def test_burst_with_one_new_prefix_settles_on_few(is_direct: bool) -> None:
    """32 at once with the same new 4,000 tokens and tails of 200, four empty workers, none of which answers before all have been sent: at most
    two compute the prefix, and nobody gets more than 60 % (F6)."""
    rng = random.Random(6)
    prefix = prompt(rng, 4_000)
    script = Script()
    script.before_start.shut()
    async with (
        running_router(4, script=script) as router,
        AsyncClient(router.address, direct=is_direct) as client,
    ):
        asking = [asyncio.create_task(client.generate(prefix + prompt(rng, 200))) for _ in range(32)]
        await eventually(lambda: sum(worker.running for worker in router.workers) == 32)
        script.before_start.open()
        chosen = Counter([(await answer).worker_id for answer in asking])
    assert len(chosen) <= 2, chosen
    assert max(chosen.values()) <= 0.6 * 32, chosen


async def test_blocked_request_is_one_request_of_load(is_direct: bool) -> None:
    """Before its first byte, at every token in between: exactly 1; 0 when the stream has closed (F3)."""
    script = Script()
    script.before_start.shut()
    script.before_delta.shut()
    async with (
        running_router(1, script=script) as router,
        AsyncClient(router.address, direct=is_direct) as client,
    ):
        stream = client.stream([1, 2, 3])
        reading = asyncio.create_task(stream.collect())
        await eventually(lambda: router.workers[0].running == 1)
        assert router.loads() == [1]
        script.before_start.open()
        for _ in range(3):
            await eventually(lambda: script.before_delta.waiting == 1)
            assert router.loads() == [1]
            script.before_delta.let_one()
        await reading
        await eventually(lambda: router.loads() == [0])


async def test_conversation_stays_where_its_beginning_is(pair: TimedFleet, is_direct: bool) -> None:
    """Turn after turn, each the last one continued, on the worker that has it, nearly all of it cached."""
    rng = random.Random(7)
    async with AsyncClient(pair.address, direct=is_direct) as client:
        said = prompt(rng, 300)
        first = await ask(client, said)
        for _ in range(3):
            said = [*said, *first.token_ids, *prompt(rng, 70)]
            await pair.until_idle()  # of a direct stream's end the router hears by the next report
            turn = await ask(client, said)
            assert turn.worker_id == first.worker_id
            assert turn.cached_tokens >= len(said) - 70 - 4 - 64
            said = [*said, *turn.token_ids]


async def test_cancelled_streams_leave_no_load(pair: TimedFleet, is_direct: bool) -> None:
    """Left at once, after the first token, in the middle: the router counts nothing a moment later (F12, F13)."""
    rng = random.Random(8)
    async with AsyncClient(pair.address, direct=is_direct) as client:
        for tokens in (0, 1, 3):
            streams = [client.stream(prompt(rng, 100), max_tokens=500, ignore_eos=True) for _ in range(6)]
            for stream in streams:
                for _ in range(tokens):
                    await anext(stream)
            for stream in streams:
                stream.cancel()
        await ask(client, prompt(rng, 100))
        await pair.until_idle()


async def test_removing_a_worker_harms_no_stream_and_no_count(is_direct: bool) -> None:
    """Ten streams run on, whatever the path; added again, a worker's load counts only what is new, and never falls below 0 (F14, F31)."""
    script = Script()
    script.before_delta.shut()
    async with (
        running_router(1, script=script) as router,
        AsyncClient(router.address, direct=is_direct) as client,
    ):
        address = router.workers[0].address
        streams = [client.stream([number, 2, 3]) for number in range(10)]
        for stream in streams:
            await anext(stream)
        assert router.loads() == [10]
        assert router.server.remove_worker(address)
        assert router.server.add_worker(address)
        assert not router.server.add_worker(address)
        await router.until_ready(1)
        assert router.loads() == [0]
        later = client.stream([99, 2, 3])
        await anext(later)
        assert router.loads() == [1]
        script.before_delta.open()
        for stream in streams:
            assert len((await stream.collect()).token_ids) == 4
        await later.collect()
        await eventually(lambda: router.loads() == [0])
        router.server.core.check_invariants()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
async def test_worker_that_dies_ends_its_reservations(
    pair: TimedFleet, is_direct: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left before it dies or not: nothing stays booked there, and the other serves."""
    monkeypatch.setattr(placements, "LOST_AFTER_S", 0.2)
    rng = random.Random(9)
    async with AsyncClient(pair.address, direct=is_direct) as client:
        stream = client.stream(prompt(rng, 100), max_tokens=4_000, ignore_eos=True)
        await anext(stream)
        assert stream.started is not None
        left, gone = stream.started.worker_id, pair.workers[stream.started.worker_id]
        if when == "before":
            stream.cancel()
        await gone.stop(0.0)
        answers = await asyncio.gather(*(ask(client, prompt(rng, 100)) for _ in range(8)))
        assert {answer.worker_id for answer in answers} == set(pair.workers) - {left}
        stream.cancel()
        await pair.until_idle()
