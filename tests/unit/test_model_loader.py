"""Loading weights: both kinds of files, every storage format, and refusals that name the tensor."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import ModelFiles, resolve_model
from prefixmesh.worker.model import linear, tensor_source
from prefixmesh.worker.model.gguf_weights import GgufTensors
from prefixmesh.worker.model.linear import PlainLinear
from prefixmesh.worker.model.loader import load_weights
from prefixmesh.worker.model.weights import LlamaWeights
from tests.support.tiny_gguf import gguf_name, write_tiny_gguf
from tests.support.tiny_model import TinyShape, make_tiny_model, random_tensors, write_weights

CPU = torch.device("cpu")
SHAPE = TinyShape()
Kind = gguf.GGMLQuantizationType


def load(path: Path, dtype: torch.dtype = torch.float32) -> LlamaWeights:
    files = resolve_model(str(path))
    return load_weights(files, read_model_config(files), dtype, CPU)


def apply_all(weights: LlamaWeights) -> list[torch.Tensor]:
    """Every matrix's product with fixed inputs, whatever its layout, and every vector."""
    rng = torch.Generator().manual_seed(0)
    found = [weights.embedding, weights.final_norm]
    sizes = {"qkv": 64, "attention_out": 64, "gate_up": 64, "down": 128}
    for layer in weights.layers:
        found += [layer.attention_norm, layer.mlp_norm]
        found += [getattr(layer, name)(torch.randn(3, size, generator=rng)) for name, size in sizes.items()]
    return [*found, weights.lm_head(torch.randn(3, 64, generator=rng))]


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_and_hf_files_of_one_model_load_equal(tmp_path: Path, tied: bool) -> None:
    """Names are translated and the rotary order of q and k is turned back, biases included."""
    shape = TinyShape(attention_bias=True, tie_word_embeddings=tied)
    tensors = random_tensors(shape)
    path = write_tiny_gguf(tmp_path / "m.gguf", shape, tensors)
    ours, theirs = load(path), load(make_tiny_model(tmp_path / "hf", shape))
    for left, right in zip(apply_all(ours), apply_all(theirs), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "kind",
    [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0],
    ids=lambda k: k.name,
)
def test_formats_are_read_in_pieces_as_they_are_read_whole(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few rows give the same as dequantising the tensor at once, in every format we name."""
    monkeypatch.setattr(tensor_source, "PIECE_ELEMENTS", 64 * 20)
    tensors = random_tensors(SHAPE)
    path = write_tiny_gguf(tmp_path / "m.gguf", SHAPE, tensors, kind)
    source = GgufTensors(path, read_model_config(resolve_model(str(path))))
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ):
        original = tensors[name].numpy()
        whole = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
        out = torch.empty(source.shapes[name])
        source.read_into(name, out)
        # Rows are only moved by the rotary order, so each row's own rounding stays.
        assert np.array_equal(out.numpy(), whole), name


@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda k: k.name
)
def test_k_quants_are_read(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """K-quants, of which the package only reads: random blocks in a file give what the package makes of those blocks."""
    rows, columns = 6, 512
    shape = gguf.quants.quant_shape_to_byte_shape((rows, columns), kind)
    # Bytes below 0x3c keep every float16 scale among them finite.
    blocks = np.random.default_rng(0).integers(0, 0x3C, shape, dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "k.gguf"), "llama")
    writer.add_tensor("blk.0.ffn_down.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = read_model_config(resolve_model(str(make_tiny_model(tmp_path / "hf"))))
    out = torch.empty(rows, columns)
    GgufTensors(tmp_path / "k.gguf", config).read_into("model.layers.0.mlp.down_proj.weight", out)
    assert np.array_equal(out.numpy(), gguf.quants.dequantize(blocks, kind))
    assert out.any()


def test_sharded_folders_load_equal(tmp_path: Path) -> None:
    """Shards named by an index give the same as one file."""
    one, three = (
        load(make_tiny_model(tmp_path / "1")),
        load(make_tiny_model(tmp_path / "3", TinyShape(shards=3))),
    )
    for left, right in zip(apply_all(one), apply_all(three), strict=True):
        assert torch.equal(left, right)


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in random_tensors(SHAPE).items() if key != name}


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            without("model.layers.1.mlp.up_proj.weight"),
            r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (without("model.norm.weight"), r"lack the tensor model\.norm\.weight"),
        (
            random_tensors(SHAPE) | {"model.layers.2.mlp.up_proj.weight": torch.zeros(128, 64)},
            r"no use for, such as model\.layers\.2\.mlp\.up_proj\.weight",
        ),
        (
            random_tensors(SHAPE) | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)},
            r"k_proj\.weight must have the shape \(32, 64\), it has \(64, 64\)",
        ),
    ],
    ids=["missing", "missing norm", "unexpected", "wrong shape"],
)
def test_incomplete_models_are_refused(
    tmp_path: Path, kind: str, tensors: dict[str, torch.Tensor], problem: str
) -> None:
    """What is missing, unexpected or wrong-shaped is named; nothing is guessed."""
    path = tmp_path / "m.gguf"
    if kind == "gguf":
        write_tiny_gguf(path, SHAPE, tensors)
    else:
        path = make_tiny_model(tmp_path / "hf")
        write_weights(path, tensors)
    with pytest.raises(ModelFileError, match=problem):
        load(path)


def test_a_head_saved_beside_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    """Some tied models carry their head all the same; the embedding is used."""
    shape = TinyShape(tie_word_embeddings=True)
    folder = make_tiny_model(tmp_path, shape)
    write_weights(folder, random_tensors(shape) | {"lm_head.weight": torch.zeros(512, 64)})
    weights = load(folder)
    x = torch.eye(64)
    torch.testing.assert_close(weights.lm_head(x), weights.embedding.T)


def test_tied_embeddings_share_storage_where_the_layout_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked, head and embedding are one tensor, counted once."""
    monkeypatch.setattr(linear, "can_pack", lambda *_: False)
    monkeypatch.setattr("prefixmesh.worker.model.loader.can_pack", lambda *_: False)
    shape = TinyShape(tie_word_embeddings=True)
    weights = load(make_tiny_model(tmp_path, shape))
    assert isinstance(weights.lm_head, PlainLinear)
    assert weights.lm_head.weight.data_ptr() == weights.embedding.data_ptr()
    assert weights.num_bytes == sum(tensor.nbytes for tensor in random_tensors(shape).values())


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    """A folder with only pytorch_model.bin is refused (F72)."""
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="safetensors files only"):
        load(folder)


