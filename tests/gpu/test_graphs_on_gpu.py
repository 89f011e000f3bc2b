"""Recording and replaying on a GPU: a computation by itself, and a model's decode steps beside the same steps computed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixmesh.config import EngineConfig
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.model.cuda_graphs import CudaGraphDevice
from prefixmesh.worker.model.open_model import OpenedModel, open_model
from tests.support.plans import PagedSequence, Piece, make_plan
from tests.support.tiny_model import TinyShape, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles kernels at their first use
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOGIT_TOLERANCE = 0.1
"""In bfloat16 a product over other numbers of rows takes another kernel; logits are about 10."""

LENGTHS = [9, 1, 30, 4, 5, 17, 2, 8, 40, 3, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head size that FlashInfer has kernels for."""
    shape = TinyShape(hidden_size=256, num_heads=6, num_kv_heads=2, head_dim=64)
    return make_tiny_model(tmp_path_factory.mktemp("tiny-64"), shape)


def opened(folder: Path, page_size: int, **options: Any) -> OpenedModel:
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_total_tokens": 4096}
    engine = EngineConfig(page_size=page_size, max_running_requests=8, **(settings | options))
    return open_model(resolve_model(str(folder)), engine)


def test_a_recording_computes_again_on_what_its_arrays_hold() -> None:
    device = torch.device("cuda", 0)
    x, y = torch.zeros(4, 8, device=device), torch.zeros(4, 8, device=device)
    weight = torch.randn(8, 8, device=device)

    def compute() -> None:
        y.copy_((x @ weight).relu())

    graphs = CudaGraphDevice(device)
    assert graphs.free_bytes > 0
    recording = graphs.record(compute)
    for seed in range(3):
        x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
        recording.replay()
        torch.testing.assert_close(y, (x @ weight).relu())


@pytest.mark.parametrize("page_size", [1, 16])
def test_replayed_steps_give_the_computed_logits_and_touch_no_other_page(
    folder: Path, page_size: int
) -> None:
    """At recorded sizes and between them, one size after the other; a step too large is computed."""
    runner = opened(folder, page_size).runner
    if not runner.replays:
        pytest.skip("nothing is recorded without flashinfer")
    pages = iter(np.random.default_rng(1).permutation(runner.pool.num_pages).tolist())
    sequences = [
        PagedSequence(
            tokens=np.random.default_rng(n).integers(3, 512, n).tolist(),
            pages=[next(pages) for _ in range(-(-n // page_size))],
        )
        for n in LENGTHS
    ]
    pieces = [Piece(each, len(each.tokens) - 1, False) for each in sequences if len(each.tokens) > 1]
    runner.forward(make_plan(pieces, page_size))
    for each in sequences:
        each.computed = len(each.tokens) - 1
    for count in (3, 8, 1, 5, 2, 11):
        plan = make_plan([Piece(each, 1) for each in sequences[:count]], page_size)
        expected = runner._compute(plan).clone()
        before = runner.pool.storage.clone()
        assert runner._graphs is not None
        with torch.inference_mode():
            replayed = runner._graphs.forward(plan)
        assert (replayed is None) == (count > 8)
        if replayed is None:
            continue
        torch.testing.assert_close(replayed, expected, atol=LOGIT_TOLERANCE, rtol=0)
        changed = (runner.pool.storage != before).flatten(2, 3).flatten(3).any(-1).any(0).any(0)
        slots = set(changed.nonzero().flatten().tolist())
        assert slots <= {*plan.out_slots.tolist(), *range(runner.pool.total_tokens, len(changed))}


def test_a_switch_leaves_everything_computed(folder: Path) -> None:
    assert not opened(folder, 16, cuda_graphs=False).runner.replays
    assert not opened(folder, 16, attention_backend="torch").runner.replays
