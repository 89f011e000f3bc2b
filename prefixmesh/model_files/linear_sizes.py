"""The linear layers of a model by the names that PEFT gives them: what an adapter may change, and how large each is."""

from collections.abc import Mapping
from typing import Final

import msgspec

from prefixmesh.model_files.model_config import ModelConfig

HEAD: Final = "lm_head"

FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The products of one layer in the forward pass, and the modules that each computes, in the order of its rows."""

LAYER_MODULES: Final = tuple(module for modules in FUSED.values() for module in modules)


class LinearSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of every linear layer. Plain, so that the front learns it from the engine."""

    num_layers: int
    layer: dict[str, tuple[int, int]]
    """``(in_features, out_features)`` by module name, the same in every layer."""

    head: tuple[int, int]
    """Those of ``lm_head``."""

    @classmethod
    def of(cls, config: ModelConfig) -> "LinearSizes":
        """The sizes that a model's configuration gives."""
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return cls(
            num_layers=config.num_layers,
            layer={
                "q_proj": (hidden, queries),
                "k_proj": (hidden, keys),
                "v_proj": (hidden, keys),
                "o_proj": (queries, hidden),
                "gate_proj": (hidden, inner),
                "up_proj": (hidden, inner),
                "down_proj": (inner, hidden),
            },
            head=(hidden, config.vocab_size),
        )

    def of_module(self, module: str) -> tuple[int, int] | None:
        """``(in_features, out_features)`` of a module; None when the model has none of that name."""
        return self.head if module == HEAD else self.layer.get(module)


NO_LINEARS: Final = LinearSizes(num_layers=0, layer={}, head=(0, 0))
"""For engines without a model."""
