"""A model's configuration, source and revision, from Hugging Face folders and GGUF files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.revision import EDGE_BYTES, model_revision
from prefixmesh.model_files.source import ModelFiles, resolve_model

HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GGUF_CONFIG: dict[str, Any] = {
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.vocab_size": 300,
    "llama.rope.freq_base": 50000.0,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "llama.context_length": 256,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}

MakeHf = Callable[..., ModelFiles]
MakeGguf = Callable[..., ModelFiles]


@pytest.fixture
def make_hf(tmp_path: Path) -> MakeHf:
    def make(generation: dict[str, Any] | None = None, **changes: Any) -> ModelFiles:
        folder = tmp_path / "some-model"
        folder.mkdir(exist_ok=True)
        config = {key: value for key, value in {**HF_CONFIG, **changes}.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(b"weights")
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return resolve_model(str(folder))

    return make


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    def make(
        tensors: tuple[str, ...] = ("token_embd.weight",), architecture: str = "llama", **changes: Any
    ) -> ModelFiles:
        path = tmp_path / "some-model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in {**GGUF_CONFIG, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
            if value == "absent":
                continue
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        for name in tensors:
            writer.add_tensor(name, np.zeros((2, 2), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return resolve_model(str(path))

    return make


def test_a_hugging_face_configuration_is_read_whole(make_hf: MakeHf) -> None:
    config = read_model_config(make_hf())
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 128, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.context_length) == (300, 256)
    assert (config.rope_theta, config.rms_norm_eps) == (50000.0, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.tie_word_embeddings
    assert not config.qkv_bias


def test_kv_bytes_count_keys_and_values_of_every_layer(make_hf: MakeHf) -> None:
    assert read_model_config(make_hf()).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


def test_what_a_hugging_face_configuration_may_leave_out_has_the_models_own_default(make_hf: MakeHf) -> None:
    config = read_model_config(
        make_hf(
            num_key_value_heads="absent", tie_word_embeddings="absent", rope_theta="absent", bos_token_id=None
        )
    )
    assert config.num_kv_heads == 4
    assert not config.tie_word_embeddings
    assert config.rope_theta == 10_000.0
    assert config.bos_token_id is None


def test_rope_theta_is_found_where_newer_files_write_it(make_hf: MakeHf) -> None:
    rope = {"rope_type": "default", "rope_theta": 123.0}
    assert read_model_config(make_hf(rope_theta="absent", rope_parameters=rope)).rope_theta == 123.0


def test_the_generation_configuration_names_the_tokens_that_end_an_answer(make_hf: MakeHf) -> None:
    assert read_model_config(make_hf(generation={"eos_token_id": [7, 9]})).eos_token_ids == (7, 9)
    assert read_model_config(make_hf(generation={"temperature": 0.6})).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mamba"),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("is_causal", False),
        ("vision_config", {"depth": 2}),
        ("num_local_experts", 8),
        ("tie_word_embeddings", "yes"),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("partial_rotary_factor", 0.5),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("num_hidden_layers", 0),
        ("vocab_size", 2**40),
        ("vocab_size", "absent"),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1.0),
        ("eos_token_id", 300),
        ("eos_token_id", ["x"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_key(make_hf: MakeHf, key: str, value: Any) -> None:
    known_as = {
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "num_kv_heads",
    }
    with pytest.raises(ModelFileError, match="special token" if value == 300 else known_as.get(key, key)):
        read_model_config(make_hf(**{key: value}))


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_malformed_configuration_is_a_clear_error(make_hf: MakeHf, text: str) -> None:
    files = make_hf()
    (files.path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_model_config(files)


def test_a_gguf_configuration_is_read_whole(make_gguf: MakeGguf) -> None:
    config = read_model_config(make_gguf())
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 128, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.context_length) == (300, 256)
    assert (config.rope_theta, config.rms_norm_eps) == (50000.0, 0.5)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_gguf_tensors_tell_of_tied_embeddings_and_biases(make_gguf: MakeGguf) -> None:
    tied = read_model_config(make_gguf())
    assert tied.tie_word_embeddings
    assert not tied.qkv_bias
    untied = read_model_config(make_gguf(tensors=("output.weight", "blk.0.attn_q.bias")))
    assert not untied.tie_word_embeddings
    assert untied.qkv_bias


def test_gguf_end_of_turn_tokens_end_an_answer_too(make_gguf: MakeGguf) -> None:
    files = make_gguf(tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=2)
    assert read_model_config(files).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architecture": "gemma3"}, "general.architecture"),
        ({"architecture": "qwen2moe", "qwen2moe__expert_count": 8}, r"qwen2moe\.expert_count: a mixture"),
        ({"llama__rope__scaling__type": "longrope"}, r"\(llama\): llama\.rope\.scaling\.type"),
        ({"llama__rope__scaling__factor": -2.0}, "factor must be a positive number"),
        (
            {"llama__rope__scaling__factor": 2.0, "tensors": ("rope_freqs.weight",)},
            r"rope_freqs\.weight must have the shape \(8,\)",
        ),
        ({"llama__rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"llama__attention__causal": 0}, r"attention\.causal"),
        ({"llama__expert_count": 8}, "expert_count"),
        ({"llama__rope__dimension_count": 8}, r"rope\.dimension_count"),
        ({"llama__attention__sliding_window": "all"}, "sliding_window"),
        ({"llama__block_count": "absent"}, "block_count"),
    ],
)
def test_gguf_features_that_are_not_served_are_refused_by_their_key(
    make_gguf: MakeGguf, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ModelFileError, match=key):
        read_model_config(make_gguf(**changes))


def test_models_are_served_under_the_name_of_their_folder_or_file(
    make_hf: MakeHf, make_gguf: MakeGguf
) -> None:
    assert (make_hf().name, make_hf().kind) == ("some-model", "hf")
    assert (make_gguf().name, make_gguf().kind) == ("some-model", "gguf")


@pytest.mark.parametrize("what", ["", "no-such-model", "folder", "file.bin"])
def test_what_is_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError):
        resolve_model(what)


def test_a_revision_is_the_same_wherever_the_same_files_lie(make_gguf: MakeGguf, tmp_path: Path) -> None:
    files = make_gguf()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copy = elsewhere / files.path.name
    copy.write_bytes(files.path.read_bytes())
    assert model_revision(files) == model_revision(resolve_model(str(copy)))


def test_a_new_version_of_the_weights_is_a_new_revision(make_hf: MakeHf) -> None:
    """F33: any change of configuration, size, first or last MiB, or of a file's name changes the revision."""
    files = make_hf()
    weights = files.path / "model.safetensors"
    middle = bytes(3 * EDGE_BYTES)
    seen = {model_revision(files)}
    for content in (b"weightz", b"weights1", b"A" + middle, b"B" + middle, b"B" + middle[:-1] + b"C"):
        weights.write_bytes(content)
        seen.add(model_revision(files))
    make_hf(rope_theta=1.0)
    seen.add(model_revision(files))
    weights.rename(files.path / "model-00001-of-00001.safetensors")
    (files.path / "model.safetensors.index.json").write_text("{}")
    seen.add(model_revision(files))
    assert len(seen) == 8


def test_a_gguf_files_whole_header_counts_in_its_revision(make_gguf: MakeGguf) -> None:
    """F33, with the difference beyond the first MiB."""
    padding = {f"padding__{i}": "x" * EDGE_BYTES for i in range(3)}
    first = model_revision(make_gguf(**padding, zz="first"))
    assert first != model_revision(make_gguf(**padding, zz="other"))


def test_a_folder_without_weights_has_no_revision(make_hf: MakeHf) -> None:
    files = make_hf()
    (files.path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="safetensors"):
        model_revision(files)
