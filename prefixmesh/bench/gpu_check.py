"""``scripts/gpu_check``: everything that only a GPU can show, in one run of under 5 minutes, as one record. Without Ray.

Compares the attention backends, measures what a cascade and what recorded decode steps gain, and how fast KV moves between the tiers, and
runs the tests marked ``gpu``. A part that cannot run here says why and does not fail the check; one that goes wrong does. Exit code 0: all
that ran is well; 1: something is wrong; 2: no CUDA device, nothing was run. ``--device cpu`` runs the same code small on a CPU: it tries the
check, not the machine.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import torch

from prefixmesh.bench.gpu_copies import copy_rates
from prefixmesh.bench.gpu_measure import (
    NotRunError,
    Sizes,
    cascade_gain,
    compare_backends,
    decode_speed,
    prefill_speed,
)
from prefixmesh.bench.gpu_model import LARGE, SMALL, TINY
from prefixmesh.bench.gpu_record import GpuRecord, Part, Status
from prefixmesh.worker.model.device import make_current, resolve_device

BUDGET_S: Final = 290.0
"""All of it, the tests last, which get what is left. FlashInfer's kernels, compiled at their first use, count."""

INSTALL_S: Final = 60.0
FLASHINFER: Final = "flashinfer-python>=0.6,<1"

EXIT_FAILED: Final = 1
EXIT_NO_GPU: Final = 2

ON_A_GPU: Final = Sizes(
    shape=SMALL,
    requests=32,
    shared_tokens=2048,
    own_tokens=64,
    page_sizes=(1, 16),
    batches=(1, 8, 32, 64),
    context=512,
    prompt_tokens=2048,
    repeats=10,
)
ON_A_CPU: Final = replace(
    ON_A_GPU,
    shape=TINY,
    requests=4,
    shared_tokens=64,
    own_tokens=16,
    batches=(1, 3),
    context=32,
    prompt_tokens=64,
    repeats=2,
)
LARGE_NEEDS_BYTES: Final = 40 * 2**30
"""The larger model, 16 GiB of it, is measured where so much memory is free."""

Figures = tuple[list[dict[str, Any]], str]
"""Rows, and what they mean."""


class _Check:
    """Runs parts into a record, each within what is left of the time."""

    def __init__(self, machine: dict[str, Any]) -> None:
        self.record = GpuRecord(machine=machine)
        self._started = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return BUDGET_S - (time.monotonic() - self._started)

    def part(self, name: str, measure: Callable[[], Figures]) -> None:
        """Run one part, whatever becomes of it."""
        started = time.monotonic()
        status: Status = "ran"
        note = ""
        rows: list[dict[str, Any]] = []
        try:
            if self.left_s <= 0:
                raise NotRunError(f"the {BUDGET_S:.0f} s were over")
            rows, note = measure()
        except NotRunError as error:
            status, note = "not run", str(error)
        except Exception as error:
            status, note = "failed", f"{type(error).__name__}: {error}"
        part = Part(
            name=name,
            status=status,
            seconds=round(time.monotonic() - started, 1),
            note=note,
            figures=tuple(rows),
        )
        self.record.parts.append(part)
        click.echo(f"{part.status:8} {part.seconds:6.1f} s  {part.name}  {part.note}")


def main(arguments: list[str] | None = None) -> int:
    """Check, write ``gpu_check.json`` and ``gpu_check.md``, and return the exit code."""
    options = _parser().parse_args(arguments)
    on_cpu = options.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        click.echo("gpu_check: torch finds no CUDA device here: nothing was run", err=True)
        return EXIT_NO_GPU
    device = resolve_device(options.device)
    make_current(device)
    check = _Check(_machine(device))
    if options.install:
        check.part("flashinfer installed", lambda: ([], _install()))
    sizes = ON_A_CPU if on_cpu else ON_A_GPU
    _measure(check, sizes, device)
    if not on_cpu and torch.cuda.mem_get_info(device)[0] > LARGE_NEEDS_BYTES:
        _measure(check, replace(sizes, shape=LARGE, page_sizes=(16,)), device)
    if options.tests:
        check.part("tests marked gpu", lambda: ([], _run_tests(options.tests, check.left_s)))
    _write(check.record, options.out)
    return EXIT_FAILED if check.record.failed else 0


def _measure(check: _Check, sizes: Sizes, device: torch.device) -> None:
    name = sizes.shape.name
    requests = f"{sizes.requests} requests over {sizes.shared_tokens} shared tokens"
    check.part(f"{name}: backends agree, {requests}", lambda: (compare_backends(sizes, device), ""))
    check.part(f"{name}: attention of a decode step, {requests}", lambda: (cascade_gain(sizes, device), ""))
    check.part(f"{name}: decoding at {sizes.context} tokens", lambda: decode_speed(sizes, device))
    check.part(f"{name}: prefill", lambda: (prefill_speed(sizes, device), ""))
    check.part(f"{name}: copies between the tiers", lambda: (_copies(sizes, device), ""))


def _copies(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    options: dict[str, Any] = {"tokens": sizes.prompt_tokens, "repeats": sizes.repeats}
    return [
        row for size in sizes.page_sizes for row in copy_rates(sizes.shape, size, dtype, device, **options)
    ]


def _machine(device: torch.device) -> dict[str, Any]:
    machine: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "GPU": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory GiB": round(properties.total_memory / 2**30),
            "CUDA": torch.version.cuda,
        }
    else:
        machine["note"] = "a CPU at small sizes: the figures say nothing"
    return machine | {
        "torch": torch.__version__,
        "flashinfer": _version("flashinfer-python"),
        "prefixmesh": _version("prefixmesh"),
        "python": platform.python_version(),
        "CPUs": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _install() -> str:
    """Try to fetch the library; where that is not possible all else is still checked."""
    command = [sys.executable, "-m", "pip", "install", "-q", FLASHINFER]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotRunError(f"pip took more than {INSTALL_S:.0f} s") from error
    if done.returncode:
        raise NotRunError(f"pip could not install it: {done.stderr.strip()[-200:]}")
    return _version("flashinfer-python")


def _run_tests(folder: Path, limit_s: float) -> str:
    """The tests' closing line. ValueError when one fails, NotRunError when none is there or the time is over."""
    if not folder.is_dir():
        raise NotRunError(f"there is no folder {folder}: run this from a checkout")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotRunError(f"cut off after {limit_s:.0f} s: run `pytest -m gpu {folder}` by itself") from error
    lines = [
        line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)
    ]
    summary = lines[-1].strip("= ") if lines else (done.stderr or done.stdout).strip()[-300:]
    if done.returncode:
        raise ValueError(f"{summary}: {done.stdout[-1500:]}")
    if "passed" not in summary:
        raise NotRunError(f"all skipped: {summary}")
    return summary


def _write(record: GpuRecord, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_check.json").write_text(record.to_json() + "\n")
    (folder / "gpu_check.md").write_text(record.to_markdown())
    click.echo(f"written to {folder}/gpu_check.json and gpu_check.md")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="auto", help="cuda:N, or cpu to try the check itself at small sizes"
    )
    parser.add_argument("--out", type=Path, default=Path("dist/gpu_check"), help="folder for the record")
    parser.add_argument(
        "--tests", type=Path, default=Path("tests/gpu"), help="folder of the tests marked gpu"
    )
    parser.add_argument("--no-tests", dest="tests", action="store_const", const=None, help="only measure")
    parser.add_argument(
        "--install", action="store_true", help=f"pip install '{FLASHINFER}' first, if possible"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
