"""Our forward pass against ``transformers``, with the same weights in float32: logits to 1e-3, 32 greedy tokens identical.

The 20 prompts of 5 to 700 tokens are answered once in the plainest way and each answer is checked by one forward pass of
``transformers``. Then they are answered again in every other way (page size, batch, chunked prefill, cached prefix), which must
give the same tokens and the same logits as ``transformers`` gave. Each fast run takes a few prompts; together they cover every
pair of ways. The full product runs under ``make test-deep``.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixmesh.config import EngineConfig
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import ModelFiles, resolve_model
from prefixmesh.requests import ChatMessage
from prefixmesh.text.chat_template import load_chat_template
from prefixmesh.text.tokenizer import load_tokenizer
from prefixmesh.worker.model.gguf_weights import GgufTensors
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.open_model import open_model
from prefixmesh.worker.model.runner import ModelRunner
from prefixmesh.worker.model.torch_attention import TorchAttention
from prefixmesh.worker.model.weights import LlamaWeights
from tests.support.exported_model import export_gguf, load_in_transformers, logits_of
from tests.support.plans import Answer, GreedyDriver
from tests.support.tiny_model import TinyShape, make_tiny_model

TOLERANCE = 1e-3
NEW_TOKENS = 32
PROMPTS = 20
SHORTEST, LONGEST = 5, 700
POOL_TOKENS = 8192
CHUNK = 48
WARM_SHARE = 0.8
CPU = torch.device("cpu")

LICENSE = Path(__file__).parents[2] / "LICENSE"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to answer the same prompts."""

    page_size: int
    batch: int
    chunk: int
    warm: float

    def __str__(self) -> str:
        chunked, warm = "chunked" if self.chunk else "whole", "warm" if self.warm else "cold"
        return f"page{self.page_size}-batch{self.batch}-{chunked}-{warm}"


PLAINEST = Way(page_size=1, batch=8, chunk=0, warm=0)
ALL_WAYS = [Way(*way) for way in itertools.product((1, 16), (1, 8), (0, CHUNK), (0.0, WARM_SHARE))]
PAIRWISE = [
    # With PLAINEST, every pair of two settings occurs.
    (Way(page_size=1, batch=1, chunk=CHUNK, warm=WARM_SHARE), (4, 13)),
    (Way(page_size=16, batch=1, chunk=0, warm=0.0), (0, 9)),
    (Way(page_size=16, batch=8, chunk=CHUNK, warm=0.0), (1, 3, 5, 7, 8, 10, 11, 12)),
    (Way(page_size=16, batch=8, chunk=0, warm=WARM_SHARE), (0, 2, 4, 6, 8, 9, 11, 13)),
]


@dataclass(frozen=True, slots=True)
class Reference:
    """The prompts, and what ``transformers`` says to them."""

    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[torch.Tensor]
    """For each answer [NEW_TOKENS, vocab_size]."""

    run: Callable[[Way, list[int]], list[Answer]]
    """Answers the prompts of those indices in that way."""


