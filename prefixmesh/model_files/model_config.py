"""What a model's files say about its shape: read once, checked, and refused with the key's name where we cannot serve it.

Serving a model with a feature ignored (a scaled RoPE, a bias, experts) would give fluent nonsense, so whatever is not known
to be harmless is an error. What differs between families is described in ``families``.

A sliding window is served by holding the model to contexts no longer than it: up to there the window hides nothing, and a
token's KV is the same with or without it, so every answer is exact.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.config_keys import Keys
from prefixmesh.model_files.families import (
    FAMILIES,
    GGUF_FAMILIES,
    GGUF_HARMLESS,
    HF_HARMLESS,
    TELLING_KEYS,
    Bias,
    Family,
)
from prefixmesh.model_files.gguf_metadata import GgufHeader, read_f32_vector, read_gguf_header
from prefixmesh.model_files.rope_scaling import RopeScaling, read_gguf_rope, read_hf_rope
from prefixmesh.model_files.source import ModelFiles

MAX_DIMENSION: Final = 2**24
"""Larger sizes, layers or vocabularies are a broken file, not a model; refused before anything is allocated."""

ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor of a GGUF file that scales RoPE; part of the configuration, not of the weights."""


LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a model. Sizes in elements, lengths in tokens."""

    architecture: str
    """Its family's name, a key of ``FAMILIES``."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    context_length: int
    """The longest sequence, RoPE scaling and sliding window taken into account."""

    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""

    out_bias: bool = False
    """Whether the projection of attention's output has one."""

    qk_norm: bool = False
    """Whether each head's query and key are normed before they are turned."""

    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Set where some layer attends to the last so many tokens only; ``context_length`` is never longer."""

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "context_length",
        ):
            value = getattr(self, name)
            if not 1 <= value <= MAX_DIMENSION:
                raise ModelFileError(f"the model's {name} must be 1 to {MAX_DIMENSION}, got {value}")
        if self.sliding_window is not None and self.context_length > self.sliding_window:
            raise ModelFileError(
                f"contexts of {self.context_length} tokens do not fit the sliding_window of {self.sliding_window}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"head_dim must be even for RoPE, got {self.head_dim}")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelFileError(f"the model's {name} must be a positive number, got {value}")
        special = (
            self.eos_token_ids if self.bos_token_id is None else (self.bos_token_id, *self.eos_token_ids)
        )
        for token_id in special:
            if not 0 <= token_id < self.vocab_size:
                raise ModelFileError(
                    f"the special token {token_id} is outside the vocabulary of {self.vocab_size}"
                )

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token takes, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Read and check a model's configuration; no weights are touched. Raises ModelFileError naming the key at fault."""
    if files.kind == "gguf":
        return _from_gguf(files.path, read_gguf_header(files.path))
    return _from_hf(files.path)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; ModelFileError otherwise."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} must hold a JSON object")
    return found


