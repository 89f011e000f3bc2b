"""Both backends on a GPU, on the very same plans: they agree with attention written out, and a cascade with the plain way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.attention import AttentionBackend
from prefixmesh.worker.model.attention_choice import choose_attention
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention, unsupported
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support.paged_attention import PagedSetting, Sharer, alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles kernels at their first use
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALWAYS = CascadeRule(min_reads=1)

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""On values of about 1: 8 and 11 bits of mantissa, and for a cascade one more rounding of each part."""

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
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("work", WORK.values(), ids=list(WORK))
def test_backends_agree_with_attention_written_out(
    make: Callable[[PagedSetting], AttentionBackend],
    page_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    work: list[Sharer],
) -> None:
    options: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    scaled = [item._replace(shared_pages=item.shared_pages * 16 // page_size) for item in work]
    setting = PagedSetting(scaled, page_size=page_size, device="cuda", **options)
    setting.check(make(setting), TOLERANCE[dtype])


def test_the_chosen_backend_is_exact() -> None:
    """Whatever bound was measured on this device."""
    work = [alone(4096 + 8, 1)] + [Sharer(0, 256, 4096 + 8, 1) for _ in range(31)]
    setting = PagedSetting(
        work, page_size=16, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    setting.check(choose_attention(setting.config, setting.pool), TOLERANCE[torch.bfloat16])
