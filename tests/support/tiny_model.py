"""A tiny random Llama in a Hugging Face folder: real files, a real tokenizer and chat template, no download.

Made in a fraction of a second and the same for the same arguments, so that tests of the worker, the router and the text room
can serve a model that computes in well under a millisecond. Its answers are gibberish, but they depend on every token of the
prompt, so wrong KV gives a wrong answer.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN, EOS_TOKEN = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = """
You are a helpful assistant. The system policy of this shop says that a customer may return what was bought within
thirty days, and that the user gets an answer in one sentence. What is the capital of France? The capital is Paris.
Once upon a time there was a prefix that every prompt had in common, and it was computed only once, then it was read
again and again by the workers that already held it. Hello world! How are you today? 0123456789, 1 + 2 = 3.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyShape:
    """What may differ between tiny models."""

    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    context_length: int = 4096
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_theta: float = 10_000.0
    shards: int = 1
    """Files the weights are spread over; more than one brings an index."""

    seed: int = 0


def make_tiny_model(folder: Path, shape: TinyShape | None = None) -> Path:
    """Write the model's files into ``folder`` (made if missing) and return it."""
    shape = shape or TinyShape()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {
        token: index for index, token in enumerate(SPECIAL_TOKENS)
    }  # the trainer gives these the first ids
    _write_json(folder / "config.json", _config(shape, ids))
    _write_json(folder / "generation_config.json", {"eos_token_id": ids[EOS_TOKEN]})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS_TOKEN,
            "eos_token": EOS_TOKEN,
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": shape.context_length,
        },
    )
    write_weights(folder, random_tensors(shape), shape.shards)
    return folder


def random_tensors(shape: TinyShape) -> dict[str, torch.Tensor]:
    """Seeded float32 weights, large enough that the layers change the answer and argmax is far from a tie."""
    rng = torch.Generator().manual_seed(shape.seed)

    def normal(*size: int, std: float | None = None) -> torch.Tensor:
        return torch.randn(size, generator=rng) * (size[-1] ** -0.5 if std is None else std)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": normal(VOCAB_SIZE, hidden, std=0.5)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            # Queries and keys a little larger, so that attention prefers some tokens over others.
            gain = 2.0 if name in "qk" else 1.0
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, columns) * gain
            if shape.attention_bias:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows, std=0.2)
        tensors[prefix + "mlp.gate_proj.weight"] = normal(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = normal(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = normal(hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = 1.0 + normal(hidden, std=0.1)
    tensors["model.norm.weight"] = 1.0 + normal(hidden, std=0.1)
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = normal(VOCAB_SIZE, hidden, std=0.5)
    return tensors


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Save as one safetensors file, or as several with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS] * 2, trainer)
    return tokenizer


def _config(shape: TinyShape, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": shape.attention_bias,
        "bos_token_id": ids[BOS_TOKEN],
        "eos_token_id": ids[EOS_TOKEN],
        "torch_dtype": "float32",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
