"""What sampling promises of whole answers, with a real (tiny) model in float32: the same seed gives the same tokens, whatever
shares the batch and whatever rules the others have."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Final

import pytest

from prefixmesh import tokens
from prefixmesh.config import EngineConfig
from prefixmesh.worker.engine_client import EngineClient, RequestEvent
from prefixmesh.worker.in_process_engine import InProcessEngine
from prefixmesh.worker.messages import Ended, EngineSampling, Refused, Submit, TokensOut
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT: Final = list(range(3, 60))
LENGTH: Final = 24

RULES: Final[dict[str, dict[str, object]]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 3.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": -1.5},
    "bias": {"bias_ids": (7, 9, 300), "biases": (4.0, -100.0, 5.0)},
    "patient": {"min_tokens": 12, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 4))},
    "regex": {"regex": "[a-z]{3,9}( [a-z]{2,5})*[.]", "stop_token_ids": (2,), "min_tokens": 8},
    "json": {
        "json_schema": '{"type": "array", "items": {"type": "integer"}, "maxItems": 5}',
        "repetition_penalty": 1.2,
        "stop_token_ids": (2,),
    },
    "told": {"temperature": 2.0, "logprobs": 20},
    "all": {
        "logprobs": 3,
        "temperature": 1.5,
        "repetition_penalty": 0.9,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "bias_ids": (11,),
        "biases": (6.0,),
        "min_tokens": 20,
        "stop_token_ids": (11, 12, 13, 2**31 - 1),
    },
}


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    model = make_tiny_model(tmp_path_factory.mktemp("sampling") / "tiny")
    engine = InProcessEngine(
        EngineConfig(model=str(model), dtype="float32", device="cpu", max_total_tokens=8192, threads=1)
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def command(request_id: str, rules: dict[str, object], *, resumed: list[int] | None = None) -> Submit:
    plain: dict[str, object] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 6,
        "max_tokens": LENGTH,
        "stop_token_ids": (),
    }
    sampling = EngineSampling(**(plain | rules))  # type: ignore[arg-type]
    return Submit(
        request_id=request_id,
        namespace=b"n" * 16,
        tokens=tokens.pack(PROMPT),
        sampling=sampling,
        resumed=tokens.pack(resumed or []),
    )


async def collect(engine: EngineClient, submit: Submit) -> list[RequestEvent]:
    return [event async for event in engine.submit(submit)]


def answer(events: list[RequestEvent]) -> list[int]:
    assert isinstance(events[-1], Ended), events[-1]
    assert events[-1].reason in ("stop", "length"), events[-1]
    return [token for event in events if isinstance(event, TokensOut) for token in event.token_ids]


async def answer_to(engine: EngineClient, name: str, rules: dict[str, object]) -> list[int]:
    return answer(await collect(engine, command(name, rules)))


async def test_the_same_seed_gives_the_same_tokens_alone_and_among_others_with_every_rule(
    engine: EngineClient,
) -> None:
    """And every rule has an effect here."""
    alone = {name: await answer_to(engine, name, rules) for name, rules in RULES.items()}
    plain = await answer_to(engine, "plain", {})
    together = await asyncio.gather(*(answer_to(engine, name, rules) for name, rules in RULES.items()))
    assert dict(zip(RULES, together, strict=True)) == alone
    assert {name for name, ids in alone.items() if ids == plain} == set()


async def test_a_bias_bans_and_forces(engine: EngineClient) -> None:
    greedy: dict[str, object] = {"temperature": 0.0}
    plain = await answer_to(engine, "plain", greedy)
    banned = await answer_to(engine, "ban", greedy | {"bias_ids": (plain[0],), "biases": (-100.0,)})
    assert plain[0] not in banned
    forced = await answer_to(engine, "force", greedy | {"bias_ids": (77,), "biases": (100.0,)})
    assert forced == [77] * LENGTH


async def test_a_presence_penalty_asks_for_something_new(engine: EngineClient) -> None:
    """It counts the answer, not the prompt: strong enough, no token comes twice, and the first may be one of the prompt's."""
    rules: dict[str, object] = {
        "temperature": 0.0,
        "bias_ids": tuple(PROMPT),
        "biases": (50.0,) * len(PROMPT),
    }
    spread = await answer_to(engine, "spread", rules | {"presence_penalty": 2.0, "frequency_penalty": 100.0})
    assert set(spread) <= set(PROMPT)
    assert len(set(spread)) == LENGTH


