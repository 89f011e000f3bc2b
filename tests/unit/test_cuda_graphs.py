"""Recording on a GPU, with the GPU's part played by stand-ins: in which order CUDA is asked, and what is recorded of a model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixmesh.worker.cascade_plan import CascadeRule
from prefixmesh.worker.model import cuda_graphs, flashinfer_attention
from prefixmesh.worker.model.cascade_bound import sharing_plan
from prefixmesh.worker.model.cuda_graphs import WARM_UPS, CudaGraphDevice, record_on_gpu
from prefixmesh.worker.model.flashinfer_attention import FlashInferAttention
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support import fake_flashinfer
from tests.support.fake_graphs import FakeGraphDevice, make_runner


class FakeCuda:
    """What ``torch.cuda`` is asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.capturing: dict[str, Any] = {}
        for name, value in {
            "graph_pool_handle": lambda: "pool",
            "Stream": lambda device: FakeStream("side", self.asked),
            "current_stream": lambda device: FakeStream("current", self.asked),
            "CUDAGraph": object,
            "stream": self._on_stream,
            "graph": self._capture,
            "mem_get_info": lambda device: (1000, 5000),
            "memory_reserved": lambda device: 700,
            "memory_allocated": lambda device: 300,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def _on_stream(self, stream: "FakeStream") -> Iterator[None]:
        self.asked.append(f"on {stream.name}")
        yield
        self.asked.append("off")

    @contextlib.contextmanager
    def _capture(self, graph: object, **options: Any) -> Iterator[None]:
        self.capturing = options
        self.asked.append("capture")
        yield
        self.asked.append("captured")


class FakeStream:
    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self._asked = name, asked

    def wait_stream(self, other: "FakeStream") -> None:
        self._asked.append(f"{self.name} waits for {other.name}")


def test_warm_ups_come_before_the_capture_on_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library does at its first use must not be recorded; both streams wait for each other; all recordings share a pool."""
    cuda = FakeCuda(monkeypatch)
    device = CudaGraphDevice(torch.device("cuda", 0))
    device.record(lambda: cuda.asked.append("compute"))
    assert cuda.asked == [
        "side waits for current",
        "on side",
        *["compute"] * WARM_UPS,
        "off",
        "current waits for side",
        "capture",
        "compute",
        "captured",
    ]
    assert cuda.capturing["pool"] == "pool"
    assert cuda.capturing["stream"].name == "side"
    assert cuda.capturing["capture_error_mode"] == "thread_local"
    assert device.free_bytes == 1000 + 700 - 300


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> FakeGraphDevice:
    device = FakeGraphDevice()
    monkeypatch.setattr(cuda_graphs, "CudaGraphDevice", lambda _: device)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(flashinfer_attention, "MAX_GRAPH_PAGES", 512)
    fake_flashinfer.install(monkeypatch)
    return device


@pytest.mark.parametrize(("gain_s", "leaves"), [(0.0, True), (1e6, False)])
def test_a_model_is_recorded_and_the_cascades_bound_is_measured_beside_it(
    tiny_model_folder: Path,
    recording: FakeGraphDevice,
    monkeypatch: pytest.MonkeyPatch,
    gain_s: float,
    leaves: bool,
) -> None:
    """What a replay saves in a step counts against a cascade, a layer's share in each layer."""
    runner = make_runner(tiny_model_folder)
    measured: list[float] = []

    def measure(make: Any, pool: Any, heads: int, lost_s: float) -> CascadeRule | None:
        assert isinstance(make(None), FlashInferAttention)
        measured.append(lost_s)
        return CascadeRule(min_reads=64) if lost_s < 1 else None

    monkeypatch.setattr(cuda_graphs, "measured_rule", measure)
    monkeypatch.setattr(runner, "replay_gain_s", lambda plan: gain_s)
    words = record_on_gpu(runner, FlashInferAttention(runner.config, runner.pool), 10)
    assert words.startswith("CUDA graphs for decode steps of 1, 2, 4, 8, 10 sequences")
    assert len(recording.recordings) == 5
    assert runner.replays
    assert runner._graphs is not None
    assert (runner._graphs.leave_for_cascade is not None) == leaves
    assert measured == [gain_s / runner.config.num_layers]


def test_too_few_sequences_to_measure_are_always_replayed(
    tiny_model_folder: Path, recording: FakeGraphDevice
) -> None:
    runner = make_runner(tiny_model_folder)
    record_on_gpu(runner, FlashInferAttention(runner.config, runner.pool), 3)
    assert runner._graphs is not None
    assert runner._graphs.leave_for_cascade is None


def test_only_flashinfers_decoding_is_recorded(tiny_model_folder: Path, recording: FakeGraphDevice) -> None:
    """The torch backend's shapes follow the lengths of the sequences; it is told, not tried."""
    runner = make_runner(tiny_model_folder)
    words = record_on_gpu(runner, TorchAttention(runner.config, runner.pool), 8)
    assert "only the flashinfer backend" in words
    assert not recording.recordings
    assert not runner.replays


def test_replaying_is_timed_against_computing(tiny_model_folder: Path, recording: FakeGraphDevice) -> None:
    """On the stand-in neither wins by much; the figure is never negative, and both ways were taken."""
    runner = make_runner(tiny_model_folder)
    record_on_gpu(runner, FlashInferAttention(runner.config, runner.pool), 8)
    replays = recording.replays
    assert replays > 0
    assert runner.replay_gain_s(sharing_plan(8, 1, 1, runner.pool.page_size)) >= 0.0
    assert recording.replays > replays
