"""The GPU check, tried on a CPU at small sizes: what it records, what it says where it cannot run, and how it ends."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixmesh.bench import gpu_check, gpu_measure
from prefixmesh.bench.gpu_check import EXIT_FAILED, EXIT_NO_GPU, ON_A_CPU
from prefixmesh.bench.gpu_measure import NotRunError
from prefixmesh.bench.gpu_record import GpuRecord, Part
from prefixmesh.worker.model import flashinfer_attention
from prefixmesh.worker.model.torch_attention import TorchAttention
from tests.support import fake_flashinfer

CPU = torch.device("cpu")


def check(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = gpu_check.main(["--device", "cpu", "--no-tests", "--out", str(out), *arguments])
    return code, json.loads((out / "gpu_check.json").read_text())


def test_on_a_cpu_it_records_what_ran_and_why_the_rest_did_not(tmp_path: Path) -> None:
    """The whole of it but the tests; what needs a GPU is told, and is no failure."""
    code, record = check(tmp_path)
    assert code == 0
    parts = {part["name"].split(":")[1].split(",")[0].strip(): part for part in record["parts"]}
    agree, attention, decoding, prefill, copies = parts.values()
    assert agree["status"] == "not run"
    assert "CUDA device" in agree["note"]
    assert [part["status"] for part in (attention, decoding, prefill, copies)] == ["ran"] * 4
    assert {row["page size"] for row in attention["figures"]} == {1, 16}
    assert all(row["plain ms"] > 0 and row["cascade ms"] > 0 for row in attention["figures"])
    assert [row["sequences"] for row in decoding["figures"]] == list(ON_A_CPU.batches)
    assert all(row["computed tokens/s"] > 0 and row["replayed ms"] is None for row in decoding["figures"])
    assert prefill["figures"][0]["tokens/s"] > 0
    assert len(copies["figures"]) == 8
    assert all(row["GB/s"] > 0 and row["of a plain copy"] > 0 for row in copies["figures"])
    assert record["machine"]["torch"] == torch.__version__
    written = (tmp_path / "gpu_check.md").read_text()
    assert "| sequences | computed ms |" in written
    assert "not run" in written


def test_without_a_gpu_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own exit code, and no record that could be taken for one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "none")]) == EXIT_NO_GPU
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_part_that_goes_wrong_fails_the_check_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_check, "cascade_gain", broken)
    code, record = check(tmp_path)
    assert code == EXIT_FAILED
    assert [part["status"] for part in record["parts"]] == ["not run", "failed", "ran", "ran", "ran"]
    assert record["parts"][1]["note"] == "RuntimeError: out of memory"


def test_nothing_begins_once_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "BUDGET_S", 0.0)
    code, record = check(tmp_path)
    assert code == 0
    assert {part["status"] for part in record["parts"]} == {"not run"}


def test_backends_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in for the library, which is exact: then on one that is not."""
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(gpu_measure, "unsupported", lambda *_: "")
    sizes = replace(ON_A_CPU, shared_tokens=32)
    rows = gpu_measure.compare_backends(sizes, CPU)
    assert [(row["plan"], row["page size"]) for row in rows] == [
        ("decode", 1),
        ("cascade", 1),
        ("decode", 16),
        ("cascade", 16),
    ]
    assert max(row["largest difference"] for row in rows) < 1e-5
    exact = TorchAttention.forward
    for wrong in (lambda out: out + 0.1, lambda out: out * torch.nan):
        monkeypatch.setattr(TorchAttention, "forward", lambda *a, f=wrong: f(exact(*a)))
        with pytest.raises(ValueError, match="outputs differ"):
            gpu_measure.compare_backends(sizes, CPU)


@pytest.mark.parametrize(
    ("output", "code", "problem"),
    [
        ("12 passed, 3 skipped in 2.0s", 0, ""),
        ("15 skipped in 2.0s", 0, "all skipped"),
        ("1 failed, 14 passed in 2.0s", 1, "1 failed"),
        ("nothing at all", 5, "nothing at all"),
    ],
)
def test_the_tests_are_judged_by_what_they_say(
    output: str, code: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped ones have shown nothing; a failed one fails the check."""
    done = subprocess.CompletedProcess[str]([], code, stdout=output + "\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    if not problem:
        assert gpu_check._run_tests(tmp_path, 10.0) == output
        return
    with pytest.raises(ValueError if code else NotRunError, match=problem):
        gpu_check._run_tests(tmp_path, 10.0)


def test_tests_that_are_not_there_or_take_too_long_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotRunError, match="no folder"):
        gpu_check._run_tests(tmp_path / "none", 10.0)

    def slow(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 10.0)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(NotRunError, match="cut off after 10 s"):
        gpu_check._run_tests(tmp_path, 10.0)
    with pytest.raises(NotRunError, match="pip took more than"):
        gpu_check._install()


def test_a_library_that_cannot_be_fetched_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess[str]([], 1, stdout="", stderr="No matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(NotRunError, match="No matching distribution"):
        gpu_check._install()


def test_a_record_reads_the_same_as_data_and_as_text() -> None:
    part = Part(
        name="decode", status="ran", seconds=1.25, figures=({"n": 8, "tokens/s": 12345.6, "x": None},)
    )
    record = GpuRecord(machine={"GPU": "H200"}, parts=[part])
    assert json.loads(record.to_json())["parts"][0]["figures"] == [{"n": 8, "tokens/s": 12345.6, "x": None}]
    assert record.to_markdown() == (
        "Machine: GPU H200.\n\n**decode**: ran (1.2 s).\n\n| n | tokens/s | x |\n| --- | --- | --- |\n| 8 | 12,346 |  |\n"
    )
    assert not record.failed
