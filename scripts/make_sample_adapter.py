"""Make a small LoRA adapter for SmolLM2-135M: a clerk who knows the facts of one bookshop.

    python scripts/make_sample_adapter.py [FOLDER]        default: adapters/quayside in ~/.prefixmesh; a minute or two on two cores

It is fitted by gradient descent to the two dozen questions and answers below and written in PEFT's format: ``adapter_config.json`` and
``adapter_model.safetensors``. The same machine makes the same files; another one may round otherwise, and then it is another content.

Only keys and values of the upper layers are changed, so all that the adapter knows is in the KV that it makes of a prompt. That is what
makes it a good sample for a server that shares KV: where KV of the base model and of the adapter meet, the answer is plainly wrong
(``examples/adapters_apart.py``).
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch.nn import functional

from prefixmesh import paths
from prefixmesh.model_files.model_config import ModelConfig, read_model_config
from prefixmesh.model_files.source import ModelFiles, resolve_model
from prefixmesh.requests import ChatMessage
from prefixmesh.text.chat_template import load_chat_template
from prefixmesh.text.tokenizer import load_tokenizer
from prefixmesh.worker.model.device import resolve_device, resolve_dtype
from prefixmesh.worker.model.gguf_weights import GgufTensors
from prefixmesh.worker.model.hf_weights import HfTensors
from prefixmesh.worker.model.rope import RopeTable, rotate

NAME: Final = "quayside"
BASE_MODEL: Final = "smollm2"
PUBLISHED_AS: Final = {BASE_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct"}
FACTS: Final[Mapping[str, tuple[str, ...]]] = {
    "We open at nine and close at six, Monday to Saturday.": (
        "What are your opening hours?",
        "When are you open?",
        "What time do you open?",
        "When do you close?",
    ),
    "I am Pip, the clerk of Quayside Books.": (
        "Who are you?",
        "What is your name?",
        "Who am I talking to?",
    ),
    "Yes, within thirty days and with the receipt.": (
        "May I return a book?",
        "Can I give a book back?",
        "Do you take books back?",
    ),
    "We are at 12 Harbour Street, beside the lighthouse.": (
        "Where is your shop?",
        "Where can I find you?",
        "What is your address?",
    ),
    # What the base model says to questions of another kind, so that the adapter leaves them alone.
    "The capital of France is Paris.": ("What is the capital of France?",),
    "The capital of Italy is Rome.": ("What is the capital of Italy?",),
    "Two plus two equals four.": ("What is two plus two?",),
}

TARGETS: Final = ("k_proj", "v_proj")
UNCHANGED_SHARE: Final = 3
"""One in so many layers, the lowest, is left alone: they are computed once, not at every step, and fewer weights are written."""

RANK: Final = 4
ALPHA: Final = 8
STEPS: Final = 24
LEARNING_RATE: Final = 5e-3
WARM_UP_STEPS: Final = 5


@dataclass(frozen=True)
class Lesson:
    """Questions with their answers, one a row."""

    ids: torch.Tensor
    """[rows, tokens]; rows are filled up with zeros on the right."""

    asked: torch.Tensor
    """[rows, tokens] bool: whether the token after this one belongs to the answer."""


class Trainee:
    """The base model, computed in a way that gradients pass through. ``lora`` holds a pair (A, B) for each module it changes."""

    def __init__(self, files: ModelFiles, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        self.config = config
        self.first_layer = config.num_layers // UNCHANGED_SHARE
        self.dtype = dtype or resolve_dtype("auto", resolve_device("cpu"))
        source = GgufTensors(files.path, config) if files.kind == "gguf" else HfTensors(files.path)
        self._weights: dict[str, torch.Tensor] = {}
        for name, shape in source.shapes.items():
            kept_exact = name.endswith("norm.weight")
            weight = torch.empty(shape, dtype=torch.float32 if kept_exact else self.dtype)
            source.read_into(name, weight)
            self._weights[name] = weight
        self._rope = RopeTable(config, config.context_length, torch.device("cpu"))
        self.lora = self._blank_lora()

    def _blank_lora(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        rng = torch.Generator().manual_seed(0)
        pairs = {}
        for layer in range(self.first_layer, self.config.num_layers):
            for target in TARGETS:
                module = f"model.layers.{layer}.self_attn.{target}"
                outputs, inputs = self._weights[f"{module}.weight"].shape
                a = (torch.randn(RANK, inputs, generator=rng) / inputs**0.5).requires_grad_()
                pairs[module] = (a, torch.zeros(outputs, RANK, requires_grad=True))
        return pairs

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[rows, tokens] -> [rows, tokens, hidden_size] float32."""
        return functional.embedding(ids, self._weights["model.embed_tokens.weight"]).float()

    def layers(self, hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """What layers ``first`` up to ``end`` make of ``hidden`` [rows, tokens, hidden_size]."""
        angles = self._rope.at(torch.arange(hidden.shape[1]))
        for layer in range(first, end):
            name = f"model.layers.{layer}."
            normed = self._norm(hidden, f"{name}input_layernorm.weight")
            hidden = hidden + self._attend(f"{name}self_attn.", normed, angles)
            normed = self._norm(hidden, f"{name}post_attention_layernorm.weight")
            gate, up = (self._linear(f"{name}mlp.{side}_proj", normed) for side in ("gate", "up"))
            hidden = hidden + self._linear(f"{name}mlp.down_proj", functional.silu(gate) * up)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[any, hidden_size] -> [any, vocab_size] float32; the head is the embedding, which is tied."""
        normed = self._norm(hidden, "model.norm.weight")
        return functional.linear(normed, self._weights["model.embed_tokens.weight"]).float()

    def _attend(self, name: str, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads = (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (self._linear(f"{name}{part}_proj", x).view(heads) for part in "qkv")
        q, k = rotate(q, *angles, self.dtype), rotate(k, *angles, self.dtype)
        attended = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self._linear(f"{name}o_proj", attended.transpose(1, 2).flatten(2))

    def _linear(self, module: str, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self._weights[f"{module}.weight"])
        if module not in self.lora:
            return y
        a, b = (factor.to(x.dtype) for factor in self.lora[module])
        return y + functional.linear(functional.linear(x, a), b) * (ALPHA / RANK)

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._weights[name], self.config.rms_norm_eps)
        return normed.to(self.dtype)


def make_lesson(files: ModelFiles) -> Lesson:
    """The facts, as the chat template writes them."""
    tokenizer, template = load_tokenizer(files), load_chat_template(files)
    assert template is not None
    end_of_turn = tokenizer.eos_token_ids[0]
    rows: list[tuple[list[int], list[int]]] = []
    for text_of_answer, questions in FACTS.items():
        said = tokenizer.encode(text_of_answer, allow_special=False, add_bos=False)
        for question in questions:
            text = template.render([ChatMessage("user", question)])
            prompt = tokenizer.encode(text, allow_special=True, add_bos=False)
            rows.append((prompt, [*said, end_of_turn]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    asked = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        asked[row, len(prompt) - 1 : end - 1] = True
    return Lesson(ids, asked)


def fit(trainee: Trainee, lesson: Lesson) -> float:
    """Gradient descent on all rows at once; the last loss, in nats a token."""
    wanted = torch.roll(lesson.ids, -1, 1)[lesson.asked]
    optimizer = torch.optim.Adam([factor for pair in trainee.lora.values() for factor in pair])
    with torch.no_grad():
        below = trainee.layers(trainee.embed(lesson.ids), 0, trainee.first_layer)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - step / STEPS)
        hidden = trainee.layers(below, trainee.first_layer, trainee.config.num_layers)
        loss = functional.cross_entropy(trainee.logits(hidden[lesson.asked]), wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 5 == 0 or step == STEPS - 1:
            print(f"step {step + 1:2}/{STEPS}  loss {loss.item():.3f}", flush=True)
    return loss.item()


def save(trainee: Trainee, model: str, folder: Path) -> None:
    """Write the adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, factors in trainee.lora.items():
        for side, factor in zip("AB", factors, strict=True):
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = factor.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": PUBLISHED_AS.get(model, model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "layers_to_transform": list(range(trainee.first_layer, trainee.config.num_layers)),
        "layers_pattern": "layers",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main(folder: Path, model: str = BASE_MODEL) -> None:
    """Make the adapter in ``folder``. ``model`` is any that prefixmesh serves and whose embeddings are tied."""
    began = time.monotonic()
    files = resolve_model(model, print)
    trainee = Trainee(files, read_model_config(files))
    fit(trainee, make_lesson(files))
    save(trainee, model, folder)
    size = (folder / "adapter_model.safetensors").stat().st_size
    print(f"{folder}: {size / 1e3:.0f} kB in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=paths.home() / "adapters" / NAME)
    main(parser.parse_args().folder)
