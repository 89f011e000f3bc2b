"""Every served family against transformers' own class of it, on tiny random models in float32.

For each feature that a family can have there is a model with it: all logits of a prompt agree to 1e-3, and so do 16 greedy
tokens and their logits, computed whole, in chunks, and behind a cached prefix. The models are written by transformers itself
and loaded from those files; where GGUF has the family, the same model is also written the way llama.cpp's converter does it.
"""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from prefixmesh.config import EngineConfig
from prefixmesh.model_files.model_config import ModelConfig, read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.model.gguf_weights import GgufTensors
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.open_model import open_model
from prefixmesh.worker.model.runner import ModelRunner
from prefixmesh.worker.model.torch_attention import TorchAttention
from prefixmesh.worker.model.weights import LlamaWeights
from tests.support.exported_model import logits_of
from tests.support.family_models import SHAPE, make_family_model, write_family_gguf
from tests.support.plans import GreedyDriver, PagedSequence, Piece, make_plan

TOLERANCE: Final = 1e-3
PROMPT_TOKENS: Final = 48
NEW_TOKENS: Final = 16
CHUNK: Final = 7
WARM_SHARE: Final = 0.7
PAGES: Final = 160
CPU: Final = torch.device("cpu")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = PROMPT_TOKENS + NEW_TOKENS

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-tuned": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3-tied": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"head_dim": 20, "rope_parameters": YARN}),
    "qwen3-window": (
        "qwen3",
        {
            "head_dim": 20,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
}
GGUF_CASES: Final = [name for name in CASES if name not in ("llama-dynamic", "llama-yarn-tuned")]
"""GGUF has no word for the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What transformers says."""

    model: Any
    prompt: list[int]
    prompt_logits: torch.Tensor
    """[PROMPT_TOKENS, vocab_size]"""


@functools.cache
def reference(name: str, seed: int = 0) -> Reference:
    family, changes = CASES[name]
    model = make_family_model(family, seed, **changes)
    rng = torch.Generator().manual_seed(seed)
    prompt = torch.randint(4, SHAPE["vocab_size"], (PROMPT_TOKENS,), generator=rng).tolist()
    with torch.inference_mode():
        return Reference(model, prompt, model(torch.tensor([prompt])).logits[0])


def load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, LlamaWeights]:
    files = resolve_model(str(path))
    config = read_model_config(files)
    return config, load_weights(files, config, dtype, CPU)


