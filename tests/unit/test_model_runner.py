"""The runner on a tiny model: what comes back, what is written, what is measured."""

from pathlib import Path

import numpy as np
import pytest
import torch

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError, DeviceLostError
from prefixmesh.model_files.source import resolve_model
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model import open_model as open_model_module
from prefixmesh.worker.model.device import resolve_device, resolve_dtype
from prefixmesh.worker.model.llama import StepTensors
from prefixmesh.worker.model.open_model import OpenedModel, open_model
from prefixmesh.worker.model.runner import ModelRunner
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support.plans import GreedyDriver, PagedSequence, Piece, make_plan


def opened(folder: Path, **settings: object) -> OpenedModel:
    engine = EngineConfig(**({"dtype": "float32", "device": "cpu", "max_total_tokens": 1024} | settings))  # type: ignore[arg-type]
    return open_model(resolve_model(str(folder)), engine)


def test_logits_come_only_for_the_rows_asked_for(tiny_model_folder: Path) -> None:
    """A chunk that samples nothing costs no logits; rows come in the plan's order, in float32."""
    runner = opened(tiny_model_folder).runner
    first = PagedSequence(tokens=[5, 6, 7], pages=[3, 9, 1])
    second = PagedSequence(tokens=[8, 9], pages=[4, 2])
    none = runner.forward(make_plan([Piece(first, 3, wants_logits=False)], 1))
    assert none.shape == (0, 512)
    both = runner.forward(make_plan([Piece(first, 3), Piece(second, 2)], 1))
    assert both.shape == (2, 512)
    assert both.dtype == torch.float32
    alone = runner.forward(make_plan([Piece(second, 2)], 1))
    torch.testing.assert_close(both[1:], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("wants_logits", [True, False])
@pytest.mark.parametrize("pages", [[30], [30, 90, 10], [30, 90, 10, 11, 70]])
def test_kv_is_written_only_where_the_plan_says(
    tiny_model_folder: Path, pages: list[int], wants_logits: bool
) -> None:
    """Every layer of the tokens' own slots, whether logits are wanted or not; other slots keep what they held, however few rows a step
    had before it was filled up."""
    runner = opened(tiny_model_folder).runner
    runner.pool.storage.fill_(3.0)
    sequence = PagedSequence(tokens=list(range(5, 5 + len(pages))), pages=pages)
    runner.forward(make_plan([Piece(sequence, len(pages), wants_logits=wants_logits)], 1))
    written = (runner.pool.storage != 3.0).flatten(3).any(-1)
    assert np.flatnonzero(written.any(1).any(0).numpy()).tolist() == sorted(pages)
    assert np.flatnonzero(written.all(1).all(0).numpy()).tolist() == sorted(pages)


def test_a_step_filled_up_gives_the_logits_of_one_that_is_not(tiny_model_folder: Path) -> None:
    """In whatever order rows come, and whichever of them are wanted."""
    runner = opened(tiny_model_folder).runner
    sequences = [
        PagedSequence(tokens=[7 + i, 9, 4], pages=[9 * i + 3, 9 * i + 1, 9 * i + 2]) for i in range(5)
    ]
    everybody = runner.forward(make_plan([Piece(sequence, 3) for sequence in sequences], 1))
    for chosen in ([2], [4, 0], [1, 3, 2]):
        for sequence in sequences:
            sequence.computed = 2
        pieces = [Piece(sequences[i], 1, wants_logits=i != 3) for i in chosen]
        expected = everybody[[i for i in chosen if i != 3]]
        torch.testing.assert_close(runner.forward(make_plan(pieces, 1)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_equal_prompts_answer_equally_cold_warm_chunked_and_batched(
    tiny_model_folder: Path, page_size: int
) -> None:
    """The answer does not depend on what else is in the batch, what was cached, or how the prompt was cut (F44, F42)."""
    runner = opened(tiny_model_folder, page_size=page_size, max_total_tokens=4096).runner
    rng = np.random.default_rng(page_size)
    prompts = [rng.integers(3, 512, length).tolist() for length in (1, 15, 16, 17, 33, 100)]
    driver = GreedyDriver(runner)
    expected = [driver.answer([prompt], 8)[0].tokens for prompt in prompts]
    for chunk, warm in ((0, 0.0), (7, 0.0), (0, 0.9), (16, 0.5)):
        assert [a.tokens for a in driver.answer(prompts, 8, chunk=chunk, warm_share=warm)] == expected


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_shared_prefix_read_once_answers_as_if_each_had_read_it(
    tiny_model_folder: Path, page_size: int
) -> None:
    """The whole model on cascades, from chunked prompts to the last token: the answers that each prompt gets alone."""
    runner = opened(tiny_model_folder, page_size=page_size, max_total_tokens=4096).runner
    rng = np.random.default_rng(page_size)
    prefix = rng.integers(3, 512, 64).tolist()
    prompts = [prefix + rng.integers(3, 512, length).tolist() for length in (1, 9, 30, 31, 2)]
    expected = [GreedyDriver(runner).answer([prompt], 8)[0].tokens for prompt in prompts]
    backend = TorchAttention(runner.config, runner.pool, CascadeRule(min_reads=1))
    runner._backend = backend
    answers = GreedyDriver(runner).answer(prompts, 8, chunk=7, shared_tokens=64)
    assert [answer.tokens for answer in answers] == expected
    assert backend._cascade is not None


def test_profile_measures_something_and_the_sums_are_told(tiny_model_folder: Path) -> None:
    """Rates are positive; progress tells the sums; the smallest pool there can be is still measured."""
    lines: list[str] = []
    model = open_model(
        resolve_model(str(tiny_model_folder)), EngineConfig(max_total_tokens=1, device="cpu"), lines.append
    )
    assert model.rates.prefill_tokens_per_s > 0
    assert model.rates.decode_step_ms > 0
    assert model.runner.pool.total_tokens == 1
    assert lines[-1] == model.sums.describe()


def test_threads_are_set_only_when_asked(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread count belongs to the whole process."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    opened(tiny_model_folder)
    opened(tiny_model_folder, threads=1)
    assert asked == [1]


@pytest.mark.parametrize(("alone_s", "few_threads"), [(1.05, 1), (1.2, 4)])
def test_few_tokens_are_computed_on_one_thread_where_that_is_as_quick(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, alone_s: float, few_threads: int
) -> None:
    """It is measured at start; larger steps, and the process after a step or a failed one, have all threads."""
    runner = opened(tiny_model_folder).runner
    threads, computing = [4], list[int]()

    def computed(plan: BatchPlan) -> torch.Tensor:
        computing.append(threads[-1])
        return torch.zeros(1, 512)

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(runner, "_computed", computed)
    monkeypatch.setattr(runner, "_least", lambda plan: alone_s if runner._few_alone else 1.0)
    rates = runner.profile()
    assert rates.decode_step_ms == (1050.0 if few_threads == 1 else 1000.0)
    computing.clear()
    tokens = PagedSequence(tokens=[5] * 5, pages=[1, 2, 3, 4, 5])
    for new in (4, 5):
        runner.forward(make_plan([Piece(tokens, new)], 1))
    assert computing == [few_threads, 4]
    monkeypatch.setattr(runner, "_computed", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.forward(make_plan([Piece(tokens, 1)], 1))
    assert threads[-1] == 4


class CountedDevice:
    """A GPU that can be waited for, and fails when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runner: ModelRunner) -> None:
        self.waits = 0
        self.broken = False
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)
        monkeypatch.setattr(runner, "_device", torch.device("cuda", 0))
        # The arrays of a step must stay where the model is.
        own = StepTensors.of
        monkeypatch.setattr(StepTensors, "of", lambda plan, _, least: own(plan, torch.device("cpu"), least))

    def _synchronize(self, device: torch.device) -> None:
        self.waits += 1
        if self.broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")


def test_a_step_that_samples_nothing_is_waited_for(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads logits waits for them; a chunk's time must not be counted as the next step's, nor its plan overwritten."""
    runner = opened(tiny_model_folder).runner
    device = CountedDevice(monkeypatch, runner)
    sequence = PagedSequence(tokens=[5, 6, 7], pages=[3, 9, 1])
    runner.forward(make_plan([Piece(sequence, 2, wants_logits=False)], 1))
    assert device.waits == 2
    sequence.computed = 2
    runner.forward(make_plan([Piece(sequence, 1)], 1))
    assert device.waits == 3


def test_a_lost_gpu_is_told_from_a_failed_step(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA repeats such an error for ever: the next step finds it, whatever call it came from."""
    runner = opened(tiny_model_folder).runner
    device = CountedDevice(monkeypatch, runner)
    device.broken = True
    with pytest.raises(
        DeviceLostError, match=r"cuda:0 is lost: CUDA error: an illegal memory access was encountered$"
    ):
        runner.forward(make_plan([Piece(PagedSequence(tokens=[5], pages=[3]), 1)], 1))


def test_a_backend_that_cannot_serve_is_refused_before_weights_are_loaded(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading may take minutes, and all that is needed to know is in the configuration."""
    monkeypatch.setattr(open_model_module, "load_weights", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"attention_backend=flashinfer cannot be used: .* not cpu"):
        opened(tiny_model_folder, attention_backend="flashinfer")


def test_devices_that_are_not_there_are_refused() -> None:
    """The message names the setting."""
    for name in ("cuda:99", "tpu", "meta"):
        with pytest.raises(ConfigError, match="device"):
            resolve_device(name)
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "avx2": True}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_follows_what_the_cpu_can_do(
    features: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 only where it is computed, not emulated; a named dtype is taken as it is."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) == expected
    assert resolve_dtype("bfloat16", cpu) == torch.bfloat16
    assert resolve_dtype("float32", cpu) == torch.float32
