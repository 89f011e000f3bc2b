"""Our weights as transformers sees them: a Hugging Face folder written from any model's files, and logits computed by it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from prefixmesh.model_files.model_config import ModelConfig
from prefixmesh.model_files.source import ModelFiles
from prefixmesh.worker.model.gguf_weights import GgufTensors


def export_gguf(files: ModelFiles, config: ModelConfig, folder: Path) -> Path:
    """Write a GGUF model's dequantised weights in float32 as a Hugging Face folder."""
    source = GgufTensors(files.path, config)
    tensors = {}
    for name, shape in source.shapes.items():
        tensors[name] = torch.empty(shape)
        source.read_into(name, tensors[name])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def load_in_transformers(folder: Path) -> Any:
    """The folder's model in float32, by the ``transformers`` library."""
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """What ``transformers`` thinks before each token of ``answer``: [len(answer), vocab_size], from one forward pass.

    Where each row's argmax is the answer's own token, the answer is what ``transformers`` would have generated greedily: its
    first token is equal, so its second is asked for the same context, and so on.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, logits_to_keep=len(answer)).logits[0]
    return logits
