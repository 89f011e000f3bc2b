"""The configurations of models as they are published, key for key where it matters: read, and held to the right context."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.rope_scaling import Llama3Scaling, YarnScaling
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.model.rope import RopeTable


def _described(
    model_type: str,
    cls: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": [cls],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads[1],
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab,
        **more,
    }


LLAMA_2_7B = _described(
    *("llama", "LlamaForCausalLM", 4096, 11008, 32, (32, 32), 32000),
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=4096,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    tie_word_embeddings=False,
)
LLAMA_31_8B = _described(
    *("llama", "LlamaForCausalLM", 4096, 14336, 32, (32, 8), 128256),
    attention_bias=False,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    max_position_embeddings=131072,
    mlp_bias=False,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling={
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    rope_theta=500000.0,
    tie_word_embeddings=False,
)
LLAMA_32_1B = LLAMA_31_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA_31_8B["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
}
MISTRAL_7B_V1 = _described(
    *("mistral", "MistralForCausalLM", 4096, 14336, 32, (32, 8), 32000),
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=32768,
    rms_norm_eps=1e-05,
    rope_theta=10000.0,
    sliding_window=4096,
    tie_word_embeddings=False,
)
MISTRAL_7B_V3 = MISTRAL_7B_V1 | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
MISTRAL_NEMO = MISTRAL_7B_V3 | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}
QWEN25_7B = _described(
    *("qwen2", "Qwen2ForCausalLM", 3584, 18944, 28, (28, 4), 152064),
    bos_token_id=151643,
    eos_token_id=151645,
    max_position_embeddings=32768,
    max_window_layers=28,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=131072,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
QWEN25_7B_LONG = QWEN25_7B | {
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
}
QWEN3_8B = _described(
    *("qwen3", "Qwen3ForCausalLM", 4096, 12288, 36, (32, 8), 151936),
    attention_bias=False,
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    max_position_embeddings=40960,
    max_window_layers=36,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}


def read(folder: Path, described: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(described))
    return read_model_config(resolve_model(str(folder)))


@pytest.mark.parametrize(
    ("described", "context", "head_dim"),
    [
        pytest.param(LLAMA_2_7B, 4096, 128, id="Llama-2-7b"),
        pytest.param(LLAMA_31_8B, 131072, 128, id="Llama-3.1-8B"),
        pytest.param(LLAMA_32_1B, 131072, 64, id="Llama-3.2-1B"),
        pytest.param(MISTRAL_7B_V1, 4096, 128, id="Mistral-7B-v0.1"),
        pytest.param(MISTRAL_7B_V3, 32768, 128, id="Mistral-7B-v0.3"),
        pytest.param(MISTRAL_NEMO, 131072, 128, id="Mistral-Nemo"),
        pytest.param(QWEN25_7B, 32768, 128, id="Qwen2.5-7B"),
        pytest.param(QWEN25_7B_LONG, 131072, 128, id="Qwen2.5-7B with yarn"),
        pytest.param(QWEN3_8B, 40960, 128, id="Qwen3-8B"),
        pytest.param(QWEN3_06B, 40960, 128, id="Qwen3-0.6B"),
    ],
)
def test_published_configurations_are_read(
    tmp_path: Path, described: dict[str, Any], context: int, head_dim: int
) -> None:
    config = read(tmp_path, described)
    assert config.architecture == described["model_type"]
    assert (config.context_length, config.head_dim) == (context, head_dim)
    eos = described["eos_token_id"]
    assert config.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
    assert config.tie_word_embeddings is described["tie_word_embeddings"]


def test_published_rope_scaling_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA_32_1B).rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert read(tmp_path, QWEN25_7B_LONG).rope_scaling == YarnScaling(4.0, 32768, 1.1386294361119891)


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        pytest.param(
            {"model_type": "mixtral", "num_local_experts": 8},
            "model_type is 'mixtral'.*a mixture of experts",
            id="Mixtral-8x7B",
        ),
        pytest.param(
            {"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}},
            "model_type is 'mistral3'.*it takes images",
            id="Mistral-Small-3.1",
        ),
        pytest.param({"model_type": "phi3"}, "model_type is 'phi3'", id="Phi-3"),
        pytest.param(
            LLAMA_31_8B | {"quantization_config": {"quant_method": "fp8"}},
            r"\(llama\): quantization_config",
            id="Llama-3.1-8B-FP8",
        ),
        pytest.param(
            MISTRAL_7B_V1 | {"architectures": ["MistralModel"]},
            r"\(mistral\): architectures",
            id="e5-mistral",
        ),
        pytest.param(
            QWEN25_7B | {"is_causal": False}, r"\(qwen2\): is_causal is False", id="an embedding model"
        ),
    ],
)
def test_published_models_of_other_kinds_are_refused(
    tmp_path: Path, described: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelFileError, match=problem):
        read(tmp_path, described)


@pytest.mark.parametrize(
    "described",
    [
        pytest.param(LLAMA_2_7B, id="Llama-2-7b"),
        pytest.param(LLAMA_32_1B, id="Llama-3.2-1B"),
        pytest.param(QWEN25_7B_LONG, id="Qwen2.5-7B with yarn"),
        pytest.param(QWEN3_06B, id="Qwen3-0.6B"),
    ],
)
def test_published_models_turn_by_transformers_angles_to_the_last_position(
    tmp_path: Path, described: dict[str, Any]
) -> None:
    """Bit for bit: at the last of 131,072 positions, the last bit of a frequency is a hundredth of a radian."""
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = read(tmp_path, described)
    last = torch.tensor([0, 1, 4095, config.context_length - 1])
    theirs = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))(torch.zeros(1), last[None])
    table = RopeTable(config, config.context_length, torch.device("cpu"))
    cos, sin = (x[:, 0] for x in table.at(last))
    half = config.head_dim // 2
    assert torch.equal(cos, theirs[0][0])
    assert torch.equal(torch.cat((-sin[:, :half], sin[:, half:]), dim=-1), theirs[1][0])
