"""The flashinfer backend on a stand-in for the library: what is handed over, in which order, gives exact attention.

The stand-in computes what FlashInfer documents, from the arrays that it gets. That our calls fit the library itself is
``tests/contract/test_flashinfer_signatures``; the kernels are tests/gpu's matter.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixmesh.errors import ConfigError
from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model import flashinfer_attention
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention, unsupported
from tests.support import fake_flashinfer
from tests.support.fake_graphs import FakeGraphDevice, make_runner
from tests.support.paged_attention import PagedSetting, Sharer, alone, config_of
from tests.support.plans import GreedyDriver

ALWAYS = CascadeRule(min_reads=1)
TOLERANCE = 1e-6
BRANCHING = [alone(70, 1), alone(5, 1), Sharer(0, 64, 66, 9), Sharer(1, 0, 0, 12), Sharer(0, 16, 30, 1)]
"""Two shared levels, one of them with queries that have no segment there, in an order that is not depth-first."""


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(flashinfer_attention, "MAX_GRAPH_PAGES", 512)
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


@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1)])
def test_decodes_of_a_recorded_size_read_what_was_planned_last(
    page_size: int, heads: int, kv_heads: int
) -> None:
    """In the library's graph mode each plan is copied into arrays that stay where they are; sizes share the page indices."""
    first = PagedSetting([alone(40, 1), alone(3, 1)], page_size=page_size, heads=heads, kv_heads=kv_heads)
    backend = FlashInferAttention(first.config, first.pool, ALWAYS)
    two: Any = backend.decode_of_size(2)
    three: Any = backend.decode_of_size(3)
    first.check(two, TOLERANCE)
    assert two._wrapper.buffers[1] is three._wrapper.buffers[1]
    assert two._wrapper.buffers[0] is not three._wrapper.buffers[0]
    assert len(two._wrapper.buffers[1]) == backend.max_graph_pages
    assert two._wrapper.use_tensor_cores == (heads // kv_heads > 3)
    for layer in range(2):
        first.check(two, TOLERANCE)
        assert two._wrapper.plans == 4 + 2 * layer


def test_whole_answers_replayed_on_the_librarys_graph_mode(tiny_model_folder: Path) -> None:
    """The model's decode steps, padded and recorded over the stand-in: greedy answers as with the torch backend."""
    runner = make_runner(tiny_model_folder)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, 512, length).tolist() for length in (3, 17, 8)]
    expected = [answer.tokens for answer in GreedyDriver(runner).answer(prompts, 4)]
    device = FakeGraphDevice()
    runner.record_decodes(FlashInferAttention(runner.config, runner.pool), device, (1, 2, 4))
    assert [answer.tokens for answer in GreedyDriver(runner).answer(prompts, 4)] == expected
    assert device.replays == 3