def test_an_index_must_stay_in_its_folder(tmp_path: Path) -> None:
    """A weight_map that points elsewhere is refused before anything is opened."""
    folder = make_tiny_model(tmp_path, TinyShape(shards=2))
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["model.norm.weight"] = "../secrets.safetensors"
    index.write_text(json.dumps(found))
    with pytest.raises(ModelFileError, match="outside its folder"):
        load(folder)


def test_an_index_must_tell_the_truth(tmp_path: Path) -> None:
    """A tensor that the index promises and no shard holds is named."""
    folder = make_tiny_model(tmp_path, TinyShape(shards=2))
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(found))
    with pytest.raises(ModelFileError, match=r"lacks the tensor model\.extra\.weight"):
        load(folder)


def test_cut_files_are_refused(tmp_path: Path) -> None:
    """Files that end early are an error naming the file, never a model of garbage."""
    path = write_tiny_gguf(tmp_path / "m.gguf", SHAPE, random_tensors(SHAPE))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    with pytest.raises(ModelFileError, match=r"ends within the data of tensor|lie beyond its end"):
        load(path)
    folder = make_tiny_model(tmp_path / "hf")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    """Weights of a type that is not float are not cast silently."""
    folder = make_tiny_model(tmp_path)
    write_weights(folder, random_tensors(SHAPE) | {"model.norm.weight": torch.ones(64, dtype=torch.int64)})
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight is stored as I64"):
        load(folder)


def test_unknown_gguf_formats_are_refused(tmp_path: Path) -> None:
    """A storage format the package cannot dequantise is named with its tensor."""
    path = write_tiny_gguf(tmp_path / "m.gguf", SHAPE, random_tensors(SHAPE))
    raw = bytearray(path.read_bytes())
    name = gguf_name("model.layers.0.mlp.down_proj.weight").encode()
    kind_at = raw.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", raw, kind_at) == (0,)
    for kind in (24, 250):  # I8; no format at all
        struct.pack_into("<I", raw, kind_at, kind)
        path.write_bytes(raw)
        with pytest.raises(ModelFileError, match=r"ffn_down\.weight"):
            load(path)


def test_bfloat16_weights_are_the_rounded_float32_ones(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    exact, rounded = load(path), load(path, torch.bfloat16)
    assert rounded.embedding.dtype == torch.bfloat16
    assert torch.equal(rounded.embedding, exact.embedding.bfloat16())
    assert rounded.final_norm.dtype == torch.float32
    assert rounded.num_bytes < 0.51 * exact.num_bytes


@pytest.mark.slow
def test_loading_is_lean(smollm2_files: ModelFiles) -> None:
    """The default model in at most 1.5 times the memory of its weights in bfloat16, at peak."""
    script = """
import resource, sys
import torch
from prefixmesh.model_files.model_config import read_model_config
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.model import loader
torch.set_num_threads(1)
files = resolve_model(sys.argv[1])
config = read_model_config(files)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weights = loader.load_weights(files, config, torch.bfloat16, torch.device("cpu"))
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(peak, 2 * sum(torch.Size(s).numel() for s in loader._expected_shapes(config).values()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(smollm2_files.path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    peak, final = (float(x) for x in done.stdout.split())
    assert peak <= 1.5 * final
