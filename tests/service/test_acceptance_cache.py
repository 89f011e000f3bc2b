"""What a caller sees of the prefix cache, with a real engine behind real sockets."""

from pathlib import Path

import numpy as np
import pytest

from prefixmesh.config import EngineConfig, PrefixCacheKind
from prefixmesh.proto.v1 import inference_pb2 as pb
from tests.support.router_kit import chat_request, token_request
from tests.support.servers import Answer, Worker, real_worker
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model

GREEDY = pb.Sampling(temperature=0, max_tokens=8, ignore_eos=True)
TENANT = "x-prefixmesh-tenant"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def engine(model: Path, kind: PrefixCacheKind = "radix") -> EngineConfig:
    return EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        prefix_cache=kind,
        max_total_tokens=8192,
        threads=1,
    )


def some_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, count)]


async def test_1500_tokens_sharing_1490_by_kind_of_cache(model: Path) -> None:
    """radix finds 1,490 of them, hash its whole blocks of 16 (1,488), off nothing; and all three give the same answer."""
    shared = some_tokens(1, 1490)
    before, prompt = shared + some_tokens(2, 10), shared + some_tokens(3, 10)
    found: dict[PrefixCacheKind, int] = {}
    answers = []
    for kind in ("radix", "hash", "off"):
        async with real_worker(engine(model, kind)) as worker:
            await worker.generate(token_request(before, sampling=pb.Sampling(max_tokens=0)))
            answer = await worker.generate(token_request(prompt, sampling=GREEDY))
        found[kind] = answer.started.cached_tokens.device
        answers.append(answer.token_ids)
    assert found == {"radix": 1490, "hash": 1488, "off": 0}
    assert len(answers[0]) == 8
    assert answers[0] == answers[1] == answers[2]


MUST_NOT_MEET = [
    (("ab", "c"), ("a", "bc")),
    (("ab", ""), ("a", "b")),
    (("acme", ""), ("acme", "public")),
    (("acme", ""), ("acme", "tenant:acme")),
    (("acme", "adapter:x"), ("acme", "x")),
    (("acme", "x"), ("x", "acme")),
]


@pytest.mark.parametrize(("one", "other"), MUST_NOT_MEET)
async def test_pairs_that_must_not_meet_do_not(
    model: Path, one: tuple[str, str], other: tuple[str, str]
) -> None:
    """F46: (tenant, extra_key) that read alike when put together, or begin with a word of ours: 0 cached tokens and another
    namespace; while each finds all of its own (F48)."""
    ids = some_tokens(4, 100)

    async def ask(worker: Worker, who: tuple[str, str]) -> Answer:
        request = token_request(ids, extra_key=who[1], sampling=pb.Sampling(max_tokens=0))
        return await worker.generate(request, ((TENANT, who[0]),))

    async with real_worker(engine(model)) as worker:
        answers = [await ask(worker, who) for who in (one, other, one, other)]
    assert [answer.started.cached_tokens.device for answer in answers] == [0, 0, 99, 99]
    digests = [answer.started.namespace_digest for answer in answers]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


async def test_a_history_that_nobody_remembers_is_counted_and_still_shares_what_is_equal(model: Path) -> None:
    """The same history from the tenant that generated it retokenises nothing; from another one, the answer's whole text: told
    in Finished, with 0 cached tokens."""
    sampling = pb.Sampling(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    async with real_worker(engine(model)) as worker:
        question = ("user", "What is the capital of France?")
        acme, bolt = ((TENANT, "acme"),), ((TENANT, "bolt"),)
        first = await worker.generate(chat_request(question, sampling=sampling), acme)
        turns = (question, ("assistant", first.text), ("user", "And of Spain?"))
        own = await worker.generate(chat_request(*turns, sampling=GREEDY), acme)
        foreign = await worker.generate(chat_request(*turns, sampling=GREEDY), bolt)
    assert own.finished.usage.retokenized_tokens == 0
    assert own.started.cached_tokens.device >= first.started.prompt_tokens + len(first.token_ids) - 1
    assert foreign.finished.usage.retokenized_tokens > 0
    assert foreign.started.cached_tokens.device == 0