def lengths() -> list[int]:
    """Geometric, so that short and long prompts both occur often."""
    ratio = (LONGEST / SHORTEST) ** (1 / (PROMPTS - 1))
    return [round(SHORTEST * ratio**i) for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def weights(smollm2_files: ModelFiles) -> LlamaWeights:
    return load_weights(smollm2_files, read_model_config(smollm2_files), torch.float32, CPU)


@pytest.fixture(scope="module")
def reference(
    smollm2_files: ModelFiles, weights: LlamaWeights, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    config = read_model_config(smollm2_files)

    def run(way: Way, indices: list[int]) -> list[Answer]:
        pool = KVPool(config, POOL_TOKENS // way.page_size, way.page_size, torch.float32, CPU)
        driver = GreedyDriver(ModelRunner(config, weights, pool, TorchAttention(config, pool)))
        answers: list[Answer] = []
        for start in range(0, len(indices), way.batch):
            batch = [prompts[i] for i in indices[start : start + way.batch]]
            answers += driver.answer(batch, NEW_TOKENS, chunk=way.chunk, warm_share=way.warm)
        return answers

    ids = load_tokenizer(smollm2_files).encode(LICENSE.read_text(), allow_special=False, add_bos=False)
    prompts = [ids[75 * i :][:length] for i, length in enumerate(lengths())]
    answers = run(PLAINEST, list(range(PROMPTS)))
    theirs = load_in_transformers(export_gguf(smollm2_files, config, tmp_path_factory.mktemp("exported")))
    logits = [logits_of(theirs, p, a.tokens) for p, a in zip(prompts, answers, strict=True)]
    for expected, answer in zip(logits, answers, strict=True):
        assert_agrees(expected, answer)
    return Reference(prompts, [answer.tokens for answer in answers], logits, run)


def assert_agrees(expected: torch.Tensor, answer: Answer) -> None:
    assert answer.tokens == expected.argmax(dim=-1).tolist()
    torch.testing.assert_close(answer.logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_all_prompts_answered_plainly_agree(reference: Reference) -> None:
    """20 prompts of 5 to 700 tokens: the same logits to 1e-3, the same 32 greedy tokens."""
    found = [len(prompt) for prompt in reference.prompts]
    assert (len(found), min(found), max(found)) == (PROMPTS, SHORTEST, LONGEST)
    assert len({tuple(answer) for answer in reference.answers}) > PROMPTS // 2, (
        "the answers tell prompts apart"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("way", "indices"), PAIRWISE, ids=lambda x: str(x) if isinstance(x, Way) else "")
def test_other_ways_agree(reference: Reference, way: Way, indices: tuple[int, ...]) -> None:
    """Page size, batch, chunked prefill and a cached prefix change nothing (F44: cold and warm answer the same)."""
    for index, answer in zip(indices, reference.run(way, list(indices)), strict=True):
        assert_agrees(reference.logits[index], answer)


@pytest.mark.deep
@pytest.mark.parametrize("way", ALL_WAYS, ids=str)
def test_every_way_agrees_for_every_prompt(reference: Reference, way: Way) -> None:
    """The full product of page size, batch, chunking and cached prefix, over all 20 prompts (F44)."""
    for expected, answer in zip(reference.logits, reference.run(way, list(range(PROMPTS))), strict=True):
        assert_agrees(expected, answer)


@pytest.mark.deep
def test_gguf_weights_equal_those_of_transformers_own_loader(smollm2_files: ModelFiles) -> None:
    """Names, formats and the turned-back rotary order: every tensor is bit-equal to what transformers makes of the file."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    described = load_gguf_checkpoint(str(smollm2_files.path))["config"]
    with torch.device("meta"):
        shell = LlamaForCausalLM(LlamaConfig(**described))
    theirs = load_gguf_checkpoint(
        str(smollm2_files.path), return_tensors=True, model_to_load=shell, torch_dtype=torch.float32
    )["tensors"]
    source = GgufTensors(smollm2_files.path, read_model_config(smollm2_files))
    assert set(source.shapes) == set(theirs) - {"lm_head.weight"}
    for name, shape in source.shapes.items():
        ours = torch.empty(shape)
        source.read_into(name, ours)
        assert torch.equal(ours, torch.as_tensor(theirs[name])), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_capital_of_france(smollm2_files: ModelFiles, dtype: str) -> None:
    """Through its chat template, greedy, the default model names Paris in the words we document, cold and warm.

    A sharp test of bfloat16: the first token is only 0.08 ahead of "L", and a bfloat16 residual stream got it wrong.
    """
    engine = EngineConfig(
        dtype="float32" if dtype == "float32" else "bfloat16", device="cpu", max_total_tokens=512
    )
    opened = open_model(smollm2_files, engine)
    tokenizer, template = load_tokenizer(smollm2_files), load_chat_template(smollm2_files)
    assert template is not None
    text = template.render([ChatMessage(role="user", content="What is the capital of France?")])
    prompt = tokenizer.encode(text, allow_special=True, add_bos=True)
    driver = GreedyDriver(opened.runner)
    for chunk, warm in ((0, 0.0), (16, 0.0), (0, 0.5), (0, 1.0)):
        answer = driver.answer([prompt], 12, chunk=chunk, warm_share=warm)[0].tokens
        end = next(i for i, token in enumerate(answer) if token in opened.config.eos_token_ids)
        assert tokenizer.decode(answer[:end]) == "The capital of France is Paris."


def slow(shape: TinyShape) -> Any:
    return pytest.param(shape, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "shape",
    [
        TinyShape(),
        slow(TinyShape(num_kv_heads=4, seed=1)),
        slow(TinyShape(num_kv_heads=1, num_heads=8, head_dim=8, seed=2)),
        slow(TinyShape(num_kv_heads=2, num_heads=6, hidden_size=96, seed=6)),
        slow(TinyShape(tie_word_embeddings=True, rope_theta=500_000.0, seed=3)),
        slow(TinyShape(attention_bias=True, seed=4)),
        slow(TinyShape(shards=3, head_dim=32, num_layers=3, intermediate_size=96, seed=5)),
    ],
    ids=["gqa", "mha", "mqa", "three-to-one", "tied", "bias", "sharded"],
)
def test_random_hf_folders_agree(tmp_path: Path, shape: TinyShape) -> None:
    """Variants of the architecture in Hugging Face folders: logits to 1e-3, greedy tokens equal, chunked and warm too."""
    make_tiny_model(tmp_path, shape)
    files = resolve_model(str(tmp_path))
    config = read_model_config(files)
    weights = load_weights(files, config, torch.float32, CPU)
    pool = KVPool(config, 128, 16, torch.float32, CPU)
    driver = GreedyDriver(ModelRunner(config, weights, pool, TorchAttention(config, pool)))
    rng = torch.Generator().manual_seed(shape.seed)
    prompts = [torch.randint(3, 512, (n,), generator=rng).tolist() for n in (1, 5, 17, 130, 65)]
    theirs = load_in_transformers(tmp_path)
    for chunk, warm in ((0, 0.0), (40, 0.5)):
        answers = driver.answer(prompts, 16, chunk=chunk, warm_share=warm)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_agrees(logits_of(theirs, prompt, answer.tokens), answer)
