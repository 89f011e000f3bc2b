"""LoRA against PEFT itself, on tiny random models of transformers' own classes, in float32.

An adapter is made and written by PEFT; the same file is read by us. All logits of a prompt agree to 1e-3, and so do greedy tokens and
their logits, in a batch in which other sequences have another adapter, or none.
"""

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import LinearSizes
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.peft_adapter import inspect_adapter, read_digest
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.model.kv_pool import KVPool
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.lora import LoraSlots
from prefixmesh.worker.model.runner import ModelRunner
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support.exported_model import logits_of
from tests.support.family_models import SHAPE, make_family_model
from tests.support.peft_adapters import LINEAR, make_peft_model, save_peft_model
from tests.support.plans import Answer, GreedyDriver, PagedSequence, Piece, make_plan

pytestmark = pytest.mark.slow  # importing PEFT alone takes seconds

TOLERANCE: Final = 1e-3
PROMPT_TOKENS: Final = 40
NEW_TOKENS: Final = 8
PAGES: Final = 320
CPU: Final = torch.device("cpu")

CASES: Final[dict[str, dict[str, Any]]] = {
    "q": {"target_modules": ["q_proj"]},
    "k": {"target_modules": ["k_proj"]},
    "v": {"target_modules": ["v_proj"]},
    "o": {"target_modules": ["o_proj"]},
    "gate": {"target_modules": ["gate_proj"]},
    "up": {"target_modules": ["up_proj"]},
    "down": {"target_modules": ["down_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "qv": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 4},
    "all-linear": {"target_modules": "all-linear"},
    "pattern": {"target_modules": r".*\.(1|2)\..*(q_proj|down_proj)"},
    "some-layers": {"target_modules": ["v_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "rslora": {"target_modules": list(LINEAR), "use_rslora": True, "r": 8},
    "ranks": {
        "target_modules": list(LINEAR),
        "rank_pattern": {"q_proj": 2, "1.mlp.up_proj": 7, "^model.layers.0.self_attn.v_proj": 1},
        "alpha_pattern": {"k_proj": 3, r"layers\.2\.mlp\.down_proj": 32},
    },
    "everything": {"target_modules": [*LINEAR, "lm_head"], "r": 16},
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 20},
}
"""Qwen2 has biases, and here tied embeddings; Qwen3 norms its queries and keys."""

FAST: Final = [("llama", name) for name in CASES] + [("qwen2", "everything"), ("qwen3", "everything")]


@functools.cache
def base_model(family: str) -> Any:
    return make_family_model(family, **FAMILIES[family])


@functools.cache
def base_folder(family: str, parent: Path) -> Path:
    folder = parent / family
    base_model(family).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class Served:
    """One of our models with adapters in slots 0, 1, ..."""

    def __init__(self, folder: Path, root: Path, adapters: list[str], page_size: int = 1) -> None:
        files = resolve_model(str(folder))
        config = read_model_config(files)
        self.sizes = LinearSizes.of(config)
        slots = LoraSlots(AdapterRoot(str(root)), self.sizes, torch.float32, CPU, max_resident=len(adapters))
        for slot, path in enumerate(adapters):
            adapter = inspect_adapter(AdapterRoot(str(root)), path, self.sizes)
            weights = slots.read(path, read_digest(AdapterRoot(str(root)), adapter))
            slots.put(slot, weights)
            assert adapter.elements == sum(x.a.numel() + x.b.numel() for x in weights.values())
        pool = KVPool(config, PAGES // page_size, page_size, torch.float32, CPU)
        weights_ = load_weights(files, config, torch.float32, CPU)
        self.runner = ModelRunner(config, weights_, pool, TorchAttention(config, pool), slots)
        self.driver = GreedyDriver(self.runner)

    def prompt_logits(self, prompt: list[int], slot: int) -> torch.Tensor:
        """Logits of every token of the prompt."""
        size = self.runner.pool.page_size
        pages = list(range(-(-len(prompt) // size)))
        plan = make_plan(
            [Piece(PagedSequence(tokens=prompt, pages=pages, adapter_slot=slot), len(prompt))], size
        )
        rows = np.arange(len(prompt), dtype=np.int32)
        return self.runner.forward(dataclasses.replace(plan, logit_rows=rows))


def prompt_of(seed: int) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(4, SHAPE["vocab_size"], (PROMPT_TOKENS,), generator=rng).tolist()
    return tokens


def assert_agrees(answer: Answer, reference: Any, prompt: list[int]) -> None:
    theirs = logits_of(reference, prompt, answer.tokens)
    assert answer.tokens == theirs.argmax(dim=-1).tolist()
    torch.testing.assert_close(answer.logits, theirs, atol=TOLERANCE, rtol=0)


def check(models: Path, root: Path, family: str, name: str) -> None:
    folder, prompt = base_folder(family, models), prompt_of(0)
    reference = make_peft_model(copy.deepcopy(base_model(family)), **CASES[name])
    save_peft_model(reference, root / name)
    served = Served(folder, root, [name])
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits[0]
        bare = base_model(family)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(served.prompt_logits(prompt, 0), theirs, atol=TOLERANCE, rtol=0)
    assert (theirs - bare).abs().max() > 100 * TOLERANCE, "an adapter without effect proves nothing"
    [answer] = served.driver.answer([prompt], NEW_TOKENS, chunk=7, warm_share=0.5, adapter_slots=[0])
    assert_agrees(answer, reference, prompt)


@pytest.mark.parametrize(("family", "name"), FAST, ids=lambda x: x)
def test_an_adapter_of_peft_agrees(models: Path, tmp_path: Path, family: str, name: str) -> None:
    """All logits of a prompt, and greedy tokens computed in chunks behind a cached prefix."""
    check(models, tmp_path, family, name)


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_every_adapter_agrees_in_every_family(models: Path, tmp_path: Path, family: str, name: str) -> None:
    """The whole of the table."""
    check(models, tmp_path, family, name)


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("page_size", [1, 16])
def test_several_adapters_and_the_base_model_in_one_batch_agree(
    models: Path, tmp_path: Path, page_size: int, chunk: int
) -> None:
    """Each sequence is answered as if it were alone: two of each kind, interleaved, whole and in chunks of a few tokens."""
    folder = base_folder("llama", models)
    names = ["everything", "qv", "ranks"]
    references = [
        make_peft_model(copy.deepcopy(base_model("llama")), seed=seed, **CASES[name])
        for seed, name in enumerate(names)
    ]
    for name, reference in zip(names, references, strict=True):
        save_peft_model(reference, tmp_path / name)
    served = Served(folder, tmp_path, names, page_size)
    slots = [0, -1, 1, 0, 2, -1, 1, 2]
    prompts = [prompt_of(index)[: 12 + 2 * index] for index in range(len(slots))]
    answers = served.driver.answer(prompts, NEW_TOKENS, chunk=chunk, adapter_slots=slots)
    for prompt, slot, answer in zip(prompts, slots, answers, strict=True):
        assert_agrees(answer, references[slot] if slot >= 0 else base_model("llama"), prompt)


def test_rows_of_the_base_model_are_bit_for_bit_those_of_a_step_without_adapters(
    models: Path, tmp_path: Path
) -> None:
    """Only rows of adapters are touched; the same step computed with and without them."""
    save_peft_model(
        make_peft_model(copy.deepcopy(base_model("llama")), **CASES["everything"]), tmp_path / "x"
    )
    served = Served(base_folder("llama", models), tmp_path, ["x"])

    def logits(slots: list[int]) -> torch.Tensor:
        sequences = [
            PagedSequence(tokens=prompt_of(i), pages=list(range(i * 40, i * 40 + 40)), adapter_slot=slot)
            for i, slot in enumerate(slots)
        ]
        return served.runner.forward(make_plan([Piece(x, PROMPT_TOKENS) for x in sequences], 1))

    mixed, bare = logits([-1, 0, -1, 0]), logits([-1, -1, -1, -1])
    assert torch.equal(mixed[[0, 2]], bare[[0, 2]])
    assert not torch.isclose(mixed[[1, 3]], bare[[1, 3]], atol=100 * TOLERANCE).all()