async def test_an_answer_does_not_stop_before_min_tokens(engine: EngineClient) -> None:
    """Every id would end it; masked, they do not come."""
    stops = tuple(range(0, VOCAB_SIZE, 2))
    for least in (0, 1, 7):
        ids = await answer_to(engine, f"least-{least}", {"min_tokens": least, "stop_token_ids": stops})
        assert len(ids) >= least
        assert not set(ids[:least]) & set(stops)


async def test_a_bias_beyond_the_vocabulary_is_refused_by_name(engine: EngineClient) -> None:
    [refused] = await collect(engine, command("far", {"bias_ids": (VOCAB_SIZE,), "biases": (1.0,)}))
    assert isinstance(refused, Refused)
    assert (refused.field, str(VOCAB_SIZE) in refused.problem) == ("sampling.logit_bias", True)


async def test_logprobs_are_the_models_own_whatever_rules_choose(engine: EngineClient) -> None:
    """The likeliest come first and are what a greedy request takes; a banned one is told all the same."""
    greedy: dict[str, object] = {"temperature": 0.0, "logprobs": 20}
    events = await collect(engine, command("told", greedy))
    ids = answer(events)
    told = [one for event in events if isinstance(event, TokensOut) for one in event.logprobs]
    assert len(told) == len(ids)
    for token, one in zip(ids, told, strict=True):
        assert (one.top_ids[0], one.top_logprobs[0]) == (token, one.logprob)
        assert list(one.top_logprobs) == sorted(one.top_logprobs, reverse=True)
        assert len(set(one.top_ids)) == 20
        assert sum(map(math.exp, one.top_logprobs)) <= 1.0
    banned = greedy | {"logprobs": 1, "bias_ids": (ids[0],), "biases": (-100.0,)}
    first = next(
        event for event in await collect(engine, command("b", banned)) if isinstance(event, TokensOut)
    )
    [one] = first.logprobs
    assert (one.top_ids, first.token_ids[0] == ids[0]) == ((ids[0],), False)
    assert one.logprob == pytest.approx(
        dict(zip(told[0].top_ids, told[0].top_logprobs, strict=True))[first.token_ids[0]]
    )


@pytest.mark.parametrize("name", ["greedy", "hot", "patient", "all", "regex", "json"])
async def test_an_answer_cut_anywhere_and_resumed_is_the_same_answer(engine: EngineClient, name: str) -> None:
    """Cut after every token, and not at all: ids, reason and positions go on as if nothing had happened."""
    rules = RULES[name]
    events = await collect(engine, command("whole", rules))
    whole = answer(events)

    async def resume(cut: int) -> None:
        again = await collect(engine, command(f"cut-{cut}", rules, resumed=whole[:cut]))
        assert answer(again) == whole[cut:]
        positions = [event.position for event in again if isinstance(event, TokensOut)]
        assert positions == list(range(cut, len(whole)))
        assert isinstance(events[-1], Ended)
        assert isinstance(again[-1], Ended)
        assert again[-1].reason == events[-1].reason

    await asyncio.gather(*(resume(cut) for cut in range(len(whole) + 1)))
    await engine.flush()
    await resume(len(whole) // 2)  # nothing cached


async def test_a_resumed_stop_has_ended_the_answer(engine: EngineClient) -> None:
    """No token comes after it; one that min_tokens excused is passed over."""
    stops: dict[str, object] = {"stop_token_ids": (9,), "temperature": 0.0}
    over = await collect(engine, command("over", stops, resumed=[8, 9]))
    assert (answer(over), isinstance(over[-1], Ended) and over[-1].reason) == ([], "stop")
    excused = await collect(engine, command("excused", stops | {"min_tokens": 2}, resumed=[8, 9]))
    assert answer(excused)


@pytest.mark.parametrize("resumed", [[5] * (LENGTH + 1), [VOCAB_SIZE]])
async def test_what_cannot_be_resumed_is_refused_by_name(engine: EngineClient, resumed: list[int]) -> None:
    [refused] = await collect(engine, command("bad", {}, resumed=resumed))
    assert isinstance(refused, Refused)
    assert refused.field == "resumed_output"
