"""What ``adapter_config.json`` says, checked: which LoRA this is, and how strongly each module of it counts.

PEFT knows many variants, and more with every version; serving one with a feature ignored would give fluent nonsense. So every key
that is not known to be harmless must be absent, null, false or empty.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.config_keys import Keys
from prefixmesh.model_files.linear_sizes import HEAD, LAYER_MODULES

MAX_RANK: Final = 256
"""Published adapters have ranks of 4 to 256; above that, weights of the model itself are the better form."""

HARMLESS_KEYS: Final = frozenset(
    {
        # who made it, from what, and how it was trained
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "peft_version",
        "revision",
        "task_type",
        # settings of ways to begin that leave the model's own weights as they are, and of features that have a switch of their own
        "eva_config",
        "loftq_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        # where it was put: the tensors say that
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "target_modules",
        # read here
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "use_rslora",
    }
)

HARMLESS_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Other ways to begin (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the model's own weights as well."""

NAME_PARTS: Final = frozenset({"base_model", "model", "layers", "self_attn", "mlp", HEAD, *LAYER_MODULES})
"""What modules' names are made of, beside numbers."""

_Number = TypeVar("_Number", int, float)

_PLAIN_PATTERN: Final = re.compile(r"\^?(?:[A-Za-z0-9_]+(?:\\?\.|$))+")
"""Of PEFT's patterns, which are regular expressions, those that are a module's name or the end of one. Others are not tried: an
expression can take for ever."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """How large and how strong an adapter's modules are."""

    rank: int
    alpha: float
    use_rslora: bool
    ranks: Mapping[str, int]
    """By the end of a module's name, or with ``^`` its whole name; the first that fits counts."""

    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank that a module (``model.layers.0.self_attn.q_proj``) must have."""
        return _first_fit(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of the two matrices is multiplied by."""
        alpha, rank = _first_fit(self.alphas, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_peft_config(raw: bytes, path: Path) -> PeftConfig:
    """Raises ModelFileError that names ``path`` and the key at fault. Milliseconds for some hundred KiB."""
    try:
        values = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path} is not a JSON object") from error
    keys = Keys(path, values)
    if keys.get("peft_type") != "LORA":
        raise keys.unsupported("peft_type", "only LORA is supported")
    keys.refuse_unless(HARMLESS_VALUES)
    for key in values.keys() - HARMLESS_KEYS:
        if values[key] not in (None, False, [], {}, ""):
            raise keys.unsupported(key, "not supported")
    if keys.get("target_modules") is None:
        raise keys.unsupported("target_modules", "a list of names or a pattern is needed")
    return PeftConfig(
        rank=_rank(keys, "r", keys.integer("r")),
        alpha=_alpha(keys, "lora_alpha", keys.number("lora_alpha")),
        use_rslora=keys.flag("use_rslora"),
        ranks={name: _rank(keys, "rank_pattern", value) for name, value in _patterns(keys, "rank_pattern")},
        alphas={
            name: _alpha(keys, "alpha_pattern", value) for name, value in _patterns(keys, "alpha_pattern")
        },
    )


def _rank(keys: Keys, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise keys.unsupported(key, f"ranks must be 1 to {MAX_RANK}")
    return value


def _alpha(keys: Keys, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2.0**64:
        raise keys.unsupported(key, "a number is needed")
    return float(value)


def _patterns(keys: Keys, key: str) -> Iterator[tuple[str, Any]]:
    patterns = keys.get(key)
    if not patterns:
        return
    if not isinstance(patterns, dict):
        raise keys.unsupported(key, "an object is needed")
    for pattern, value in patterns.items():
        if not _PLAIN_PATTERN.fullmatch(pattern):
            raise keys.unsupported(key, "only names of modules, or the ends of such, are supported")
        # To PEFT a plain point stands for any character: what is no name could mean one.
        if not all(part.isdecimal() or part in NAME_PARTS for part in re.split(r"\^|\\?\.", pattern) if part):
            raise keys.unsupported(key, f"{pattern!r} is no name of a module, nor the end of one")
        yield pattern.replace("\\", ""), value


def _first_fit(patterns: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    """O(parts of the module's name), however many patterns there are."""
    if not patterns:
        return default
    parts = module.split(".")
    ends = {".".join(parts[start:]) for start in range(len(parts))} | {f"^{module}"}
    fitting = ends & patterns.keys()
    return next((patterns[name] for name in patterns if name in fitting), default) if fitting else default
