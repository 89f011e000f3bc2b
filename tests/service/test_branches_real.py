"""Branches and forks of a real (tiny) model: the same tokens as alone, and the shared part computed once."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from prefixmesh.client import Answer, AsyncClient, branch_seed
from prefixmesh.config import EngineConfig
from prefixmesh.proto.v1 import worker_control_pb2 as control_pb
from prefixmesh.worker.prefill_savings import prefill_savings
from tests.support.routed_worker import router_before
from tests.support.router_kit import running_router
from tests.support.servers import Worker, real_worker
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT: Final = "Once upon a time there was a prefix that every prompt had in common. " * 6
_NUMBERS: Final = itertools.count()
NOISE: Final[dict[str, Any]] = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
async def worker(model: Path) -> AsyncIterator[Worker]:
    settings = EngineConfig(model=str(model), device="cpu", dtype="float32", max_total_tokens=6000, threads=1)
    async with real_worker(settings) as running:
        yield running


@pytest.fixture
async def client(worker: Worker) -> AsyncIterator[AsyncClient]:
    """A tenant of its own, so that each test begins with nothing cached."""
    tenant = f"tenant-{next(_NUMBERS)}"
    async with AsyncClient(f"127.0.0.1:{worker.bound.port}", tenant=tenant) as opened:
        yield opened


async def missed_tokens(worker: Worker) -> int:
    """Prompt tokens that the engine has computed since its start."""
    told: control_pb.DescribeResponse = await worker.control.Describe(
        control_pb.DescribeRequest(), metadata=worker.control_metadata()
    )
    return int(told.cache.prompt_tokens - told.cache.hit_tokens.device)


async def test_a_branch_is_what_it_would_be_alone(client: AsyncClient) -> None:
    """Branch i is the answer to a call with its seed; branch 0 the one to a call without branches; and they differ."""
    together = await client.generate(CONTEXT, branches=4, logprobs=2, **NOISE)
    assert len({branch.token_ids for branch in together.branches}) == 4
    for number, branch in enumerate(together.branches):
        options = NOISE | {"seed": branch_seed(5, number)}
        alone = await client.generate(CONTEXT, logprobs=2, **options)
        assert alone.token_ids == branch.token_ids
        assert alone.text == branch.text
        assert [one.top[0][0] for one in alone.logprobs] == [one.top[0][0] for one in branch.logprobs]
    assert together.completion_tokens == 48


@pytest.mark.parametrize("branches", [2, 64])
async def test_the_prompt_of_all_branches_is_computed_once(
    client: AsyncClient, worker: Worker, branches: int
) -> None:
    """Each other branch computes the last token, which it needs the logits of, and nothing else of the prompt."""
    before = await missed_tokens(worker)
    answer = await client.generate(CONTEXT, branches=branches, max_tokens=2, temperature=1.0)
    assert answer.cached_tokens == 0
    assert await missed_tokens(worker) - before == answer.prompt_tokens + branches - 1


async def test_each_branch_follows_the_grammar_and_its_own_penalties(client: AsyncClient) -> None:
    """One compiled grammar would be in several states: each branch has its own."""
    answer = await client.generate(
        CONTEXT, branches=5, regex="(yes|no|maybe), [0-9]{3}", presence_penalty=1.0, **NOISE
    )
    texts = [branch.text for branch in answer.branches]
    assert len(set(texts)) > 1
    assert all(
        len(text.rpartition(", ")[2]) == 3 and branch.finish_reason == "stop"
        for text, branch in zip(texts, answer.branches, strict=True)
    )


async def test_usage_tells_what_a_hit_saved(client: AsyncClient, worker: Worker) -> None:
    """By the shape of the model that answers; a cold prompt saves nothing, a warm one all but its last token."""
    cold = await client.generate(CONTEXT, max_tokens=1)
    warm = await client.generate(CONTEXT, max_tokens=1)
    assert cold.prefill_saved is not None
    assert warm.prefill_saved is not None
    assert (cold.prefill_saved.linear, cold.prefill_saved.attention, cold.prefill_saved.total) == (0, 0, 0)
    prompt_tokens, hit = warm.prompt_tokens, warm.prompt_tokens - 1
    shape = worker.server._inference._info.prefill_shape  # type: ignore[union-attr]
    saved = prefill_savings(prompt_tokens, hit, shape)
    assert warm.cached_tokens == hit
    assert (warm.prefill_saved.linear, warm.prefill_saved.total) == pytest.approx((saved.linear, saved.total))


async def ids_of(client: AsyncClient, text: str) -> list[int]:
    return list(await client.tokenize(text))


@pytest.mark.parametrize("routed", [False, True])
async def test_forks_of_ids_and_chats_find_the_whole_context(
    client: AsyncClient, worker: Worker, model: Path, routed: bool
) -> None:
    """The first computes it, all others find every token of it; each answer is what it would be alone."""
    ids = await ids_of(client, CONTEXT)
    tails = [[7, 8, 9], [10, 11], [12]]
    async with (
        router_before(worker, str(model)) as router,
        AsyncClient(router.address if routed else client.address, tenant="forker") as forker,
    ):
        forks = await forker.fork(ids, tails, extra_key=f"ids-{routed}", **NOISE)
        chat = [{"role": "user", "content": CONTEXT}]
        says = await forker.fork(chat, ["why?", "and then?"], extra_key=f"chat-{routed}", **NOISE)
        assert [fork.cached_tokens for fork in forks] == [0, len(ids), len(ids)]
        assert says[0].cached_tokens == 0
        said = len(await forker.tokenize(chat)) - len(await ids_of(client, "<|im_start|>assistant\n"))
        assert says[1].cached_tokens >= said
        for tail, fork in zip(tails, forks, strict=True):
            assert fork.token_ids == (await forker.generate([*ids, *tail], **NOISE)).token_ids


async def test_a_fork_of_text_is_the_same_text_sent_whole(client: AsyncClient) -> None:
    """Also where the continuation changes how the context's last word is tokenised; what is shared is what the tokens share."""
    context, tails = CONTEXT + "the pref", ["ix was", "erence was", ""]
    ids = await ids_of(client, context)
    assert (await ids_of(client, context + tails[0]))[: len(ids)] != ids
    forks = await client.fork(context, tails, **NOISE)
    for tail, fork in zip(tails, forks, strict=True):
        whole = await client.generate(context + tail, **NOISE)
        assert (fork.token_ids, fork.prompt_tokens) == (whole.token_ids, whole.prompt_tokens)
    shared = len(await ids_of(client, CONTEXT)) - 1
    assert all(fork.cached_tokens >= shared for fork in forks[1:])


async def test_forks_stay_where_their_context_lies() -> None:
    """Through a router before three idle workers: all go to the one that the first has gone to, which alone computes the context."""
    context = [3 + i % 250 for i in range(1500)]
    async with running_router(3) as router, AsyncClient(router.address) as client:
        forks: list[Answer] = await client.fork(context, [[n] * 5 for n in range(8)])
    assert len({fork.worker_id for fork in forks}) == 1
    assert [fork.cached_tokens for fork in forks[1:]] == [len(context)] * 7
    predicted = [fork.started.routing and fork.started.routing.predicted_cached_tokens for fork in forks[1:]]
    assert predicted == [len(context) // 64 * 64] * 7
