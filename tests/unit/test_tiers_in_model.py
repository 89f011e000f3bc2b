"""A model with a host tier: what is opened with it, and steps that compute while what they read is on its way."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError, LoadBackError
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.model.open_model import OpenedModel, open_model
from prefixmesh.worker.tiers.copies import CopyJob, CopyKind
from prefixmesh.worker.tiers.host_pool import HostPool
from prefixmesh.worker.tiers.row_copies import RowCopies
from prefixmesh.worker.tiers.thread_mover import ThreadMover
from tests.support.fake_graphs import FakeGraphDevice, TorchGraphAttention, make_runner
from tests.support.movers import WAIT_S, SteppedCopies, outcomes, pages_of
from tests.support.plans import PagedSequence, Piece, make_plan

PREFIX = [5, 6, 7, 8, 9, 10, 11, 12]
PAGES = [7, 2]
"""Of 4 tokens each, where the prefix is; the next tokens go to page 5."""


class Loaded:
    """A model whose prefix was computed, backed up, and is no more on the device."""

    def __init__(self, folder: Path) -> None:
        self.runner = make_runner(folder)
        pool = self.runner.pool
        self.layers = pool.num_layers
        sequence = PagedSequence(tokens=PREFIX, pages=PAGES)
        self.runner.forward(make_plan([Piece(sequence, len(PREFIX))], pool.page_size))
        self.copies = SteppedCopies(RowCopies(pool, HostPool(pool, 4)))
        self.mover = ThreadMover(self.copies)
        pool.arrivals = self.mover
        self.copies.let()
        self.mover.start(self.job(1, "offload"))
        self.copies.wait_asked()
        assert [outcome.error for outcome in outcomes(self.mover, 1)] == [""]

    def job(self, number: int, kind: CopyKind) -> CopyJob:
        return CopyJob(number=number, kind=kind, device_pages=pages_of(*PAGES), host_pages=pages_of(3, 1))

    def forget(self) -> None:
        """The device's copy is worse than gone."""
        self.runner.pool.storage[:, :, PAGES] = torch.nan

    def step(self, *tokens: int, wants_logits: bool = True) -> torch.Tensor:
        """The next tokens after the prefix."""
        sequence = PagedSequence(tokens=[*PREFIX, *tokens], pages=[*PAGES, 5], computed=len(PREFIX))
        piece = Piece(sequence, len(tokens), wants_logits=wants_logits)
        return self.runner.forward(make_plan([piece], self.runner.pool.page_size)).clone()


@pytest.fixture
def loaded(tiny_model_folder: Path) -> Iterator[Loaded]:
    model = Loaded(tiny_model_folder)
    yield model
    model.copies.let_all()
    model.mover.close()


@pytest.mark.parametrize("wants_logits", [True, False])
def test_a_step_computes_with_the_first_layers_while_the_last_are_on_their_way(
    loaded: Loaded, wants_logits: bool
) -> None:
    """Layer by layer it waits, and ends with all of them; the same logits as with KV that never left."""
    expected = loaded.step(20, 21, 22, wants_logits=wants_logits)
    kv = loaded.runner.pool.storage.clone()
    loaded.forget()
    loaded.mover.start(loaded.job(2, "restore"))
    loaded.mover.expect([2], WAIT_S)
    found: list[torch.Tensor] = []
    step = threading.Thread(target=lambda: found.append(loaded.step(20, 21, 22, wants_logits=wants_logits)))
    step.start()
    for _ in range(loaded.layers):
        loaded.copies.wait_asked()
        assert found == []
        loaded.copies.let()
    step.join(WAIT_S)
    assert loaded.mover.layers_done(2) == loaded.layers
    assert torch.equal(found[0], expected)
    assert torch.equal(loaded.runner.pool.storage, kv)


