"""How a model stretches its rotary embedding to contexts longer than it was first trained with: read and checked.

Only what is the same for every length of a sequence can live with a prefix cache, for a cached key must not change when its
sequence grows. ``dynamic`` scaling does change it, but only beyond ``max_position_embeddings``, which such a model is
therefore held to: up to there it is no scaling at all.

Sources: ``modeling_rope_utils.py`` of transformers; for GGUF, llama.cpp. The arithmetic is in ``worker/model/rope.py``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.config_keys import Keys

DEFAULT_ROPE_THETA: Final = 10_000.0
"""What files that do not name one were trained with, in every family here."""

DEFAULT_BETA_FAST: Final = 32.0
DEFAULT_BETA_SLOW: Final = 1.0
"""YaRN's bounds, in turns over the original context, as its paper sets them."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by ``factor``."""

    factor: float
    original_context: int | None = None
    """Tokens of the first training, where the file names them."""

    def __post_init__(self) -> None:
        _check_positive("linear", factor=self.factor)

    def context_length(self, max_positions: int) -> int:
        """``max_positions`` is the unscaled length, as transformers asks for, unless the file names that one itself."""
        original = max_positions if self.original_context is None else self.original_context
        return max(max_positions, int(original * self.factor))


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow turns are divided by ``factor``, quick ones are kept, those between are mixed (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _check_positive(
            "llama3",
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            original_max_position_embeddings=self.original_context,
        )
        if not self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelFileError(
                f"llama3 RoPE scaling: high_freq_factor ({self.high_freq_factor}) must be more than "
                f"low_freq_factor ({self.low_freq_factor})"
            )

    def context_length(self, max_positions: int) -> int:
        """``max_positions`` is the scaled length already."""
        return max_positions


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Slow turns are divided by ``factor``, quick ones kept, a ramp between, and cosines and sines scaled (YaRN)."""

    factor: float
    original_context: int
    attention_factor: float
    """What cosines and sines are multiplied by."""

    beta_fast: float = DEFAULT_BETA_FAST
    beta_slow: float = DEFAULT_BETA_SLOW
    truncate: bool = True
    """Whether the ramp's ends are rounded outwards to whole dimensions."""

    def __post_init__(self) -> None:
        _check_positive(
            "yarn",
            factor=self.factor,
            attention_factor=self.attention_factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            original_max_position_embeddings=self.original_context,
        )

    def context_length(self, max_positions: int) -> int:
        """Some files keep the original length in ``max_positions``, some write the scaled one."""
        return max(max_positions, int(self.original_context * self.factor))


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Each pair's frequency is divided by a factor of its own (GGUF's ``rope_freqs.weight``)."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for factor in self.factors:
            _check_positive("rope_freqs.weight", factor=factor)

    def context_length(self, max_positions: int) -> int:
        """``max_positions`` is the scaled length already."""
        return max_positions


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors

_HF_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""What each kind of scaling may say; another key is a feature we do not know."""

_HF_COMMON_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})

_GGUF_HARMLESS: Final[Mapping[str, Sequence[Any]]] = {
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def read_hf_rope(keys: Keys, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of a Hugging Face configuration; ModelFileError naming the key where it is not known.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one ``rope_parameters``.
    """
    key = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    described = keys.get(key) or {}
    if not isinstance(described, dict):
        raise keys.unsupported(key, "an object is needed")
    rope = keys.within(key, described)
    theta = rope.number("rope_theta", keys.number("rope_theta", DEFAULT_ROPE_THETA))
    rope.refuse_unless({"partial_rotary_factor": (1.0,)})
    type_key = "type" if rope.get("rope_type") is None else "rope_type"
    kind = rope.get(type_key) or "default"
    if not isinstance(kind, str) or kind not in _HF_KEYS:
        raise rope.unsupported(type_key, f"not supported; supported are {', '.join(sorted(_HF_KEYS))}")
    for name, value in described.items():
        if value is not None and name not in _HF_COMMON_KEYS | _HF_KEYS[kind]:
            raise rope.unsupported(name, f"not known for {kind!r} RoPE")
    if kind in ("default", "dynamic"):
        return theta, None
    # Of the two places the configuration's own key wins, as it does for transformers.
    original = keys.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if original is not None and (isinstance(original, bool) or not isinstance(original, int)):
        raise rope.unsupported("original_max_position_embeddings", "a whole number is needed")
    if kind == "linear":
        return theta, LinearScaling(rope.number("factor"), original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return theta, Llama3Scaling(rope.number("factor"), low, high, original or max_positions)
    return theta, _hf_yarn(rope, original or max_positions)


def _hf_yarn(rope: Keys, original: int) -> YarnScaling:
    factor = rope.number("factor")
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    magnitude = _magnitude(factor)
    if mscale and mscale_all_dim:
        magnitude = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=rope.number("attention_factor", magnitude),
        beta_fast=rope.number("beta_fast", 0.0) or DEFAULT_BETA_FAST,
        beta_slow=rope.number("beta_slow", 0.0) or DEFAULT_BETA_SLOW,
        truncate=rope.flag("truncate", default=True),
    )


def read_gguf_rope(
    keys: Keys, max_positions: int, factors: tuple[float, ...] | None
) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of a GGUF file, ``factors`` being its ``rope_freqs.weight`` if it has one."""
    theta = keys.number("rope.freq_base", DEFAULT_ROPE_THETA)
    keys.refuse_unless(_GGUF_HARMLESS)
    factor_key = "rope.scaling.factor" if keys.get("rope.scaling.factor") else "rope.scale_linear"
    factor = keys.number(factor_key, 1.0) or 1.0
    kind = keys.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.unsupported("rope.scaling.type", "not supported; supported are none, linear, yarn")
    if factors is not None:
        if kind not in (None, "none") or factor != 1.0:
            raise keys.unsupported("rope.scaling.type", "not supported together with rope_freqs.weight")
        return theta, FrequencyFactors(factors)
    if kind == "none" or factor == 1.0:
        return theta, None
    original_key = "rope.scaling.original_context_length"
    if kind != "yarn":  # llama.cpp takes a factor without a type for a linear one
        original = None if keys.get(original_key) is None else keys.integer(original_key)
        return theta, LinearScaling(factor, original)
    return theta, YarnScaling(
        factor=factor,
        original_context=keys.integer(original_key, max_positions),
        attention_factor=_magnitude(factor),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", DEFAULT_BETA_FAST),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", DEFAULT_BETA_SLOW),
    )


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's scale of cosines and sines (its paper's square root of 1/t)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _check_positive(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ModelFileError(f"{what} RoPE scaling: {name} must be a positive number, got {value}")
