"""What is an adapter and what is not: looked at by its configuration and header alone (F73), and named by what it does."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from prefixmesh.errors import InvalidRequestError, ModelFileError
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import HEAD
from prefixmesh.model_files.peft_adapter import (
    CONFIG_FILE,
    HEAD_LAYER,
    MAX_CONFIG_BYTES,
    MAX_WEIGHTS_BYTES,
    WEIGHTS_FILE,
    AdapterReader,
    Place,
    check_adapter_name,
    inspect_adapter,
    is_finite,
    read_digest,
)
from prefixmesh.model_files.peft_config import MAX_RANK
from prefixmesh.model_files.safetensors_header import MAX_HEADER_BYTES
from tests.support.peft_adapters import LINEAR, adapter_tensors, small_sizes, write_adapter, write_config

SIZES: Final = small_sizes(2)


def digest_of(root: Path, path: str = "x") -> str:
    adapter_root = AdapterRoot(str(root))
    return read_digest(adapter_root, inspect_adapter(adapter_root, path, SIZES))


def problem_of(root: Path, path: str = "x") -> str:
    """Why the folder is refused. Nothing but the configuration and the header may be read for that."""
    with pytest.raises(InvalidRequestError) as caught:
        inspect_adapter(AdapterRoot(str(root)), path, SIZES)
    assert caught.value.field == "path"
    return caught.value.problem


def test_an_adapter_is_described_by_its_header_alone(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", SIZES, rank=3, modules=["q_proj", "up_proj", HEAD], layers=[1])
    adapter = inspect_adapter(AdapterRoot(str(tmp_path)), "x", SIZES)
    assert [part.place for part in adapter.parts] == [
        Place(HEAD_LAYER, HEAD),
        Place(1, "q_proj"),
        Place(1, "up_proj"),
    ]
    assert adapter.rank == 3
    assert {part.scale for part in adapter.parts} == {2.0}
    # A of each product, and B of all outputs of a fused one.
    assert adapter.elements == 3 * ((8 + 20) + (8 + 12 + 6 + 6) + (8 + 10 + 10))


BAD_CONFIGS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"peft_type": "ADALORA"}, "only LORA is supported"),
    ({"peft_type": None}, "only LORA is supported"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"use_dora": True}, "use_dora"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"lora_bias": True}, "lora_bias"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ({"a_feature_of_tomorrow": True}, "a_feature_of_tomorrow"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"target_modules": None}, "target_modules"),
    ({"r": 0}, f"ranks must be 1 to {MAX_RANK}"),
    ({"r": MAX_RANK + 1}, f"ranks must be 1 to {MAX_RANK}"),
    ({"r": 4.0}, "whole number"),
    ({"r": None}, "lacks the key r"),
    ({"r": 3}, "has the rank 4 where adapter_config.json says 3"),
    ({"lora_alpha": "8"}, "a number is needed"),
    ({"lora_alpha": 1e300}, "a number is needed"),
    ({"use_rslora": 1}, "true or false"),
    ({"rank_pattern": {"q_proj": 5}}, "has the rank 4 where adapter_config.json says 5"),
    ({"rank_pattern": {"(a+)+$": 5}}, "only names of modules"),
    ({"alpha_pattern": {".*": 5}}, "only names of modules"),
    ({"alpha_pattern": {"q.proj": 5}}, "is no name of a module"),
    ({"alpha_pattern": [1]}, "an object is needed"),
]


@pytest.mark.parametrize(
    ("changes", "problem"), BAD_CONFIGS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_a_configuration_of_something_else_is_refused_by_the_key(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    write_adapter(tmp_path / "x", SIZES, config=changes)
    found = problem_of(tmp_path)
    assert problem in found
    assert CONFIG_FILE in found


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"nonsense", b"\xff\xfe", b'{"r": 1', b"[" * 5000, b"{}" + b" " * MAX_CONFIG_BYTES]
)
def test_a_configuration_that_is_no_small_json_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    write_adapter(tmp_path / "x", SIZES)
    (tmp_path / "x" / CONFIG_FILE).write_bytes(raw)
    assert CONFIG_FILE in problem_of(tmp_path)


def test_harmless_keys_are_not_asked_about(tmp_path: Path) -> None:
    """What PEFT writes about how it was trained, and switches that are off."""
    changes = {
        "lora_dropout": 0.1,
        "revision": "x",
        "inference_mode": True,
        "use_qalora": False,
        "qalora_group_size": 16,
    }
    write_adapter(tmp_path / "x", SIZES, config=changes)
    assert digest_of(tmp_path)


def change_tensors(root: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = adapter_tensors(SIZES)
    change(tensors)
    save_file(tensors, root / "x" / WEIGHTS_FILE)


Q: Final = "base_model.model.model.layers.0.self_attn.q_proj"

BAD_TENSORS: Final[dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]]] = {
    "B is missing": (lambda t: t.pop(f"{Q}.lora_B.weight"), "q_proj has no lora_B"),
    "A is missing": (lambda t: t.pop(f"{Q}.lora_A.weight"), "q_proj has no lora_A"),
    "A of another size": (
        lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 9)}),
        "must have the shape (4, 8)",
    ),
    "B of another rank": (
        lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(12, 5)}),
        "must have the shape (12, 4)",
    ),
    "A of one dimension": (
        lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4)}),
        "must have the shape (4, 8)",
    ),
    "A without dimensions": (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(())}), "has the rank 0"),
    "a rank of zero": (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(0, 8)}), "has the rank 0"),
    "a rank too high": (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(257, 8)}), "has the rank 257"),
    "whole numbers": (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 8).long()}), "is of type I64"),
    "doubles": (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 8).double()}), "is of type F64"),
    "a layer too many": (
        lambda t: t.update({Q.replace("0", "2") + ".lora_A.weight": torch.ones(4, 8)}),
        "belongs to no linear layer",
    ),
    "a module of another model": (
        lambda t: t.update({Q.replace("q_proj", "qkv_proj") + ".lora_A.weight": torch.ones(4, 8)}),
        "belongs to no linear layer",
    ),
    "a module in the wrong block": (
        lambda t: t.update({Q.replace("self_attn", "mlp") + ".lora_A.weight": torch.ones(4, 8)}),
        "belongs to no linear layer",
    ),
    "an embedding": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 20)}),
        "adapters of embeddings (embed_tokens) are not",
    ),
    "DoRA": (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(12)}), "DoRA is not"),
    "a copy of the head": (
        lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(20, 8)}),
        "save_embedding_layers=False",
    ),
    "a bias": (lambda t: t.update({f"{Q}.lora_B.bias": torch.ones(12)}), "only lora_A and lora_B"),
    "something else": (lambda t: t.update({"x" * 5000: torch.ones(1)}), "is not supported"),
    "nothing": (lambda t: t.clear(), "holds no tensor"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(tmp_path: Path, name: str) -> None:
    change, problem = BAD_TENSORS[name]
    write_adapter(tmp_path / "x", SIZES)
    change_tensors(tmp_path, change)
    found = problem_of(tmp_path)
    assert problem in found
    assert len(found) < 300


def with_header(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(start: Any, end: Any, shape: Any = (4, 8), dtype: Any = "F16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
BAD_FILES: Final[dict[str, tuple[bytes, str]]] = {
    "empty": (b"", "shorter than the header's length"),
    "a few bytes": (b"\x01\x00", "shorter than the header's length"),
    "a pickle": (b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix", "not a safetensors file"),
    "a zip": (b"PK\x03\x04" + bytes(60), "not a safetensors file"),
    "a header beyond the end": (struct.pack("<Q", 100) + b"{}", "not a safetensors file"),
    "a header beyond all bounds": (struct.pack("<Q", 2**63), "not a safetensors file"),
    "a header too long": (with_header(b" " * (MAX_HEADER_BYTES + 1)), f"of at most {MAX_HEADER_BYTES}"),
    "no JSON": (with_header(b"hello"), "not a JSON object"),
    "a list": (with_header(b"[]"), "not a JSON object"),
    "deep": (with_header(b'{"a":{"b":' + b"[" * 100_000), "not a JSON object"),
    "no text": (with_header(b"\xff\xff"), "not a JSON object"),
    "flat": (with_header({"a": 1}), "not a JSON object of objects"),
    "no shape": (with_header({A: {"dtype": "F16", "data_offsets": [0, 1]}}), "gives no shape or place"),
    "no place": (with_header({A: {"dtype": "F16", "shape": [1]}}), "gives no shape or place"),
    "a negative place": (with_header({A: entry(-64, 0)}, bytes(64)), "gives no shape or place"),
    "a fractional place": (with_header({A: entry(0.0, 64.0)}, bytes(64)), "gives no shape or place"),
    "a huge shape": (with_header({A: entry(0, 64, [2**60, 2**60])}, bytes(64)), "gives no shape or place"),
    "a backward place": (with_header({A: entry(64, 0)}, bytes(64)), "takes -64 bytes"),
    "too short": (with_header({A: entry(0, 63)}, bytes(64)), "takes 63 bytes where its shape needs 64"),
    "beyond the end": (with_header({A: entry(0, 64)}, bytes(63)), "the tensors end at byte"),
    "bytes left over": (with_header({A: entry(0, 64)}, bytes(65)), "the tensors end at byte"),
    "an overlap": (with_header({A: entry(0, 64), B: entry(32, 96)}, bytes(96)), "overlaps another"),
    "a gap": (with_header({A: entry(0, 64), B: entry(80, 144)}, bytes(144)), "leaves a gap"),
    "a type of its own": (with_header({A: entry(0, 64, dtype="F8")}, bytes(64)), "is of type F8"),
    "no type": (with_header({A: entry(0, 64, dtype=None)}, bytes(64)), "is of type None"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_sound_safetensors_is_refused(tmp_path: Path, name: str) -> None:
    raw, problem = BAD_FILES[name]
    write_adapter(tmp_path / "x", SIZES)
    (tmp_path / "x" / WEIGHTS_FILE).write_bytes(raw)
    assert problem in problem_of(tmp_path)


@pytest.mark.parametrize("bytes_", [2 * 2**30, MAX_WEIGHTS_BYTES + 1])
def test_a_large_file_of_junk_is_refused_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_: int
) -> None:
    """F73: what is refused costs the same whatever its size: a few reads, of no more than a header may have."""
    write_adapter(tmp_path / "x", SIZES)
    with (tmp_path / "x" / WEIGHTS_FILE).open("wb") as file:
        file.write(os.urandom(4096))
        file.truncate(bytes_)  # a hole: it takes no room
    read: list[int] = []
    fdopen = os.fdopen

    class Counting:
        """A file that notes how much is asked of it."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> "Counting":
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def fileno(self) -> int:
            number: int = self._file.fileno()
            return number

        def read(self, size: int) -> bytes:
            read.append(size)
            raw: bytes = self._file.read(size)
            return raw

    monkeypatch.setattr(os, "fdopen", lambda descriptor, mode: Counting(fdopen(descriptor, mode)))
    assert "safetensors file" in problem_of(tmp_path) or "at most" in problem_of(tmp_path)
    assert sum(read) <= 2 * (MAX_CONFIG_BYTES + 1 + MAX_HEADER_BYTES + 8)


