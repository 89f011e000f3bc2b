"""Recorded decode steps, on a stand-in for the GPU: the same logits, nobody's pages touched, and every way out of them."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model.decode_graphs import MIN_FREE_BYTES, DecodeGraphs
from prefixmesh.worker.model.runner import ModelRunner
from tests.support.fake_graphs import PAGES, FakeGraphDevice, TorchGraphAttention, make_runner
from tests.support.plans import GreedyDriver, PagedSequence, Piece, make_plan


def record(
    runner: ModelRunner,
    device: FakeGraphDevice,
    sizes: Sequence[int] = (1, 2, 4, 8),
    max_pages: int = 10**6,
) -> DecodeGraphs:
    return runner.record_decodes(TorchGraphAttention(runner.config, runner.pool, max_pages), device, sizes)


def sequences_of(lengths: Sequence[int], page_size: int) -> list[PagedSequence]:
    """Prompts that are computed but for their last token, on scattered pages."""
    order = np.random.default_rng(1).permutation(PAGES).tolist()
    return [
        PagedSequence(
            tokens=np.random.default_rng(length).integers(3, 512, length).tolist(),
            pages=[order.pop() for _ in range(-(-length // page_size))],
        )
        for length in lengths
    ]


def prefill(runner: ModelRunner, sequences: Sequence[PagedSequence]) -> None:
    page_size = runner.pool.page_size
    several = [sequence for sequence in sequences if len(sequence.tokens) > 1]
    runner.forward(make_plan([Piece(each, len(each.tokens) - 1, False) for each in several], page_size))
    for sequence in sequences:
        sequence.computed = len(sequence.tokens) - 1


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8])
def test_replayed_steps_give_the_same_logits_and_write_only_their_own_slots(
    tiny_model_folder: Path, count: int
) -> None:
    """Row by row what the step computed as ever gives, at a recorded size and between two; of the pages that can be owned only the
    step's own slots change."""
    runner = make_runner(tiny_model_folder)
    sequences = sequences_of([9, 1, 30, 4, 5, 17, 2, 8][:count], 4)
    prefill(runner, sequences)
    plan = make_plan([Piece(each, 1) for each in sequences], 4)
    expected = runner.forward(plan).clone()
    device = FakeGraphDevice()
    record(runner, device)
    owned = runner.pool.storage[:, :, :PAGES]
    owned.flatten(2, 3)[:, :, plan.out_slots] = 0.0
    before = owned.clone()
    actual = runner.forward(plan)
    assert device.replays == 1
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    changed = (owned != before).flatten(2, 3).any(-1).any(-1).any(0).any(0)
    assert set(np.flatnonzero(changed.numpy()).tolist()) == set(plan.out_slots.tolist())


def test_whole_answers_are_the_same(tiny_model_folder: Path) -> None:
    """Batches of several sizes, one after the other over the same arrays: greedy answers as without recording."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 512, length).tolist() for length in (3, 17, 8, 30, 2)]
    runner = make_runner(tiny_model_folder)
    expected = [GreedyDriver(runner).answer([prompt], 6)[0].tokens for prompt in prompts]
    device = FakeGraphDevice()
    record(runner, device)
    driver = GreedyDriver(runner)
    for batch in (prompts, prompts[:2], prompts[2:]):
        answers = [answer.tokens for answer in driver.answer(batch, 6)]
        assert answers == [expected[prompts.index(prompt)] for prompt in batch]
    assert device.replays == 15


def test_sizes_are_recorded_largest_first_and_never_on_pages_that_can_be_owned(
    tiny_model_folder: Path,
) -> None:
    """So that smaller ones fit into the memory of larger ones; a pool in use keeps what it holds."""
    runner = make_runner(tiny_model_folder)
    runner.pool.storage.fill_(3.0)
    assert record(runner, FakeGraphDevice(), (2, 8, 4)).sizes == (2, 4, 8)
    assert (runner.pool.storage[:, :, :PAGES] == 3.0).all()
    assert (runner.pool.storage[:, :, PAGES, 0] != 3.0).any()


def test_what_cannot_be_replayed_is_computed_as_ever(tiny_model_folder: Path) -> None:
    """A chunk among the decodes, more sequences or pages than recorded for, and sharing that is worth more: None, and nothing done."""
    runner = make_runner(tiny_model_folder)
    sequences = sequences_of([9, 6, 30], 4)
    prefill(runner, sequences)
    device = FakeGraphDevice()
    graphs = record(runner, device, (1, 2))
    plans = {
        "a chunk": make_plan([Piece(PagedSequence(tokens=[5, 6], pages=[0]), 2)], 4),
        "too many": make_plan([Piece(each, 1) for each in sequences], 4),
    }
    for plan in plans.values():
        assert graphs.forward(plan) is None
        assert len(runner.forward(plan)) == len(plan.logit_rows)
    assert device.replays == 0
    three = plans["too many"]  # with a dummy beside them, they read one page more
    for more, replayed in ((0, False), (1, True)):
        wide = record(runner, FakeGraphDevice(), (1, 2, 4), max_pages=len(three.kv_indices) + more)
        with torch.inference_mode():
            assert (wide.forward(three) is not None) == replayed


def test_a_step_that_shares_enough_leaves_for_a_cascade(tiny_model_folder: Path) -> None:
    """Where the cascade's saving was measured to be more than the replay's; without a bound every such step is replayed."""
    runner = make_runner(tiny_model_folder)
    graphs = record(runner, FakeGraphDevice())
    first = PagedSequence(tokens=[5] * 33, pages=list(range(9)), computed=32)
    other = PagedSequence(tokens=[5] * 33, pages=[*range(8), 9], computed=32)
    plan = make_plan([Piece(first, 1), Piece(other, 1)], 4)
    with torch.inference_mode():
        assert graphs.forward(plan) is not None
        graphs.leave_for_cascade = CascadeRule(min_reads=64)
        assert graphs.forward(plan) is None
        graphs.leave_for_cascade = CascadeRule(min_reads=65)
        assert graphs.forward(plan) is not None


def test_a_device_that_refuses_leaves_an_engine_that_computes(
    tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was recorded before is used, what was not is computed, and the log says why."""
    runner = make_runner(tiny_model_folder)
    sequences = sequences_of([9, 6, 30], 4)
    prefill(runner, sequences)
    plan = make_plan([Piece(sequences[0], 1)], 4)
    expected = runner.forward(plan).clone()
    for fails_from, sizes in ((0, ()), (1, (4,))):
        device = FakeGraphDevice(fails_from=fails_from)
        with caplog.at_level(logging.WARNING):
            graphs = record(runner, device, (1, 2, 4))
        assert graphs.sizes == sizes
        assert "not permitted when stream is capturing" in caplog.text
        torch.testing.assert_close(runner.forward(plan), expected, atol=1e-5, rtol=0)
        assert device.replays == len(sizes)


def test_recording_stops_when_memory_runs_short(tiny_model_folder: Path) -> None:
    device = FakeGraphDevice(free_bytes=MIN_FREE_BYTES + 10, bytes_each=8)
    assert record(make_runner(tiny_model_folder), device, (1, 2, 4, 8)).sizes == (4, 8)


def test_a_pool_without_a_scratch_page_is_refused(tiny_model_folder: Path) -> None:
    """Dummies would write into somebody's page."""
    with pytest.raises(ValueError, match="scratch page"):
        record(make_runner(tiny_model_folder, scratch_pages=0), FakeGraphDevice())
