"""A tiny GGUF file with the weights of a tiny model, written the way converters write it."""

from pathlib import Path

import gguf
import numpy as np
import torch

from tests.support.tiny_model import VOCAB_SIZE, TinyShape

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, module = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[module]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """The reordering of llama.cpp's converter: half-split rotary order to interleaved pairs."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def write_tiny_gguf(
    path: Path,
    shape: TinyShape,
    tensors: dict[str, torch.Tensor],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write ``tensors`` (Hugging Face names) as GGUF; matrices in the format ``kind``, vectors in float32."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if ".q_proj." in name:
            array = interleave(array, shape.num_heads)
        if ".k_proj." in name:
            array = interleave(array, shape.num_kv_heads)
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
        else:
            writer.add_tensor(
                gguf_name(name), gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
