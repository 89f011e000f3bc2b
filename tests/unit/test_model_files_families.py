"""What the configurations of each family say: defaults, RoPE scaling in both spellings, windows, and clear refusals."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.families import FAMILIES, GGUF_FAMILIES, LLAMA
from prefixmesh.model_files.model_config import ModelConfig, read_model_config
from prefixmesh.model_files.rope_scaling import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from prefixmesh.model_files.source import resolve_model

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}


def read(folder: Path, model_type: str = "llama", **changes: Any) -> ModelConfig:
    """The configuration of a folder whose config.json holds ``SHAPE`` and the changes; "absent" leaves a key out."""
    described = {"model_type": model_type, **SHAPE, **changes}
    described = {key: value for key, value in described.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(described))
    return read_model_config(resolve_model(str(folder)))


def test_every_family_is_known_by_its_own_name() -> None:
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3"}
    assert set(GGUF_FAMILIES) == {"llama", "qwen2", "qwen3"}
    assert GGUF_FAMILIES["llama"] is LLAMA


@pytest.mark.parametrize(
    ("family", "qkv", "out", "norms"),
    [
        ("llama", False, False, False),
        ("mistral", False, False, False),
        ("qwen2", True, False, False),
        ("qwen3", False, False, True),
    ],
)
def test_biases_and_norms_are_the_familys(
    tmp_path: Path, family: str, qkv: bool, out: bool, norms: bool
) -> None:
    config = read(tmp_path, family)
    assert (config.architecture, config.qkv_bias, config.out_bias, config.qk_norm) == (
        family,
        qkv,
        out,
        norms,
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_bias_means_all_four_projections(tmp_path: Path, family: str) -> None:
    config = read(tmp_path, family, attention_bias=True)
    assert config.qkv_bias
    assert config.out_bias


def test_a_bias_that_mistral_does_not_compute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"\(mistral\): attention_bias is True"):
        read(tmp_path, "mistral", attention_bias=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_takes(tmp_path: Path, family: str) -> None:
    """Heads of KV, head size, theta, epsilon, window: absent keys are read as transformers' own class reads them."""
    from transformers import AutoConfig

    shape = {"hidden_size": 128, "num_attention_heads": 32, "num_key_value_heads": "absent"}
    ours = read(tmp_path, family, max_position_embeddings=8192, **shape)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("rope", "scaling", "context"),
    [
        ({"rope_type": "default"}, None, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, None, 256),
        ({"rope_type": "linear", "factor": 4}, LinearScaling(4.0), 1024),
        (
            {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 64},
            LinearScaling(4.0, 64),
            256,
        ),
        ({"rope_type": "llama3", **LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 64), 256),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
            YarnScaling(4.0, 256, 1.1386294361119891),
            1024,
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "finetuned": True},
            YarnScaling(4.0, 64, 1.1386294361119891),
            256,
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "beta_fast": 8, "truncate": False},
            YarnScaling(2.0, 256, 1.5, 8.0, 1.0, truncate=False),
            512,
        ),
    ],
)
def test_rope_scaling_is_read_in_both_spellings(
    tmp_path: Path, rope: dict[str, Any], scaling: RopeScaling | None, context: int
) -> None:
    """transformers 5 writes rope_parameters with theta inside, transformers 4 rope_scaling with it outside, older ``type``."""
    old = {"type": rope["rope_type"], **{key: value for key, value in rope.items() if key != "rope_type"}}
    found = [
        read(tmp_path, rope_parameters={**rope, "rope_theta": 5e5}),
        read(tmp_path, rope_scaling=rope, rope_theta=5e5),
        read(tmp_path, rope_scaling=old, rope_theta=5e5),
    ]
    assert [(x.rope_scaling, x.rope_theta, x.context_length) for x in found] == [(scaling, 5e5, context)] * 3


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, r"rope_scaling\.rope_type is 'longrope'"),
        ({"type": "mrope", "mrope_section": [1, 2]}, r"rope_scaling\.type is 'mrope'"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, r"rope_scaling\.mrope_section"),
        ({"factor": 2.0}, r"rope_scaling\.factor is 2\.0"),
        ({"full_attention": {"rope_type": "default"}}, r"rope_scaling\.full_attention"),
        ({"rope_type": "yarn"}, r"lacks the key rope_scaling\.factor"),
        ({"rope_type": "yarn", "factor": "4"}, r"rope_scaling\.factor is '4'"),
        ({"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be a positive number"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        (
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8.5},
            "original_max_position_embeddings",
        ),
        ([1], "rope_scaling is"),
    ],
)
def test_rope_that_is_not_served_is_refused_by_its_key(tmp_path: Path, rope: Any, problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        read(tmp_path, rope_scaling=rope)


@pytest.mark.parametrize(
    ("family", "keys", "window"),
    [
        ("llama", {"sliding_window": 64}, None),  # transformers' Llama has no window
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": 1000}, 1000),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 0}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True}, None),  # from layer 28 on
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            64,
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 2,
            },
            None,
        ),
    ],
)
def test_a_window_holds_the_context_to_its_length(
    tmp_path: Path, family: str, keys: dict[str, Any], window: int | None
) -> None:
    config = read(tmp_path, family, **keys)
    assert config.sliding_window == window
    assert config.context_length == min(256, window or 256)


