"""The strict reader of GGUF headers: agrees with the ``gguf`` package, and refuses every malformed file with a clear error."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.errors import ModelFileError
from prefixmesh.model_files.gguf_metadata import MAX_ARRAY_DEPTH, read_gguf_header, read_gguf_metadata

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("an.int", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Grüße, 世界")
    writer.add_array("strings", ["a", "", "世界"])
    writer.add_array("numbers", [-1, 2, 3])
    writer.add_array("flags", [True, False])
    writer.add_tensor("first", WEIGHT)
    writer.add_tensor("second", WEIGHT.T.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_come_back_as_they_were_written(good_file: Path) -> None:
    assert read_gguf_metadata(good_file) == {
        "general.architecture": "llama",
        "an.int": 7,
        "a.float": 0.5,
        "a.bool": True,
        "a.string": "Grüße, 世界",
        "strings": ["a", "", "世界"],
        "numbers": [-1, 2, 3],
        "flags": [True, False],
    }


def test_tensor_infos_give_shape_outermost_first_and_the_place_of_the_data(good_file: Path) -> None:
    header = read_gguf_header(good_file)
    for name, wanted in (("first", WEIGHT), ("second", WEIGHT.T)):
        tensor = header.tensors[name]
        assert tensor.shape == wanted.shape
        assert tensor.ggml_type == gguf.GGMLQuantizationType.F32
        assert tensor.offset >= header.data_offset
        raw = good_file.read_bytes()[tensor.offset : tensor.offset + wanted.nbytes]
        assert np.array_equal(np.frombuffer(raw, "<f4").reshape(tensor.shape), wanted)


@given(cut=st.floats(0, 1, exclude_max=True))
@settings(max_examples=150, deadline=None)
def test_a_header_cut_anywhere_is_refused(good_file: Path, tmp_path_factory: Any, cut: float) -> None:
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    end_of_infos = good_file.read_bytes().rindex(b"second") + 30
    path.write_bytes(good_file.read_bytes()[: int(end_of_infos * cut)])
    with pytest.raises(ModelFileError):
        read_gguf_header(path)


@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_gives_values_or_a_model_file_error_and_nothing_else(
    good_file: Path, tmp_path_factory: Any, at: float, byte: int
) -> None:
    path = tmp_path_factory.mktemp("flip") / "flip.gguf"
    raw = bytearray(good_file.read_bytes())
    raw[int(len(raw) * at)] = byte
    path.write_bytes(raw)
    with contextlib.suppress(ModelFileError):
        read_gguf_header(path)


def _file(tmp_path: Path, body: bytes, *, version: int = 3, tensors: int = 0, keys: int = 1) -> Path:
    path = tmp_path / "made.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body)
    return path


def _key(name: str, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_key("k", 8) + struct.pack("<Q", 2**63), "only 0 left"),
        (_key("k", 9) + struct.pack("<IQ", 8, 2**60), "only 0 left"),
        (_key("k", 9) + struct.pack("<IQ", 4, 2**60), "only 0 left"),
        (_key("k", 9) + struct.pack("<IQ", 9, 2**60), "only 0 left"),
        (_key("k", 9) + struct.pack("<IQQ", 8, 1, 2**63), "beyond its end"),
        (_key("k", 99), "unknown value type 99"),
        (_key("k", 8) + struct.pack("<Q", 1) + b"\xff", "not UTF-8"),
        (_key("k", 9) + struct.pack("<IQQ", 8, 1, 1) + b"\xff", "malformed string array"),
        (_key("k", 9) + struct.pack("<IQ", 9, 1) * (MAX_ARRAY_DEPTH + 1) + bytes(64), "nested deeper"),
    ],
)
def test_hostile_lengths_and_types_are_refused_before_anything_is_allocated(
    tmp_path: Path, body: bytes, message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_gguf_metadata(_file(tmp_path, body))


def test_counts_beyond_the_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"key/values, at most"):
        read_gguf_metadata(_file(tmp_path, b"", keys=2**40))
    with pytest.raises(ModelFileError, match=r"tensors, at most"):
        read_gguf_metadata(_file(tmp_path, b"", tensors=2**40))


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    body = (_key("k", 0) + b"\x01") * 2
    with pytest.raises(ModelFileError, match="comes twice"):
        read_gguf_metadata(_file(tmp_path, body, keys=2))


@pytest.mark.parametrize("version", [0, 1, 4])
def test_unknown_versions_are_refused_by_number(tmp_path: Path, version: int) -> None:
    with pytest.raises(ModelFileError, match=f"version {version}"):
        read_gguf_metadata(_file(tmp_path, b"", version=version))


def test_a_big_endian_file_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="big-endian"):
        read_gguf_metadata(_file(tmp_path, b"", version=3 << 24))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 not a model at all"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"other\.gguf"):
        read_gguf_metadata(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        read_gguf_metadata(tmp_path / "absent.gguf")
