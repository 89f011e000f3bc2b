"""Batch plans: every array against a naive one, token by token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixmesh.cache.ledger import CacheLedger
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.plan_builder import StepPart, build_plan
from prefixmesh.worker.request import Request
from tests.support.scheduling import submit_command


def make_part(index: int, computed: int, new: int, page_size: int, *, samples: bool) -> StepPart:
    """A request whose pages are scattered and unlike any other request's."""
    length = computed + new
    command = submit_command(f"r{index}", [(index * 31 + p) % 50 for p in range(length)], 3)
    request = Request.from_submit(command, page_size=page_size, ledger=CacheLedger(), now=0.0)
    request.computed = computed
    request.pages = len(request.page_table)
    request.page_table[:] = [1000 * (index + 1) - 7 * page for page in range(request.pages)]
    return StepPart(request, new, samples)


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 2, 16]),
)
def test_a_plan_says_what_each_token_needs(shapes: list[tuple[int, int, bool]], page_size: int) -> None:
    parts = [
        make_part(index, computed, new, page_size, samples=samples)
        for index, (computed, new, samples) in enumerate(shapes)
    ]
    plan = build_plan(parts, page_size)
    row = 0
    wanted_rows = []
    for b, (request, new, samples) in enumerate(parts):
        assert (plan.qo_indptr[b], plan.qo_indptr[b + 1]) == (row, row + new)
        kv_len = request.computed + new
        pages = plan.kv_indices[plan.kv_indptr[b] : plan.kv_indptr[b + 1]]
        assert pages.tolist() == request.page_table[: len(pages)].tolist()
        assert (len(pages) - 1) * page_size + plan.last_page_len[b] == kv_len
        assert 1 <= plan.last_page_len[b] <= page_size
        for position in range(request.computed, kv_len):
            assert plan.token_ids[row] == request.ids[position]
            assert plan.positions[row] == position
            page = request.page_table[position // page_size]
            assert plan.out_slots[row] == page * page_size + position % page_size
            row += 1
        if samples:
            wanted_rows.append(row - 1)
    assert plan.logit_rows.tolist() == wanted_rows
    assert plan.qo_indptr[-1] == len(plan.token_ids) == row


def test_every_array_is_int32() -> None:
    """Both attention backends take them as they are."""
    plan = build_plan([make_part(0, 3, 2, 2, samples=True)], 2)
    assert plan.adapter_slots is None, "nobody here has an adapter"
    for name in BatchPlan.__dataclass_fields__.keys() - {"adapter_slots"}:
        assert getattr(plan, name).dtype == np.int32, name
