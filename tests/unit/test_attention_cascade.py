"""The torch backend's cascades: what is read once for a group gives what each sequence would get for itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.paged_products import Part
from prefixmesh.worker.model.torch_attention import TorchAttention, merge_part
from tests.support.paged_attention import PagedSetting, Sharer, alone
from tests.support.plans import Piece, make_plan

ALWAYS = CascadeRule(min_reads=1)

TOLERANCE = 1e-5
"""float32, on values of about 1: the sums run in another order, nothing else."""

BF16_TOLERANCE = 0.05
"""bfloat16 has 8 bits of mantissa: the plain path's own bound; the merge itself is done in float32."""

BRANCHES = [
    alone(200, 1),
    Sharer(0, 6, 150, 1),  # the trunk
    Sharer(0, 6, 96, 40),  # a prefill right after the trunk
    Sharer(1, 9, 150, 1),  # a branch of the trunk
    Sharer(1, 9, 144, 70),
    alone(0, 33),  # cold, shares nothing
    Sharer(1, 9, 145, 1),
    alone(77, 1),
]
"""Page size 16: decodes and chunked prefills mixed, two shared levels, two sequences that share nothing."""


def check(setting: PagedSetting, rule: CascadeRule, tolerance: float) -> TorchAttention:
    """The cascade agrees with attention written out and with the plain backend."""
    cascade = TorchAttention(setting.config, setting.pool, rule)
    setting.check(cascade, tolerance)
    plain = setting.actual(TorchAttention(setting.config, setting.pool), 1)
    torch.testing.assert_close(setting.actual(cascade, 1), plain, atol=tolerance, rtol=0)
    return cascade


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decode_and_chunked_prefill_over_several_levels(
    page_size: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """Two shared levels, and what shares nothing beside them, give what each sequence gets for itself."""
    scale = 16 // page_size
    work = [item._replace(shared_pages=item.shared_pages * scale) for item in BRANCHES]
    setting = PagedSetting(work, page_size=page_size, heads=heads, kv_heads=kv_heads, dtype=dtype)
    backend = check(setting, ALWAYS, TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE)
    assert backend._cascade is not None
    assert [rows.tokens for rows in backend._cascade.shared] == [96, 48]
    assert len(backend._plain.rows) == len(backend._plain.singles) == 1


@st.composite
def sharing_work(draw: st.DrawFn) -> tuple[list[Sharer], int]:
    page_size = draw(st.sampled_from([1, 2, 16]))
    work: list[Sharer] = []
    for index in range(draw(st.integers(2, 7))):
        parent = draw(st.integers(0, max(0, index - 1)))
        whole = (work[parent].seen // page_size) if work else 0
        shared = draw(st.integers(0, whole))
        seen = shared * page_size + draw(st.integers(0, 40))
        work.append(Sharer(parent, shared, seen, draw(st.one_of(st.just(1), st.integers(1, 70)))))
    return work, page_size


@settings(max_examples=60, deadline=None)
@given(drawn=sharing_work(), min_reads=st.integers(1, 100), seed=st.integers(0, 1000))
def test_any_cascade(drawn: tuple[list[Sharer], int], min_reads: int, seed: int) -> None:
    """Any branching, any bound: the same attention."""
    work, page_size = drawn
    check(PagedSetting(work, page_size=page_size, seed=seed), CascadeRule(min_reads), TOLERANCE)


def test_a_shared_prefix_is_gathered_once() -> None:
    """32 requests decode over 160 shared tokens: one list of them, and own parts of their own length."""
    setting = PagedSetting([alone(170, 1)] + [Sharer(0, 160, 170 + i % 3, 1) for i in range(31)])
    backend = check(setting, ALWAYS, TOLERANCE)
    assert backend._cascade is not None
    assert [(rows.start, rows.end, rows.tokens) for rows in backend._cascade.shared] == [(0, 32, 160)]
    assert sum(len(own.rows) * own.tokens for own in backend._cascade.own.singles) == 32 * 13


def test_below_the_bound_nothing_changes() -> None:
    """The plain path, not a slower one, when a group is too small to pay."""
    setting = PagedSetting([alone(100, 1), Sharer(0, 90, 95, 1)])
    backend = TorchAttention(setting.config, setting.pool, CascadeRule(min_reads=181))
    backend.prepare(setting.plan)
    assert backend._cascade is None
    backend = TorchAttention(setting.config, setting.pool, CascadeRule(min_reads=180))
    backend.prepare(setting.plan)
    assert backend._cascade is not None


def test_the_step_after_a_cascade_is_its_own() -> None:
    """Nothing of a cascade stays when the next step has none."""
    setting = PagedSetting([alone(100, 1), Sharer(0, 90, 95, 1)])
    backend = TorchAttention(setting.config, setting.pool, ALWAYS)
    setting.check(backend, TOLERANCE)
    pieces = [Piece(sequence, 1) for sequence in setting.sequences[:1]]
    backend.prepare(make_plan(pieces, 1))
    with torch.inference_mode():
        actual = backend.forward(0, setting.q[:1]).double()
    torch.testing.assert_close(actual, setting.expected(0)[:1], atol=TOLERANCE, rtol=0)


def test_merging_parts_is_attention_over_both() -> None:
    """In base 2; a part that saw nothing (-inf) changes nothing."""
    scores = torch.randn(5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    values = torch.randn(30, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights = torch.exp2(scores)

    def part(start: int, end: int) -> Part:
        own = weights[:, start:end]
        mixed = own @ values[start:end] / own.sum(-1, keepdim=True)
        return Part(mixed.float(), own.sum(-1).log2().float())

    whole, state = part(0, 30), part(0, 4)
    merge_part(state, part(4, 29))
    merge_part(state, part(29, 30))
    merge_part(state, Part(torch.zeros(5, 7), torch.full((5,), -torch.inf)))
    torch.testing.assert_close(state.values, whole.values)
    torch.testing.assert_close(state.lse, whole.lse)
