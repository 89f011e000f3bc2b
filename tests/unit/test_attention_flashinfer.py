"""The flashinfer backend on a stand-in for the library: what is handed over, in which order, gives exact attention.

The stand-in computes what FlashInfer documents, from the arrays that it gets. The kernels themselves are tests/gpu's matter.
"""

import importlib
import importlib.util
import inspect
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixmesh.errors import ConfigError
from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model import flashinfer_attention
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention, unsupported
from tests.support import fake_flashinfer
from tests.support.paged_attention import PagedSetting, Sharer, alone, config_of

ALWAYS = CascadeRule(min_reads=1)
TOLERANCE = 1e-6
BRANCHING = [alone(70, 1), alone(5, 1), Sharer(0, 64, 66, 9), Sharer(1, 0, 0, 12), Sharer(0, 16, 30, 1)]
"""Two shared levels, one of them with queries that have no segment there, in an order that is not depth-first."""


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 64)
    return fake_flashinfer.install(monkeypatch)


def scaled(work: list[Sharer], page_size: int) -> list[Sharer]:
    return [item._replace(shared_pages=item.shared_pages // page_size) for item in work]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_each_kind_of_step_goes_to_its_wrapper(
    library: Any, page_size: int, heads: int, kv_heads: int
) -> None:
    """Decodes alone, prefills among them, and a cascade of several levels: exact, by the wrapper made for it."""
    decodes = [alone(40, 1), alone(3, 1), alone(17, 1)]
    mixed = [alone(40, 1), alone(0, 30), alone(20, 5)]
    shared = scaled(BRANCHING, page_size)
    for work, kind in (
        (decodes, library.BatchDecodeWithPagedKVCacheWrapper),
        (mixed, library.BatchPrefillWithPagedKVCacheWrapper),
        (shared, library.MultiLevelCascadeAttentionWrapper),
    ):
        setting = PagedSetting(work, page_size=page_size, heads=heads, kv_heads=kv_heads)
        backend = FlashInferAttention(setting.config, setting.pool, ALWAYS)
        setting.check(backend, TOLERANCE)
        assert type(backend._active) is kind


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seen=st.lists(st.integers(1, 30), min_size=2, max_size=5),
    new=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    page_size=st.sampled_from([1, 2, 16]),
    data=st.data(),
)
def test_any_cascade_is_exact(seen: list[int], new: list[int], page_size: int, data: st.DataObject) -> None:
    work: list[Sharer] = []
    for index, count in enumerate(seen):
        parent = data.draw(st.integers(0, max(0, index - 1)))
        shared = min(count, work[parent].seen if work else 0) // page_size
        work.append(Sharer(parent, shared, count, new[index]))
    setting = PagedSetting(work, page_size=page_size)
    setting.check(FlashInferAttention(setting.config, setting.pool, ALWAYS), TOLERANCE)


def test_a_wrapper_is_made_once_and_planned_once_a_step() -> None:
    """Layers share a step's plan; steps share wrappers."""
    setting = PagedSetting(BRANCHING)
    backend = FlashInferAttention(setting.config, setting.pool, ALWAYS)
    for _ in range(2):
        backend.prepare(setting.plan)
        for layer in range(2):
            backend.forward(layer, setting.q)
    (cascade,) = backend._cascades.values()
    assert cascade.plans == 2
    assert len(cascade.levels) == 3


def test_queries_in_order_are_not_moved() -> None:
    """A cascade whose order is the step's own costs no gathering."""
    setting = PagedSetting([alone(20, 1), Sharer(0, 16, 18, 1), alone(9, 1)])
    backend = FlashInferAttention(setting.config, setting.pool, ALWAYS)
    setting.check(backend, TOLERANCE)
    assert backend._rows is None


@pytest.mark.parametrize(("heads", "kv_heads", "wanted"), [(9, 3, False), (8, 2, True), (4, 4, False)])
def test_tensor_cores_decode_when_many_heads_share_a_kv_head(heads: int, kv_heads: int, wanted: bool) -> None:
    setting = PagedSetting([alone(3, 1)], heads=heads, kv_heads=kv_heads)
    backend: Any = FlashInferAttention(setting.config, setting.pool)
    assert backend._decode.use_tensor_cores is wanted


def test_the_library_is_imported_only_when_a_backend_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its absence is the configuration's fault, told in words."""
    setting = PagedSetting([alone(3, 1)])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"prefixmesh\[gpu\]"):
        FlashInferAttention(setting.config, setting.pool)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "words"),
    [
        ("cpu", torch.bfloat16, 64, "CUDA device"),
        ("cuda", torch.float32, 64, "float16 or bfloat16"),
        ("cuda", torch.bfloat16, 80, "head sizes 64, 128, 256, not 80"),
    ],
)
def test_what_it_cannot_serve_is_told(device: str, dtype: torch.dtype, head_dim: int, words: str) -> None:
    assert words in unsupported(config_of(4, 2, head_dim), dtype, torch.device(device))


def test_our_calls_fit_the_real_signatures(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that the stand-in takes binds to the installed library's signature. Needs flashinfer, but no GPU."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed here")
    real = importlib.import_module("flashinfer")
    calls: list[tuple[str, str]] = []
    for name in (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
    ):
        for method in ("__init__", "plan", "run"):
            _check_calls(monkeypatch, getattr(library, name), getattr(real, name), method, calls)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    for work in ([alone(9, 1)], [alone(0, 4)], BRANCHING):
        setting = PagedSetting(work)
        setting.check(FlashInferAttention(setting.config, setting.pool, ALWAYS), TOLERANCE)
    assert len(set(calls)) == 9


def _check_calls(
    monkeypatch: pytest.MonkeyPatch, fake: Any, real: Any, method: str, calls: list[tuple[str, str]]
) -> None:
    original = getattr(fake, method)
    # The decode wrapper's plan takes any keywords and passes them on.
    planned = method == "plan" and hasattr(real, "_plan_impl")
    signature = inspect.signature(real._plan_impl if planned else getattr(real, method))

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is fake:
            signature.bind(self, *args, **kwargs)
            calls.append((fake.__name__, method))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(fake, method, checked)
