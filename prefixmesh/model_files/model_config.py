"""What a model's files say about its shape: read once, checked, and refused with the key's name where we cannot serve it.

Serving a model with a feature ignored (a scaled RoPE, a bias, experts) would give fluent nonsense, so whatever is not known
to be harmless is an error.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.gguf_metadata import GgufHeader, read_gguf_header
from prefixmesh.model_files.source import ModelFiles

ARCHITECTURE: Final = "llama"

MAX_DIMENSION: Final = 2**24
"""Larger sizes, layers or vocabularies are a broken file, not a model; refused before anything is allocated."""

DEFAULT_ROPE_THETA: Final = 10_000.0
"""What Llama files that do not name one were trained with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a Llama-architecture model. Sizes in elements, lengths in tokens."""

    architecture: str
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
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    attention_bias: bool = False
    """Whether q, k, v (and, in Hugging Face files, o) have biases."""

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


class _Keys:
    """Typed access to a mapping of a model file; every error names the file and the key."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.unsupported(key, "a whole number is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.unsupported(key, "a number is needed")
        return float(value)

    def refuse_unless(self, key: str, harmless: Sequence[Any]) -> None:
        """An absent or null key is harmless too."""
        value = self._values.get(self._prefix + key)
        if value is not None and value not in harmless:
            raise self.unsupported(key, "not supported")

    def unsupported(self, key: str, problem: str) -> ModelFileError:
        value = repr(self._values.get(self._prefix + key))[:80]
        return ModelFileError(f"{self._path}: {self._prefix}{key} is {value}: {problem}")

    def _get(self, key: str, default: float | None) -> Any:
        value = self._values.get(self._prefix + key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(f"{self._path} lacks the key {self._prefix}{key}")
        return default


def _from_hf(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    config = read_json_object(path)
    keys = _Keys(path, config)
    if config.get("model_type") != ARCHITECTURE:
        raise keys.unsupported("model_type", f"only {ARCHITECTURE!r} is supported")
    keys.refuse_unless("hidden_act", ("silu",))
    keys.refuse_unless("mlp_bias", (False,))
    keys.refuse_unless("quantization_config", ())
    keys.refuse_unless("partial_rotary_factor", (1.0,))
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    return ModelConfig(
        architecture=ARCHITECTURE,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=keys.integer("head_dim", hidden_size // max(1, num_heads)),
        vocab_size=keys.integer("vocab_size"),
        rope_theta=_hf_rope_theta(path, keys, config),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        context_length=keys.integer("max_position_embeddings"),
        tie_word_embeddings=config.get("tie_word_embeddings") is True,
        bos_token_id=_hf_token_ids(keys, config, "bos_token_id")[0],
        eos_token_ids=_hf_eos_token_ids(folder, keys, config),
        attention_bias=config.get("attention_bias") is True,
    )


def _hf_rope_theta(path: Path, keys: _Keys, config: Mapping[str, Any]) -> float:
    """transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one ``rope_parameters``."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise keys.unsupported(key, "an object is needed")
        inner = _Keys(path, rope)
        inner.refuse_unless("rope_type", ("default",))
        inner.refuse_unless("type", ("default",))
        inner.refuse_unless("factor", (1, 1.0))
        inner.refuse_unless("partial_rotary_factor", (1.0,))
        if "rope_theta" in rope:
            return inner.number("rope_theta")
    return keys.number("rope_theta", DEFAULT_ROPE_THETA)


def _hf_eos_token_ids(folder: Path, keys: _Keys, config: Mapping[str, Any]) -> tuple[int, ...]:
    """``generation_config.json`` wins: chat models name their end-of-turn token there."""
    path = folder / "generation_config.json"
    if path.is_file():
        generation = read_json_object(path)
        found = _hf_token_ids(_Keys(path, generation), generation, "eos_token_id")
        if found[0] is not None:
            return tuple(token for token in found if token is not None)
    return tuple(token for token in _hf_token_ids(keys, config, "eos_token_id") if token is not None)


def _hf_token_ids(keys: _Keys, config: Mapping[str, Any], key: str) -> tuple[int | None, ...]:
    """An id or a list of ids; ``(None,)`` when there is none."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if token_id is not None and (isinstance(token_id, bool) or not isinstance(token_id, int)):
            raise keys.unsupported(key, "a token id or a list of them is needed")
    return tuple(ids) or (None,)


def _from_gguf(path: Path, header: GgufHeader) -> ModelConfig:
    metadata, tensors = header.metadata, header.tensors
    if metadata.get("general.architecture") != ARCHITECTURE:
        raise _Keys(path, metadata).unsupported("general.architecture", f"only {ARCHITECTURE!r} is supported")
    keys = _Keys(path, metadata, f"{ARCHITECTURE}.")
    keys.refuse_unless("rope.scaling.type", ("none",))
    for key in ("rope.scaling.factor", "rope.scale_linear", "attention.scale", "logit_scale"):
        keys.refuse_unless(key, (0, 1) if key != "attention.scale" else (0,))
    for key in ("expert_count", "attention.sliding_window"):
        keys.refuse_unless(key, (0,))
    if "rope_freqs.weight" in tensors:
        raise ModelFileError(f"{path}: the tensor rope_freqs.weight scales RoPE: not supported")
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // max(1, num_heads))
    keys.refuse_unless("attention.value_length", (head_dim,))
    keys.refuse_unless("rope.dimension_count", (head_dim,))
    tokens = metadata.get("tokenizer.ggml.tokens")
    return ModelConfig(
        architecture=ARCHITECTURE,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        rope_theta=keys.number("rope.freq_base", DEFAULT_ROPE_THETA),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        context_length=keys.integer("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=gguf_token_id(path, metadata, "bos"),
        eos_token_ids=gguf_eos_token_ids(path, metadata),
        attention_bias="blk.0.attn_q.bias" in tensors,
    )


def gguf_token_id(path: Path, metadata: Mapping[str, Any], role: str) -> int | None:
    """The id that a GGUF file gives to a role such as ``bos``; None when it names none."""
    key = f"tokenizer.ggml.{role}_token_id"
    return _Keys(path, metadata).integer(key) if key in metadata else None


def gguf_eos_token_ids(path: Path, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, of turn, of message, in that order and each once."""
    found = (gguf_token_id(path, metadata, role) for role in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
