"""What every engine behind ``EngineClient`` does, in a thread or in a process of its own, with a real (tiny) model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from prefixmesh import tokens
from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError, InternalError, ModelFileError, UnavailableError
from prefixmesh.worker.engine_client import EngineClient, RequestEvent
from prefixmesh.worker.in_process_engine import InProcessEngine
from prefixmesh.worker.messages import Admitted, Ended, EngineSampling, Refused, Submit, TokensOut
from prefixmesh.worker.process_engine import ProcessEngine
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAKERS = pytest.mark.parametrize(
    "make",
    [
        pytest.param(InProcessEngine, id="thread"),
        pytest.param(ProcessEngine, id="process", marks=pytest.mark.slow),
    ],
)

PROMPT = list(range(3, 60))
LONG = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("engine") / "tiny")


def engine_config(model: Path, **settings: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 8192,
        "threads": 1,
    }
    return EngineConfig(**(defaults | settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[InProcessEngine, ProcessEngine], ids=["thread", "process"])
async def engine(request: pytest.FixtureRequest, model: Path) -> AsyncIterator[EngineClient]:
    """One engine for the whole file: each test leaves it idle."""
    engine: EngineClient = request.param(engine_config(model))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def command(
    request_id: str,
    prompt: list[int] = PROMPT,
    *,
    max_tokens: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    namespace: bytes = b"n" * 16,
) -> Submit:
    sampling = EngineSampling(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=(),
    )
    return Submit(request_id=request_id, namespace=namespace, tokens=tokens.pack(prompt), sampling=sampling)


async def collect(engine: EngineClient, submit: Submit) -> list[RequestEvent]:
    return [event async for event in engine.submit(submit)]


def answer(events: list[RequestEvent]) -> list[int]:
    assert isinstance(events[-1], Ended), events[-1]
    return [token for event in events if isinstance(event, TokensOut) for token in event.token_ids]


def cached(events: list[RequestEvent]) -> int:
    assert isinstance(events[0], Admitted)
    return events[0].cached_tokens


async def idle_stats(engine: EngineClient) -> tuple[int, int, int]:
    """(running, protected pages, pages neither free nor cached)"""
    stats = await engine.stats()
    return stats.running, stats.protected_pages, stats.total_pages - stats.free_pages - stats.evictable_pages


async def test_cold_warm_flushed_and_batched_answers_are_equal(engine: EngineClient) -> None:
    """And the cache is really used in between."""
    await engine.flush()
    cold = await collect(engine, command("cold"))
    warm = await collect(engine, command("warm"))
    await engine.flush()
    flushed = await collect(engine, command("flushed"))
    batch = await asyncio.gather(*(collect(engine, command(f"b{i}")) for i in range(4)))
    assert [cached(events) for events in (cold, warm, flushed)] == [0, len(PROMPT) - 1, 0]
    assert len(answer(cold)) == 8
    for events in (warm, flushed, *batch):
        assert answer(events) == answer(cold)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine: EngineClient) -> None:
    """And other seeds give others."""
    alone = answer(await collect(engine, command("alone", temperature=1.0, seed=7, max_tokens=16)))
    batch = await asyncio.gather(
        *(collect(engine, command(f"s{i}", temperature=1.0, seed=i, max_tokens=16)) for i in range(5, 9))
    )
    answers = [answer(events) for events in batch]
    assert answers[2] == alone
    assert len({tuple(tokens) for tokens in answers}) == 4


async def test_closing_a_stream_aborts_its_request(engine: EngineClient) -> None:
    """F17: everything is given back within a step or two, and F21: the next turn works at once."""
    async with aclosing(engine.submit(command("left", max_tokens=LONG))) as stream:
        async for event in stream:
            if isinstance(event, TokensOut) and event.position >= 2:
                break
    assert await idle_stats(engine) == (0, 0, 0)
    assert len(answer(await collect(engine, command("next")))) == 8


async def test_an_abort_by_id_ends_the_stream(engine: EngineClient) -> None:
    """F18: unknown ids, twice, after the end: nothing happens."""
    engine.abort("unknown")
    ends = []
    async for event in engine.submit(command("aborted", max_tokens=LONG)):
        if isinstance(event, TokensOut):
            engine.abort("aborted")
            engine.abort("aborted")
        if isinstance(event, Ended):
            ends.append(event.reason)
    engine.abort("aborted")
    assert ends == ["aborted"]
    assert await idle_stats(engine) == (0, 0, 0)


async def test_a_cancelled_reader_aborts_its_request(engine: EngineClient) -> None:
    """F12 in small: readers cancelled at many points leave nothing behind."""
    for steps in range(8):
        task = asyncio.create_task(collect(engine, command(f"c{steps}", max_tokens=LONG)))
        for _ in range(steps * 3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await idle_stats(engine) == (0, 0, 0)


async def test_what_cannot_fit_is_refused_with_the_field_and_the_next_is_served(engine: EngineClient) -> None:
    """F40, F59."""
    [refused] = await collect(engine, command("huge", [3] * 5000, max_tokens=1))
    assert isinstance(refused, Refused)
    assert refused.field == "prompt"
    [refused] = await collect(engine, command("wide", [3] * 4000, max_tokens=97))
    assert isinstance(refused, Refused)
    assert (refused.field, "at most 96 allowed" in refused.problem) == ("sampling.max_tokens", True)
    assert len(answer(await collect(engine, command("edge", [3] * 4000, max_tokens=3)))) == 3


async def test_max_tokens_0_answers_nothing(engine: EngineClient) -> None:
    """F58."""
    events = await collect(engine, command("none", max_tokens=0))
    assert answer(events) == []
    assert isinstance(events[-1], Ended)
    assert (events[-1].reason, events[-1].completion_tokens) == ("length", 0)


async def test_two_live_requests_with_one_id_are_a_bug_that_is_told(engine: EngineClient) -> None:
    """F60: the front makes ids unique; the first request is not disturbed when it fails to."""
    async with aclosing(engine.submit(command("same", max_tokens=LONG))) as first:
        await anext(first)
        with pytest.raises(InternalError, match="same"):
            await collect(engine, command("same"))
        assert isinstance(await anext(first), TokensOut)


async def test_namespaces_share_nothing(engine: EngineClient) -> None:
    prompt = list(range(100, 140))
    first = await collect(engine, command("a", prompt, namespace=b"a" * 16))
    other = await collect(engine, command("b", prompt, namespace=b"b" * 16))
    again = await collect(engine, command("a2", prompt, namespace=b"a" * 16))
    assert [cached(events) for events in (first, other, again)] == [0, 0, len(prompt) - 1]
    assert answer(first) == answer(other) == answer(again)


async def test_the_engine_tells_its_rates_and_counts(engine: EngineClient) -> None:
    await collect(engine, command("counted"))
    stats = await engine.stats()
    assert stats.prefill_tokens_per_s > 0
    assert stats.decode_step_ms > 0
    row = stats.cache
    assert 0 < row.hit_tokens.device < row.prompt_tokens
    assert row.prompt_tokens == sum(row.hit_tokens) + sum(row.miss_tokens)
    assert stats.double_releases == 0


@pytest.mark.parametrize(
    "settings",
    [{"page_size": 16}, {"prefix_cache": "hash"}, {"prefix_cache": "off"}, {"chunked_prefill_size": 7}],
)
async def test_page_sizes_caches_and_chunks_give_the_same_answers(
    engine: EngineClient, model: Path, settings: dict[str, object]
) -> None:
    """F44: 57 tokens cold and warm, compared with a cold run of the default engine."""
    await engine.flush()
    expected = answer(await collect(engine, command("expected")))
    async with started(InProcessEngine, engine_config(model, **settings)) as other:
        for name in ("cold", "warm"):
            events = await collect(other, command(name))
            assert answer(events) == expected
        assert cached(events) == {"page_size": 48, "prefix_cache": 48, "chunked_prefill_size": 56}[
            next(iter(settings))
        ] * (settings.get("prefix_cache") != "off")


@asynccontextmanager
async def started(
    make: Callable[[EngineConfig], EngineClient], config: EngineConfig
) -> AsyncIterator[EngineClient]:
    engine = make(config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@MAKERS
async def test_a_setting_that_does_not_fit_reaches_the_front_as_itself(
    make: Callable[[EngineConfig], EngineClient], model: Path, tmp_path: Path
) -> None:
    """With the message the engine gave it."""
    with pytest.raises(ConfigError, match="cuda:99"):
        await make(engine_config(model, device="cuda:99")).start()
    with pytest.raises(ModelFileError, match="nowhere"):
        await make(engine_config(tmp_path / "nowhere")).start()


@MAKERS
async def test_closing_an_engine_ends_its_streams(
    make: Callable[[EngineConfig], EngineClient], model: Path
) -> None:
    """UnavailableError, not silence; and again close, and a submit after it, are harmless."""
    async with started(make, engine_config(model)) as engine:
        stream = engine.submit(command("open", max_tokens=LONG))
        await anext(stream)
        await engine.close()
        with pytest.raises(UnavailableError):
            async for _ in stream:
                pass
        assert engine.closed.is_set()
        with pytest.raises(UnavailableError):
            await collect(engine, command("late"))