def test_a_step_is_void_when_a_layer_does_not_come_and_can_be_computed_again(loaded: Loaded) -> None:
    """Only its own slots were written; once the copy has ended the same step gives what it should."""
    expected = loaded.step(20, 21)
    loaded.forget()
    before = loaded.runner.pool.storage.clone()
    loaded.mover.start(loaded.job(2, "restore"))
    loaded.mover.expect([2], 0.0)
    with pytest.raises(LoadBackError, match="layer 0"):
        loaded.step(20, 21)
    untouched = [page for page in range(before.shape[2]) if page not in (5, *PAGES)]
    assert torch.equal(loaded.runner.pool.storage[:, :, untouched], before[:, :, untouched])
    loaded.copies.let_all()
    loaded.mover.wait_done(WAIT_S)
    loaded.mover.expect([2], 0.0)
    assert torch.equal(loaded.step(20, 21), expected)


def test_a_recorded_step_is_replayed_when_all_layers_have_come(loaded: Loaded) -> None:
    """It cannot ask for one after the other: it waits for all of them first, and does nothing when they do not come."""
    runner = loaded.runner
    device = FakeGraphDevice()
    runner.record_decodes(TorchGraphAttention(runner.config, runner.pool), device, [1])
    expected = loaded.step(20)
    assert device.replays == 1
    loaded.forget()
    before = runner.pool.storage.clone()
    loaded.mover.start(loaded.job(2, "restore"))
    loaded.mover.expect([2], 0.0)
    with pytest.raises(LoadBackError):
        loaded.step(20)
    assert device.replays == 1
    assert torch.equal(runner.pool.storage.nan_to_num(9.0), before.nan_to_num(9.0))
    loaded.mover.expect([2], WAIT_S)
    found: list[torch.Tensor] = []
    step = threading.Thread(target=lambda: found.append(loaded.step(20)))
    step.start()
    for _ in range(loaded.layers):
        loaded.copies.wait_asked()
        assert device.replays == 1
        loaded.copies.let()
    step.join(WAIT_S)
    assert device.replays == 2
    assert torch.equal(found[0], expected)


def opened(folder: Path, **settings: object) -> OpenedModel:
    engine = EngineConfig(**({"dtype": "float32", "device": "cpu", "max_total_tokens": 256} | settings))  # type: ignore[arg-type]
    return open_model(resolve_model(str(folder)), engine)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_model_opens_with_its_host_tier_and_what_it_was_measured_to_do(
    tiny_model_folder: Path, page_size: int
) -> None:
    nudged = threading.Event()
    engine = EngineConfig(
        dtype="float32", device="cpu", max_total_tokens=256, page_size=page_size, hicache_ratio=1.5
    )
    model = open_model(resolve_model(str(tiny_model_folder)), engine, on_copied=nudged.set)
    assert model.host is not None
    assert model.mover is not None
    assert model.load_back_ms_per_token is not None
    assert model.host.num_pages == model.sums.host_pages == 384 // page_size
    assert model.mover.page_bytes == model.host.page_bytes == page_size * model.sums.kv_per_token
    assert 0.0 < model.load_back_ms_per_token < 1e3
    assert not nudged.is_set()  # measuring is nobody's copy
    assert model.mover.take_done() == []
    assert model.runner.pool.arrivals is model.mover
    model.mover.start(CopyJob(number=0, kind="restore", device_pages=pages_of(1), host_pages=pages_of(2)))
    assert nudged.wait(WAIT_S)
    model.mover.close()


def test_without_a_host_tier_nothing_of_it_is_there(tiny_model_folder: Path) -> None:
    model = opened(tiny_model_folder)
    assert (model.host, model.mover, model.load_back_ms_per_token) == (None, None, None)
    assert model.runner.pool.arrivals is None
    assert model.sums.host_pages == 0


def test_a_host_tier_that_does_not_fit_is_refused_with_the_sums(tiny_model_folder: Path) -> None:
    """F55, on this machine's own memory."""
    with pytest.raises(
        ConfigError,
        match=r"do not fit: weights .* \+ KV .* \+ host tier .* \+ staging .* hicache_size=1e\+06",
    ):
        opened(tiny_model_folder, hicache_size=1e6)


def test_memory_that_cannot_be_copied_is_refused_at_start(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RowCopies, job: CopyJob) -> Iterator[None]:
        raise RuntimeError("a bus without a driver")

    monkeypatch.setattr(RowCopies, "bring", fail)
    with pytest.raises(ConfigError, match=r"host tier cannot be used: .* a bus without a driver"):
        opened(tiny_model_folder, hicache_ratio=1.0)
