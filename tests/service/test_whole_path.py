"""Two real workers and a router over real sockets, a tiny model: what the product promises, end to end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixmesh.bench.agreement import FLOAT32_MARGIN
from prefixmesh.client import AsyncClient
from prefixmesh.config import EngineConfig, WorkerConfig
from prefixmesh.fleet_secret import generate
from prefixmesh.requests import TokenPrompt
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.tokens import pack
from prefixmesh.worker.messages import EngineSampling
from prefixmesh.worker.sampling import margins, sample
from prefixmesh.worker.server import WorkerServer
from tests.support.exported_model import load_in_transformers, logits_of
from tests.support.servers import eventually
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model

BLOCK = 64


@asynccontextmanager
async def fleet(folder: Path, *, workers: int = 2, **engine: Any) -> AsyncIterator[str]:
    """The router's address in front of ``workers`` workers that serve the tiny model in ``folder``."""
    model = str(make_tiny_model(folder / "tiny"))
    secret = generate()
    config = EngineConfig(model=model, dtype="float32", max_total_tokens=8192, threads=1, **engine)
    async with AsyncExitStack() as stack:
        addresses = []
        for index in range(workers):
            worker = WorkerServer(
                WorkerConfig(engine=config, worker_id=f"worker-{index}", in_process=True), secret
            )
            bound = await worker.start()
            stack.push_async_callback(worker.stop, 0.0)
            addresses.append(bound.address)
        router = RouterServer(RouterConfig(workers=tuple(addresses), model=model), secret)
        bound_router = await router.start()
        stack.push_async_callback(router.stop, 0.0)
        await eventually(lambda: len(router.core.registry.ready) == workers)
        yield bound_router.address


def prompt(seed: int, blocks: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, blocks * BLOCK)]


async def ask(client: AsyncClient, ids: list[int]) -> tuple[str, int]:
    """The worker that answered, and how many prompt tokens it found cached."""
    answer = await client.generate(TokenPrompt(pack(ids)), max_tokens=1, temperature=0, ignore_eos=True)
    return answer.worker_id, answer.cached_tokens


@pytest.mark.slow
async def test_only_a_true_prefix_counts(tmp_path: Path) -> None:
    """F7: one worker holds P, another Q; Q+P goes to the second with Q matched, and P in the middle counts for nothing."""
    async with fleet(tmp_path) as address, AsyncClient(address) as client:
        prompts = [prompt(seed, 8) for seed in range(8)]
        answers = await asyncio.gather(*(ask(client, ids) for ids in prompts))
        held = {worker: ids for ids, (worker, _) in zip(prompts, answers, strict=True)}
        assert len(held) == 2, "eight prompts at once take both workers"
        (_, p), (holder_q, q) = held.items()
        assert await ask(client, q + p) == (holder_q, len(q))
        assert (await ask(client, [5, *p]))[1] == 0


@pytest.mark.slow
async def test_warm_within_a_tenant_and_cold_for_another(tmp_path: Path) -> None:
    """F48: the same tenant finds at least 95 % cached, another tenant and another extra_key nothing."""
    async with (
        fleet(tmp_path) as address,
        AsyncClient(address, tenant="acme") as acme,
        AsyncClient(address, tenant="other") as other,
    ):
        ids = prompt(3, 4)
        assert (await ask(acme, ids))[1] == 0
        assert (await ask(acme, ids))[1] >= 0.95 * len(ids)
        assert (await ask(other, ids))[1] == 0
        narrowed = await acme.generate(TokenPrompt(pack(ids)), max_tokens=1, extra_key="project-7")
        assert narrowed.cached_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
async def test_eight_turns_find_the_turn_before(tmp_path: Path, page_size: int) -> None:
    """Each of 8 turns, sent as chat messages, finds the prompt and the answer of the turn before, less one page and the last
    token; and no answer had to be tokenised again, although a random model's text rarely tokenises to what was generated."""
    async with fleet(tmp_path, page_size=page_size) as address, AsyncClient(address, tenant="acme") as client:
        messages = [{"role": "system", "content": "You are a helpful assistant. " * 10}]
        before = 0
        for turn in range(8):
            messages.append({"role": "user", "content": f"What is the capital of France? {turn}"})
            answer = await client.generate(messages, max_tokens=24, temperature=1.0, seed=turn)
            assert answer.cached_tokens >= before - page_size - 1
            assert answer.retokenized_tokens == 0
            before = answer.prompt_tokens + answer.completion_tokens
            messages.append({"role": "assistant", "content": answer.text})


@pytest.mark.slow
async def test_warm_answers_equal_cold_ones(tmp_path: Path) -> None:
    """F44 (cold and warm): 200 prompts, drawn from all tokens, answer the same from an empty cache and from a full one.

    What shares the batch decides how logits are rounded, so a draw may differ where its best two are closer than that: at the first
    token that does, they must be, and it must be a rare one.
    """
    close_calls: list[tuple[list[int], Sequence[int], Sequence[int], int]] = []
    async with (
        fleet(tmp_path, workers=1, prefix_cache="off") as cold_address,
        fleet(tmp_path / "warm", workers=1, page_size=16) as warm_address,
        AsyncClient(cold_address) as cold,
        AsyncClient(warm_address) as warm,
    ):
        shared = prompt(4, 3)

        async def compare(index: int) -> None:
            ids = shared[: 10 + index % 180] + prompt(1000 + index, 1)[: 5 + index % 50]
            packed = TokenPrompt(pack(ids))
            sampling: dict[str, Any] = {
                "max_tokens": 8,
                "temperature": 0.8,
                "seed": index,
                "ignore_eos": True,
            }
            expected = await cold.generate(packed, **sampling)
            first = await warm.generate(packed, **sampling)
            again = await warm.generate(packed, **sampling)
            assert again.cached_tokens >= (len(ids) - 1) // 16 * 16
            assert expected.cached_tokens == 0
            close_calls.extend(
                (ids, answer.token_ids, expected.token_ids, index)
                for answer in (first, again)
                if answer.token_ids != expected.token_ids
            )

        for start in range(0, 200, 20):
            await asyncio.gather(*(compare(index) for index in range(start, start + 20)))
    assert len(close_calls) <= 2
    for ids, one, other, seed in close_calls:
        assert margin_where_they_differ(tmp_path / "tiny", ids, one, other, seed) <= FLOAT32_MARGIN


def margin_where_they_differ(
    model: Path, ids: list[int], one: Sequence[int], other: Sequence[int], seed: int
) -> float:
    """How far the best two were apart at the first place at which two answers to ``ids`` differ."""
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    logits = logits_of(load_in_transformers(model), ids, one[: place + 1])[-1:].contiguous()
    sampling = EngineSampling(
        temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=1, stop_token_ids=()
    )
    assert sample(logits, [sampling], [place]).token_ids[0] in (one[place], other[place])
    return margins(logits, [sampling], [place])[0]


@pytest.mark.slow
def test_where_answers_differ_is_told_how_close_it_was(tmp_path: Path) -> None:
    """What the comparison of cold and warm answers rests on: the margin of a draw that went the other way."""
    model, ids = make_tiny_model(tmp_path / "tiny"), prompt(4, 1)
    logits = logits_of(load_in_transformers(model), ids, [7, 8])
    kind = EngineSampling(
        temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=1, stop_token_ids=()
    )
    drawn = sample(logits, [kind] * 2, [0, 1]).token_ids
    told = margin_where_they_differ(model, ids, [7, drawn[1]], [7, drawn[1] + 1], 3)
    assert told == pytest.approx(margins(logits[1:], [kind], [1])[0])
    assert told > FLOAT32_MARGIN
