"""Both backends on a GPU, on the very same plans: they agree with attention written out, and a cascade with the plain way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.attention_choice import choose_attention
from prefixmesh.worker.model.cuda_graphs import CudaGraphDevice
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention, unsupported
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support.paged_attention import PagedSetting, Sharer, alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles kernels at their first use
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALWAYS = CascadeRule(min_reads=1)

TOLERANCE = 0.05
"""In bfloat16, on values of about 1: 8 bits of mantissa, and for a cascade one more rounding of each part."""

WORK = {
    "decode": [alone(300, 1), alone(5, 1), alone(64, 1)],
    "mixed": [alone(300, 1), alone(0, 70), alone(64, 33)],
    "cascade of decodes": [alone(700, 1)] + [Sharer(0, 40, 640 + 7 * i, 1) for i in range(15)],
    "cascade of several levels, mixed": [
        alone(200, 1),
        alone(0, 33),  # shares nothing, and stands between those who do
        Sharer(0, 6, 150, 1),
        Sharer(0, 6, 96, 40),
        Sharer(2, 9, 150, 1),
        Sharer(2, 9, 144, 70),
    ],
}
"""In pages of 16."""


def flashinfer(setting: PagedSetting) -> AttentionBackend:
    reason = unsupported(setting.config, setting.pool.dtype, setting.pool.device)
    if reason:
        pytest.skip(reason)
    return FlashInferAttention(setting.config, setting.pool, ALWAYS)


def plain_torch(setting: PagedSetting) -> AttentionBackend:
    return TorchAttention(setting.config, setting.pool, ALWAYS)


@pytest.mark.parametrize("make", [plain_torch, flashinfer])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (9, 3, 64), (14, 2, 64), (32, 8, 128), (16, 2, 128)]
)
@pytest.mark.parametrize("work", WORK.values(), ids=list(WORK))
def test_backends_agree_with_attention_written_out(
    make: Callable[[PagedSetting], AttentionBackend],
    page_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    work: list[Sharer],
) -> None:
    """One to eight query heads for a KV head, with and without tensor cores; page size 1 and 16."""
    options: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    scaled = [item._replace(shared_pages=item.shared_pages * 16 // page_size) for item in work]
    setting = PagedSetting(scaled, page_size=page_size, dtype=torch.bfloat16, device="cuda", **options)
    setting.check(make(setting), TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("work", WORK.values(), ids=list(WORK))
def test_the_torch_backend_is_exact_in_float32(page_size: int, work: list[Sharer]) -> None:
    """On the device, where tests elsewhere prove it on a CPU."""
    scaled = [item._replace(shared_pages=item.shared_pages * 16 // page_size) for item in work]
    setting = PagedSetting(scaled, page_size=page_size, heads=9, kv_heads=3, head_dim=64, device="cuda")
    setting.check(plain_torch(setting), 1e-4)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (16, 2)])
def test_decodes_of_a_recorded_size_follow_each_plan(page_size: int, heads: int, kv_heads: int) -> None:
    """The library's CUDA graph mode, captured over one plan and replayed over others: longer, shorter, on other pages."""
    lengths = ([1, 1, 1], [300, 5, 64], [17, 2000, 1])
    options: dict[str, Any] = {
        "page_size": page_size, "heads": heads, "kv_heads": kv_heads, "head_dim": 64, "dtype": torch.bfloat16,
    }  # fmt: skip
    wide = PagedSetting([alone(4000, 1)], device="cuda", **options)
    backend = flashinfer(wide)
    assert isinstance(backend, FlashInferAttention)
    of_three = backend.decode_of_size(3)
    q, out = torch.zeros_like(wide.q).repeat(3, 1, 1), torch.zeros_like(wide.q).repeat(3, 1, 1)
    settings = [
        PagedSetting([alone(n, 1) for n in each], device="cuda", seed=n, **options)
        for n, each in enumerate(lengths)
    ]
    of_three.prepare(settings[0].plan)

    def compute() -> None:
        out.copy_(of_three.forward(0, q))

    with torch.inference_mode():
        recording = CudaGraphDevice(wide.pool.device).record(compute)
        for setting in settings:
            pages = setting.pool.storage.shape[2]
            wide.pool.storage[:, :, :pages].copy_(setting.pool.storage)
            q.copy_(setting.q)
            of_three.prepare(setting.plan)
            recording.replay()
            torch.testing.assert_close(out.double(), setting.expected(0), atol=TOLERANCE, rtol=0)


def test_the_chosen_backend_is_exact() -> None:
    """Whatever bound was measured on this device."""
    work = [alone(4096 + 8, 1)] + [Sharer(0, 256, 4096 + 8, 1) for _ in range(31)]
    setting = PagedSetting(
        work, page_size=16, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    setting.check(choose_attention(setting.config, setting.pool), TOLERANCE)