def _from_hf(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    config = read_json_object(path)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise _unknown_architecture(Keys(path, config), "model_type", tuple(FAMILIES))
    config = {**family.defaults, **config}
    keys = Keys(path, config, architecture=family.name)
    classes = keys.get("architectures")
    if classes and not (isinstance(classes, list) and set(family.classes).intersection(map(str, classes))):
        raise keys.unsupported("architectures", f"only {family.classes[0]} is supported")
    keys.refuse_unless(HF_HARMLESS)
    keys.refuse_unless(family.harmless)
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    max_positions = keys.integer("max_position_embeddings")
    theta, scaling = read_hf_rope(keys, max_positions)
    num_layers, window = keys.integer("num_hidden_layers"), _hf_window(keys, family)
    return ModelConfig(
        architecture=family.name,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=keys.integer("head_dim", hidden_size // max(1, num_heads)),
        vocab_size=keys.integer("vocab_size"),
        rope_theta=theta,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        context_length=_context_length(max_positions, scaling, window),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        bos_token_id=_hf_token_ids(keys, "bos_token_id")[0],
        eos_token_ids=_hf_eos_token_ids(folder, keys),
        qkv_bias=_hf_bias(keys, family.qkv_bias),
        out_bias=_hf_bias(keys, family.out_bias),
        qk_norm=family.qk_norm,
        rope_scaling=scaling,
        sliding_window=window,
    )


def _unknown_architecture(keys: Keys, key: str, served: tuple[str, ...]) -> ModelFileError:
    """The error for a family that is not served; it tells why where the file does."""
    kind = keys.get(key)
    problem = f"not supported; supported are dense models of {', '.join(served)}"
    for telling, reason in TELLING_KEYS.items():
        for name in (telling, f"{kind}.{telling}"):
            if keys.get(name):
                return keys.unsupported(key, f"{problem} ({name}: {reason})")
    return keys.unsupported(key, problem)


def _hf_bias(keys: Keys, bias: Bias) -> bool:
    return keys.flag(bias) if bias == "attention_bias" else bias == "always"


def _hf_window(keys: Keys, family: Family) -> int | None:
    """The window that some layer attends through; None where all see everything."""
    if family.window == "none" or keys.get("sliding_window") is None:
        return None
    window = keys.integer("sliding_window")
    if window < 1:
        raise keys.unsupported("sliding_window", "a positive number of tokens is needed")
    if family.window == "sliding_window":
        return window
    types = keys.get("layer_types")
    if types is not None and not (isinstance(types, list) and set(map(str, types)) <= LAYER_TYPES):
        raise keys.unsupported("layer_types", f"only {' and '.join(sorted(LAYER_TYPES))} are supported")
    if not keys.flag("use_sliding_window"):
        if types and "sliding_attention" in types:
            raise keys.unsupported("layer_types", "use_sliding_window is not set")
        return None
    slides = (
        "sliding_attention" in types
        if types
        else keys.integer("max_window_layers") < keys.integer("num_hidden_layers")
    )
    return window if slides else None


def _context_length(max_positions: int, scaling: RopeScaling | None, window: int | None) -> int:
    longest = max_positions if scaling is None else scaling.context_length(max_positions)
    return longest if window is None else min(longest, window)


def _hf_eos_token_ids(folder: Path, keys: Keys) -> tuple[int, ...]:
    """``generation_config.json`` wins: chat models name their end-of-turn token there."""
    path = folder / "generation_config.json"
    if path.is_file():
        found = _hf_token_ids(Keys(path, read_json_object(path)), "eos_token_id")
        if found[0] is not None:
            return tuple(token for token in found if token is not None)
    return tuple(token for token in _hf_token_ids(keys, "eos_token_id") if token is not None)


def _hf_token_ids(keys: Keys, key: str) -> tuple[int | None, ...]:
    """An id or a list of ids; ``(None,)`` when there is none."""
    value = keys.get(key)
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if token_id is not None and (isinstance(token_id, bool) or not isinstance(token_id, int)):
            raise keys.unsupported(key, "a token id or a list of them is needed")
    return tuple(ids) or (None,)


def _from_gguf(path: Path, header: GgufHeader) -> ModelConfig:
    metadata, tensors = header.metadata, header.tensors
    family = GGUF_FAMILIES.get(str(metadata.get("general.architecture")))
    if family is None:
        raise _unknown_architecture(Keys(path, metadata), "general.architecture", tuple(GGUF_FAMILIES))
    keys = Keys(path, metadata, architecture=family.name, prefix=f"{family.gguf}.")
    keys.refuse_unless(GGUF_HARMLESS)
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // max(1, num_heads))
    keys.refuse_unless({"attention.value_length": (head_dim,), "rope.dimension_count": (head_dim,)})
    max_positions = keys.integer("context_length")
    theta, scaling = read_gguf_rope(keys, max_positions, _gguf_rope_factors(path, header, head_dim))
    window = keys.integer("attention.sliding_window", 0) or None
    tokens = metadata.get("tokenizer.ggml.tokens")
    return ModelConfig(
        architecture=family.name,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        rope_theta=theta,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        context_length=_context_length(max_positions, scaling, window),
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=gguf_token_id(path, metadata, "bos"),
        eos_token_ids=gguf_eos_token_ids(path, metadata),
        qkv_bias=family.qkv_bias == "always" or "blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=family.qk_norm,
        rope_scaling=scaling,
        sliding_window=window,
    )


def _gguf_rope_factors(path: Path, header: GgufHeader, head_dim: int) -> tuple[float, ...] | None:
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,):
        raise ModelFileError(
            f"{path}: tensor {ROPE_FACTORS} must have the shape {(head_dim // 2,)}, it has {tensor.shape}"
        )
    return read_f32_vector(path, tensor)


def gguf_token_id(path: Path, metadata: Mapping[str, Any], role: str) -> int | None:
    """The id that a GGUF file gives to a role such as ``bos``; None when it names none."""
    key = f"tokenizer.ggml.{role}_token_id"
    return Keys(path, metadata).integer(key) if key in metadata else None


def gguf_eos_token_ids(path: Path, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, of turn, of message, in that order and each once."""
    found = (gguf_token_id(path, metadata, role) for role in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