def test_nothing_outside_the_root_is_opened(tmp_path: Path) -> None:
    """Neither by a path upwards, nor by an absolute one, nor through links to folders or files."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_adapter(outside, SIZES)
    write_adapter(root / "x", SIZES)
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "x")
    assert "below the adapter root" in problem_of(root, "../outside")
    assert "below the adapter root" in problem_of(root, str(outside))
    assert "below the adapter root" in problem_of(root, "x/../../outside")
    assert "below the adapter root" in problem_of(root, "link")
    assert digest_of(root, "inner") == digest_of(root, "x")
    (root / "x" / WEIGHTS_FILE).unlink()
    (root / "x" / WEIGHTS_FILE).symlink_to(outside / WEIGHTS_FILE)
    assert "is a link to outside the adapter root" in problem_of(root, "x")


def test_a_path_that_is_led_elsewhere_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was a folder when it was looked at is a link when it is opened."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_adapter(outside, SIZES)
    write_adapter(root / "x", SIZES)
    resolve = AdapterRoot._resolve

    def swapped(self: AdapterRoot, folder: str, name: str) -> Path:
        path = resolve(self, folder, name)
        if not path.parent.is_symlink():
            path.parent.rename(root / "y")
            path.parent.symlink_to(outside)
        return path

    monkeypatch.setattr(AdapterRoot, "_resolve", swapped)
    assert "below the adapter root" in problem_of(root, "x")


def test_a_refusal_does_not_tell_what_exists_outside_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "there").mkdir()
    told = {problem_of(root, path).replace(path, "it") for path in ("../there", "../not-there")}
    assert len(told) == 1


@pytest.mark.parametrize(
    "path",
    [
        "missing/../" + "a" * 300,
        "missing/\0",
        "",
        "a" * 2000,
        "nul\0",
        "a/" * 400,
        ".",
        "missing",
        "x/" + CONFIG_FILE,
    ],
)
def test_a_path_that_names_no_folder_of_an_adapter_is_refused(tmp_path: Path, path: str) -> None:
    write_adapter(tmp_path / "x", SIZES)
    assert problem_of(tmp_path, path)


def test_links_in_a_circle_and_pipes_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", SIZES)
    (tmp_path / "round").symlink_to(tmp_path / "round")
    assert "cannot be opened" in problem_of(tmp_path, "round")
    (tmp_path / "x" / WEIGHTS_FILE).unlink()
    os.mkfifo(tmp_path / "x" / WEIGHTS_FILE)
    assert "not a regular file" in problem_of(tmp_path)
    (tmp_path / "x" / WEIGHTS_FILE).unlink()
    (tmp_path / "x" / WEIGHTS_FILE).mkdir()
    assert problem_of(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pkl"])
def test_pickled_weights_are_named_and_never_opened(tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path / "x", SIZES)
    (tmp_path / "x" / WEIGHTS_FILE).rename(tmp_path / "x" / name)
    (tmp_path / "x" / name).chmod(0)
    assert "could run code and is never opened" in problem_of(tmp_path)


def test_the_digest_is_of_what_an_adapter_does(tmp_path: Path) -> None:
    """Another seed, scale, rank, type or place is another adapter; another file layout or training note is not."""
    write_adapter(tmp_path / "x", SIZES)
    original = digest_of(tmp_path)
    assert len(original) == 64
    others = {original}
    for index, change in enumerate(
        (
            {"seed": 1},
            {"rank": 5},
            {"dtype": torch.bfloat16},
            {"dtype": torch.float16},
            {"modules": LINEAR[:-1]},
            {"layers": [0]},
            {"config": {"lora_alpha": 9}},
            {"config": {"use_rslora": True}},
            {"config": {"alpha_pattern": {"q_proj": 1}}},
        )
    ):
        write_adapter(tmp_path / str(index), SIZES, **change)  # type: ignore[arg-type]
        others.add(digest_of(tmp_path, str(index)))
    assert len(others) == 10
    write_config(tmp_path / "x", lora_dropout=0.3, task_type=None)
    tensors = load_file(tmp_path / "x" / WEIGHTS_FILE)
    save_file(dict(reversed(tensors.items())), tmp_path / "x" / WEIGHTS_FILE, metadata={"made": "later"})
    assert digest_of(tmp_path) == original


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    """One would make NaN of a whole batch."""
    write_adapter(tmp_path / "x", SIZES, dtype=dtype)
    tensors = load_file(tmp_path / "x" / WEIGHTS_FILE)
    tensors[B][3, 1] = value
    save_file(tensors, tmp_path / "x" / WEIGHTS_FILE)
    with pytest.raises(InvalidRequestError, match="not finite"):
        digest_of(tmp_path)


def test_the_largest_finite_numbers_are_finite() -> None:
    assert is_finite(np.array([0x7F7F, 0xFF7F, 0x0001], dtype=np.uint16))
    assert not is_finite(np.array([0x7F80], dtype=np.uint16))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", SIZES, rank=256)  # more than is read ahead
    root = AdapterRoot(str(tmp_path))
    adapter = inspect_adapter(root, "x", SIZES)
    reader = iter(AdapterReader(root, adapter))
    next(reader)
    os.truncate(tmp_path / "x" / WEIGHTS_FILE, adapter.parts[-1].b.offset + 1)
    with pytest.raises(ModelFileError, match="ended while it was being read"):
        list(reader)


@pytest.mark.parametrize("name", ["", "a b", "-a", "../a", "ä", "a" * 129, "a\n", "a/b"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="letters, digits"):
        check_adapter_name(name)


def test_names_of_all_allowed_characters_are_taken() -> None:
    for name in ("a", "9", "Law-2.1_x", "a" * 128):
        check_adapter_name(name)


def test_looking_at_adapters_needs_no_torch() -> None:
    """The front refuses what it must without the seconds and the memory that torch takes."""
    code = "import sys, prefixmesh.model_files.peft_adapter as p; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
