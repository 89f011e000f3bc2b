"""Tiny random models of any family, made by transformers' own classes and written as a Hugging Face folder or as GGUF."""

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch

from tests.support.tiny_gguf import interleave

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
"""Four heads of 12 elements, unless a test says otherwise, in two groups. Two tokens end an answer."""


def make_family_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of transformers' own class for ``family``, in float32, with weights that make every part of it count."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=rng)
        if name.endswith(".bias"):
            noise *= 0.3
        elif tensor.ndim == 1:
            noise = 1.0 + 0.2 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            noise *= 0.5
        else:
            # Queries and keys a little larger, so that attention prefers some tokens over others.
            noise *= (2.0 if "q_proj" in name or "k_proj" in name else 1.0) * tensor.shape[-1] ** -0.5
        tensor.data.copy_(noise)
    return model


def write_family_gguf(path: Path, model: Any) -> Path:
    """Write the model as llama.cpp's converter does: names by the ``gguf`` package, float32."""
    config = model.config
    family = "llama" if config.model_type == "mistral" else config.model_type
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(config.eos_token_id[0])
    writer.add_eot_token_id(config.eos_token_id[1])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    _add_rope(writer, config.rope_parameters, head_dim)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        for module, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if family == "llama" and f".{module}." in name:
                array = interleave(array, count)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], head_dim: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
    elif kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What each frequency is divided by, as in ``LlamaModel.generate_extra_tensors`` of llama.cpp's converter."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)
