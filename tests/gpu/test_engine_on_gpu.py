"""The engine on a GPU: the answers of a CPU in float32, the same tokens from the same logits, and a whole engine in bfloat16."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixmesh.config import EngineConfig
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.logit_rules import RuledRow, apply_rules
from prefixmesh.worker.logprobs import model_logprobs, read_logprobs
from prefixmesh.worker.messages import Ended, EngineSampling, TokensOut
from prefixmesh.worker.sampling import sample
from prefixmesh.worker.token_tally import TokenTally
from tests.support.scheduling import submit_command
from tests.support.tiny_model import TinyShape, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles kernels at their first use
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
VOCAB = 1000
PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 15, 33, 100, 300, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head size that FlashInfer has kernels for."""
    shape = TinyShape(hidden_size=256, num_heads=6, num_kv_heads=2, head_dim=64)
    return make_tiny_model(tmp_path_factory.mktemp("tiny-64"), shape)


def engine_on(folder: Path, device: str, dtype: str) -> EngineCore:
    return build_engine(
        EngineConfig(
            model=str(folder),
            device=device,
            dtype=dtype,  # type: ignore[arg-type]
            page_size=16,
            max_total_tokens=8192,
            chunked_prefill_size=128,
        )
    )


def answers(core: EngineCore, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy answers of all prompts at once; every one must be of ``count`` tokens."""
    events = []
    for index, prompt in enumerate(prompts):
        events += core.submit(submit_command(str(index), prompt, max_tokens=count), 0.0)
    now = 0.0
    while core.has_work:
        now += 1.0
        events += core.step(now)
    assert {event.reason for event in events if isinstance(event, Ended)} == {"length"}
    out: list[list[int]] = [[] for _ in prompts]
    for event in events:
        if isinstance(event, TokensOut):
            out[int(event.request_id)] += event.token_ids
    return out


def test_greedy_answers_in_float32_are_those_of_a_cpu(folder: Path) -> None:
    """Chunked prefills, mixed steps, prefixes from the cache on the second round."""
    expected = answers(engine_on(folder, "cpu", "float32"), PROMPTS, 16)
    core = engine_on(folder, DEVICE, "float32")
    assert answers(core, PROMPTS, 16) == expected
    assert answers(core, PROMPTS, 16) == expected
    core.check_invariants()


def test_a_whole_engine_answers_in_bfloat16(folder: Path) -> None:
    """With whatever backend and recording this device has: cold answers and warm ones, and nothing is left held."""
    core = engine_on(folder, DEVICE, "bfloat16")
    for _ in range(2):
        assert [len(answer) for answer in answers(core, PROMPTS, 16)] == [16] * len(PROMPTS)
    shared = [PROMPTS[4] + [token] for token in range(3, 9)]
    assert [len(answer) for answer in answers(core, shared, 16)] == [16] * len(shared)
    stats = core.stats()
    assert stats.free_pages + stats.evictable_pages == stats.total_pages
    core.check_invariants()


def params(**changed: float | int) -> EngineSampling:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}
    return EngineSampling(**(plain | changed), max_tokens=9, stop_token_ids=(3, 5))  # type: ignore[arg-type]


SAMPLINGS = [
    params(temperature=0.0),
    params(),
    params(top_k=7, seed=1),
    params(top_p=0.9, temperature=0.7, seed=2),
    params(min_p=0.05, seed=3),
    params(top_k=50, top_p=0.5, min_p=0.01, temperature=1.5, seed=4),
]


def test_the_same_logits_give_the_same_tokens() -> None:
    """Chosen where the logits are, and on a CPU; rows that are not numbers fail alone."""
    logits = torch.randn(len(SAMPLINGS), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    for index in range(50):
        places = [index] * len(SAMPLINGS)
        on_device, on_host = (sample(each.clone(), SAMPLINGS, places) for each in (logits.to(DEVICE), logits))
        assert on_device.token_ids == on_host.token_ids
    logits[2, 5] = torch.nan
    failed = sample(logits.to(DEVICE), SAMPLINGS, [0] * len(SAMPLINGS))
    assert list(failed.failures) == [2]


def test_rules_and_logprobs_are_the_same_on_the_device() -> None:
    """Penalties, biases, forbidden stops; log-probabilities of what was chosen and of the likeliest."""
    rules = [
        params(repetition_penalty=1.3, min_tokens=4),
        params(frequency_penalty=0.7, presence_penalty=-0.4),
        EngineSampling(
            temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=9, stop_token_ids=(), bias_ids=(1, 9),
            biases=(2.5, -100.0),
        ),
    ]  # fmt: skip
    logits = torch.randn(len(rules), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    tally = TokenTally(np.array([4, 8, 8, 11, 8, 4], dtype=np.int32), 3)
    tally.catch_up(6)
    both = [logits.clone(), logits.clone().to(DEVICE)]
    for each in both:
        rows = [RuledRow(row, rule, 3, tally) for row, rule in enumerate(rules)]
        assert apply_rules(each, rows) == {}
    torch.testing.assert_close(both[1].cpu(), both[0])
    wanted, chosen = {0: 3, 2: 0}, [8, 1, 9]
    told = [
        read_logprobs(model_logprobs(each, wanted), wanted, chosen) for each in (logits, logits.to(DEVICE))
    ]
    assert told[0].keys() == told[1].keys()
    for row in wanted:
        assert told[1][row].top_ids == told[0][row].top_ids
        assert told[1][row].logprob == pytest.approx(told[0][row].logprob, abs=1e-4)
