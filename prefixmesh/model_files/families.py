"""The model families that are served, each as data: what its files are called and where it differs from plain Llama.

All are dense decoders with RMSNorm, RoPE, grouped-query attention and SwiGLU, so one forward pass serves them; what differs
(biases, norms of queries and keys, windows, defaults) is described here and nowhere else. To add a family of that shape, add
its description.

Sources: the configuration and attention classes of ``transformers``; for GGUF the ``convert_hf_to_gguf.py`` of llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Bias = Literal["never", "always", "attention_bias"]
"""Whether a projection has a bias: never, always, or where the configuration's key of that name is true."""

Window = Literal["none", "sliding_window", "use_sliding_window"]
"""What makes attention look back through a window only: nothing; the key ``sliding_window``; that key where
``use_sliding_window`` is true, in the layers from ``max_window_layers`` on or those ``layer_types`` names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family of models."""

    name: str
    """``model_type`` in a Hugging Face configuration, and what errors call it."""

    classes: tuple[str, ...]
    """What ``architectures`` may name: the causal language model, and older spellings of it."""

    gguf: str | None
    """``general.architecture`` in GGUF files; None where converters write the family as another one."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the family's configuration class takes for keys that a ``config.json`` leaves out, where that is not what Llama
    does."""

    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that the family's own class ignores but that would change another model: the values that change nothing."""

    qkv_bias: Bias = "never"
    out_bias: Bias = "never"

    qk_norm: bool = False
    """Whether each head's query and key go through an RMSNorm before they are turned."""

    window: Window = "none"

    gguf_interleaves: bool = False
    """Whether converters to GGUF reorder the rows of queries and keys to interleaved pairs."""


LLAMA: Final = Family(
    name="llama",
    classes=("LlamaForCausalLM", "LLaMAForCausalLM"),
    gguf="llama",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    gguf_interleaves=True,
)

MISTRAL: Final = Family(
    name="mistral",
    classes=("MistralForCausalLM",),
    gguf=None,  # converters write it as llama
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    harmless={"attention_bias": (False,)},
    window="sliding_window",
)

QWEN2: Final = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM",),
    gguf="qwen2",
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    qkv_bias="always",
    window="use_sliding_window",
)

QWEN3: Final = Family(
    name="qwen3",
    classes=("Qwen3ForCausalLM",),
    gguf="qwen3",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    window="use_sliding_window",
)

FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""By ``model_type``."""

GGUF_FAMILIES: Final[Mapping[str, Family]] = {
    family.gguf: family for family in FAMILIES.values() if family.gguf is not None
}
"""By ``general.architecture``."""

HF_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "quantization_config": (),
    "vision_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
}
"""Keys of a Hugging Face configuration that ask for something no family here computes, unless absent, null or so."""

GGUF_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
}
"""The same for the keys of a GGUF file, after the architecture's prefix."""

TELLING_KEYS: Final[Mapping[str, str]] = {
    "vision_config": "it takes images",
    "audio_config": "it takes sound",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "expert_count": "a mixture of experts",
}
"""Keys by which an unknown architecture tells why it is not served."""