def runner(config: ModelConfig, weights: LlamaWeights, page_size: int = 1) -> ModelRunner:
    pool = KVPool(config, PAGES // page_size, page_size, torch.float32, CPU)
    return ModelRunner(config, weights, pool, TorchAttention(config, pool))


def prompt_logits(model: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """Logits of every token of the prompt."""
    size = model.pool.page_size
    sequence = PagedSequence(tokens=prompt, pages=list(range(-(-len(prompt) // size))))
    plan = make_plan([Piece(sequence, len(prompt))], size)
    return model.forward(dataclasses.replace(plan, logit_rows=np.arange(len(prompt), dtype=np.int32)))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def assert_agrees(
    path: Path, expected: Reference, *, page_size: int, ways: list[tuple[int, float]]
) -> ModelConfig:
    """The model at ``path`` answers as the reference does, in each way of (chunk, warm share)."""
    config, weights = load(path)
    model = runner(config, weights, page_size)
    assert_close(prompt_logits(model, expected.prompt), expected.prompt_logits)
    driver = GreedyDriver(model)
    answers = [
        driver.answer([expected.prompt], NEW_TOKENS, chunk=chunk, warm_share=warm)[0] for chunk, warm in ways
    ]
    theirs = logits_of(expected.model, expected.prompt, answers[0].tokens)
    for answer in answers:
        assert answer.tokens == theirs.argmax(dim=-1).tolist()
        assert_close(answer.logits, theirs)
    return config


@pytest.mark.parametrize("name", CASES)
def test_a_family_from_a_hugging_face_folder_agrees(tmp_path: Path, name: str) -> None:
    """All logits of a prompt, and 16 greedy tokens: whole, chunked, and behind a cached prefix."""
    expected = reference(name)
    expected.model.save_pretrained(tmp_path)
    config = assert_agrees(tmp_path, expected, page_size=1, ways=[(0, 0.0), (CHUNK, WARM_SHARE)])
    assert config.eos_token_ids == (2, 3)


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_family_from_gguf_agrees(tmp_path: Path, name: str) -> None:
    """The same models written as GGUF: names, the order of rotated rows, RoPE scaling and window."""
    expected = reference(name)
    path = write_family_gguf(tmp_path / "model.gguf", expected.model)
    config = assert_agrees(path, expected, page_size=16, ways=[(0, WARM_SHARE)])
    assert config.eos_token_ids == (2, 3)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_sharded_folders_agree(tmp_path: Path, family: str) -> None:
    """Several safetensors files with transformers' own index."""
    expected = reference(family)
    expected.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_agrees(tmp_path, expected, page_size=16, ways=[(CHUNK, 0.0)])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama-llama3", {"rope_scaling": None}),
        ("llama-linear", {"rope_scaling": None}),
        ("llama-yarn", {"rope_scaling": None}),
        ("qwen2-yarn", {"rope_scaling": None}),
        ("qwen3", {"rope_theta": 500.0}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_feature_left_out_would_be_noticed(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    """The tiny models feel what is proved on them: without it, logits differ by far more than the tolerance."""
    expected = reference(name)
    expected.model.save_pretrained(tmp_path)
    config, weights = load(tmp_path)
    found = prompt_logits(runner(dataclasses.replace(config, **change), weights), expected.prompt)
    assert (found - expected.prompt_logits).abs().max() > 100 * TOLERANCE


def test_norms_of_queries_and_keys_would_be_noticed(tmp_path: Path) -> None:
    """The same for Qwen3's norms, which are weights."""
    expected = reference("qwen3")
    expected.model.save_pretrained(tmp_path)
    config, weights = load(tmp_path)
    layers = tuple(dataclasses.replace(layer, qk_norm=None) for layer in weights.layers)
    found = prompt_logits(runner(config, dataclasses.replace(weights, layers=layers)), expected.prompt)
    assert (found - expected.prompt_logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "qwen3-window"])
def test_a_window_bounds_the_context_where_it_would_begin_to_hide_tokens(tmp_path: Path, name: str) -> None:
    """transformers agrees with attention to everything at the last token the window allows, and at the next no more."""
    expected = reference(name)
    expected.model.save_pretrained(tmp_path)
    config, weights = load(tmp_path)
    assert config.context_length == config.sliding_window == WINDOW
    rng = torch.Generator().manual_seed(1)
    prompt = torch.randint(4, SHAPE["vocab_size"], (WINDOW + 1,), generator=rng).tolist()
    with torch.inference_mode():
        theirs = expected.model(torch.tensor([prompt])).logits[0]
    unbound = dataclasses.replace(config, sliding_window=None, context_length=2 * WINDOW)
    found = prompt_logits(runner(unbound, weights), prompt)
    assert_close(found[:WINDOW], theirs[:WINDOW])
    assert (found[WINDOW] - theirs[WINDOW]).abs().max() > TOLERANCE


@pytest.mark.parametrize(("name", "told"), [("mistral-window", True), ("mistral", False), ("qwen3", False)])
def test_a_worker_says_when_a_window_ends_the_context(tmp_path: Path, name: str, told: bool) -> None:
    """The whole opening of a model, with the line that names the field which bounds it."""
    reference(name).model.save_pretrained(tmp_path)
    lines: list[str] = []
    engine = EngineConfig(dtype="float32", device="cpu", max_total_tokens=PAGES)
    opened = open_model(resolve_model(str(tmp_path)), engine, lines.append)
    assert opened.rates.decode_step_ms > 0
    assert any(f"up to {WINDOW} tokens" in x and "sliding_window" in x for x in lines) is told


@pytest.mark.parametrize("name", ["llama-llama3", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_near(tmp_path: Path, name: str) -> None:
    """In bfloat16 the logits are those of float32 but for rounding: their error is a few percent of their spread."""
    expected = reference(name)
    expected.model.save_pretrained(tmp_path)
    config, weights = load(tmp_path, torch.bfloat16)
    pool = KVPool(config, PAGES, 1, torch.bfloat16, CPU)
    model = ModelRunner(config, weights, pool, TorchAttention(config, pool))
    error = prompt_logits(model, expected.prompt) - expected.prompt_logits
    assert error.square().mean().sqrt() < 0.05 * expected.prompt_logits.std()


@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "qwen3"])
def test_gguf_weights_equal_those_of_transformers_own_loader(tmp_path: Path, name: str) -> None:
    """A second opinion on names and on the order of rotated rows: transformers' reader of GGUF gives the model's weights."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = reference(name).model
    path = write_family_gguf(tmp_path / "model.gguf", model)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    source = GgufTensors(path, read_model_config(resolve_model(str(path))))
    assert set(source.shapes) == set(theirs) == set(model.state_dict())
    for tensor_name, shape in source.shapes.items():
        ours = torch.empty(shape)
        source.read_into(tensor_name, ours)
        assert torch.equal(ours, torch.as_tensor(theirs[tensor_name])), tensor_name


@pytest.mark.deep
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", CASES)
def test_every_family_agrees_in_every_way(tmp_path: Path, name: str, page_size: int) -> None:
    """Three seeds, page sizes, chunks and cached shares, from folders, and from GGUF where it has the family."""
    ways = list(itertools.product((0, 1, CHUNK), (0.0, 0.4, 1.0)))
    for seed in (1, 2, 3):
        expected = reference(name, seed)
        folder = tmp_path / str(seed)
        expected.model.save_pretrained(folder)
        assert_agrees(folder, expected, page_size=page_size, ways=ways)
        if name in GGUF_CASES:
            path = write_family_gguf(tmp_path / f"{seed}.gguf", expected.model)
            assert_agrees(path, expected, page_size=page_size, ways=ways)