@pytest.mark.parametrize(
    ("family", "keys", "problem"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"sliding_window": "all"}, "sliding_window is 'all'"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1"),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ],
)
def test_windows_that_make_no_sense_are_refused_by_their_key(
    tmp_path: Path, family: str, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelFileError, match=rf"\({family}\): {problem}"):
        read(tmp_path, family, **keys)


@pytest.mark.parametrize(
    ("model_type", "keys", "problem"),
    [
        ("mixtral", {"num_local_experts": 8}, r"'mixtral': not supported.*num_local_experts: a mixture of"),
        ("qwen3_moe", {"num_experts": 128}, r"'qwen3_moe': not supported.*num_experts: a mixture of experts"),
        ("qwen2_vl", {"vision_config": {"depth": 1}}, r"'qwen2_vl': not supported.*it takes images"),
        ("gemma3_text", {}, r"'gemma3_text': not supported; supported are dense models of llama, mistral"),
        ("qwen2", {"architectures": ["Qwen2ForRewardModel"]}, r"\(qwen2\): architectures is"),
        ("qwen3", {"quantization_config": {"kv_cache_scheme": {}}}, r"\(qwen3\): quantization_config is"),
    ],
)
def test_other_models_are_refused_by_architecture_and_field_before_weights_are_opened(
    tmp_path: Path, model_type: str, keys: dict[str, Any], problem: str
) -> None:
    """There is no weight file in the folder at all."""
    with pytest.raises(ModelFileError, match=problem):
        read(tmp_path, model_type, **keys)


def read_gguf(path: Path, architecture: str = "llama", **changes: Any) -> ModelConfig:
    """The configuration of a GGUF file of some shape; a numpy array among the changes is a tensor."""
    writer = gguf.GGUFWriter(path / "m.gguf", architecture)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(300)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_context_length(256)
    for name, value in changes.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        if isinstance(value, np.ndarray):
            writer.add_tensor(name.replace("__", "."), value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_model_config(resolve_model(str(path / "m.gguf")))


@pytest.mark.parametrize(
    ("changes", "scaling", "context"),
    [
        ({}, None, 256),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None, 256),
        ({"rope__scaling__type": "linear"}, None, 256),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, LinearScaling(4.0), 1024),
        ({"rope__scaling__factor": 4.0}, LinearScaling(4.0), 1024),
        ({"rope__scale_linear": 2.0}, LinearScaling(2.0), 512),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
            },
            YarnScaling(4.0, 64, 1.1386294361119891),
            256,
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__yarn_beta_fast": 16.0,
            },
            YarnScaling(4.0, 256, 1.1386294361119891, 16.0),
            1024,
        ),
        ({"rope_freqs__weight": np.full(8, 2.0, np.float32)}, FrequencyFactors((2.0,) * 8), 256),
    ],
)
def test_gguf_rope_scaling_is_read(
    tmp_path: Path, changes: dict[str, Any], scaling: RopeScaling | None, context: int
) -> None:
    config = read_gguf(tmp_path, **changes)
    assert (config.rope_scaling, config.context_length) == (scaling, context)


@pytest.mark.parametrize(
    ("factors", "problem"),
    [
        (np.full(4, 2.0, np.float32), r"must have the shape \(8,\), it has \(4,\)"),
        (np.full(8, 2.0, np.float16), "must be a vector of float32"),
        (np.zeros(8, np.float32), "must be a positive number, got 0"),
    ],
)
def test_rope_factors_that_cannot_be_are_refused(tmp_path: Path, factors: np.ndarray, problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        read_gguf(tmp_path, rope_freqs__weight=factors)


def test_a_gguf_window_holds_the_context_to_its_length(tmp_path: Path) -> None:
    """Files of the first Mistral carry one; 0 means none."""
    assert read_gguf(tmp_path, attention__sliding_window=64).context_length == 64
    assert read_gguf(tmp_path, attention__sliding_window=0).sliding_window is None


def test_gguf_families_bring_their_biases_and_norms(tmp_path: Path) -> None:
    qwen2, qwen3 = read_gguf(tmp_path, "qwen2"), read_gguf(tmp_path, "qwen3")
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm) == (False, False, True)
