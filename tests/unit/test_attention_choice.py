"""Which backend a model gets, and what is said when it is not the one asked for."""

import importlib.util
import logging
from typing import Any

import pytest
import torch

from prefixmesh.errors import ConfigError
from prefixmesh.worker.model import attention_choice, flashinfer_attention
from prefixmesh.worker.model.attention_choice import choose_attention
from prefixmesh.worker.model.cascade_bound import cpu_rule
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support import fake_flashinfer
from tests.support.paged_attention import PagedSetting, Sharer, alone


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is there and can serve; what it needs a GPU for is the stand-in's."""
    monkeypatch.setattr(attention_choice, "unsupported", lambda *_: "")
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 64)
    fake_flashinfer.install(monkeypatch)


def a_setting(**options: Any) -> PagedSetting:
    return PagedSetting([alone(3, 1)], **options)


def test_a_cpu_gets_torch_with_the_documented_bound() -> None:
    """Two requests stay plain below it, and read together from it on."""
    bound = cpu_rule(2).min_reads
    for shared, cascades in ((bound // 2 - 1, False), (bound // 2, True)):
        setting = PagedSetting([alone(shared + 3, 1), Sharer(0, shared, shared + 1, 1)], head_dim=2)
        backend = choose_attention(setting.config, setting.pool)
        assert isinstance(backend, TorchAttention)
        backend.prepare(setting.plan)
        assert (backend._cascade is not None) == cascades
        assert setting.pool.device == torch.device("cpu")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_flashinfer_is_taken_where_it_can_serve_unless_torch_is_asked_for() -> None:
    setting = a_setting()
    assert isinstance(choose_attention(setting.config, setting.pool), FlashInferAttention)
    assert isinstance(choose_attention(setting.config, setting.pool, "flashinfer"), FlashInferAttention)
    assert isinstance(choose_attention(setting.config, setting.pool, "torch"), TorchAttention)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_backends_made_to_measure_take_no_memory_of_their_own() -> None:
    """Workspaces are the largest thing a backend holds, and measuring makes two more at a time when memory is scarcest."""
    setting = a_setting()
    make = attention_choice.backend_maker(setting.config, setting.pool, flashinfer=True)
    first, second = make(None), make(None)
    assert isinstance(first, FlashInferAttention)
    assert isinstance(second, FlashInferAttention)
    assert second._workspace is first._workspace
    assert second._decode_workspace is first._decode_workspace is not first._workspace
    beside = attention_choice.backend_maker(setting.config, setting.pool, flashinfer=True, beside=first)
    third = beside(None)
    assert isinstance(third, FlashInferAttention)
    assert third._workspace is first._workspace


def test_flashinfer_by_name_says_why_it_cannot_be_used() -> None:
    """No GPU here; auto takes torch and logs the same words."""
    setting = a_setting()
    with pytest.raises(
        ConfigError, match=r"attention_backend=flashinfer cannot be used: .* CUDA device, not cpu"
    ):
        choose_attention(setting.config, setting.pool, "flashinfer")


@pytest.mark.parametrize(
    ("options", "installed", "words"),
    [
        ({"dtype": torch.float32, "head_dim": 64}, True, "float16 or bfloat16, not float32"),
        ({"dtype": torch.bfloat16, "head_dim": 80}, True, "head sizes 64, 128, 256, not 80"),
        ({"dtype": torch.bfloat16, "head_dim": 64}, False, "not installed"),
        ({"dtype": torch.bfloat16, "head_dim": 64}, True, ""),
    ],
)
def test_every_reason_is_told(
    options: dict[str, Any], installed: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a type, a head size, and a library that is missing; nothing is imported to find out."""
    found = object() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    setting = a_setting(**options)
    reason = flashinfer_attention.unsupported(setting.config, setting.pool.dtype, torch.device("cuda"))
    assert words in reason
    assert bool(reason) == bool(words)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_library_that_breaks_is_told_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its compiler is missing, say: auto goes on with torch and warns; by name, the engine does not start."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", broken)
    setting = a_setting()
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_attention(setting.config, setting.pool), TorchAttention)
    assert "Could not find nvcc" in caplog.text
    with pytest.raises(ConfigError, match="RuntimeError: Could not find nvcc"):
        choose_attention(setting.config, setting.pool, "flashinfer")
