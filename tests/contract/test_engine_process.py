"""The engine's process and its front: the death of either is noticed by the other at once, and nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import UnavailableError
from prefixmesh.worker.process_engine import ProcessEngine
from tests.support.scheduling import submit_command
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow  # each test starts an interpreter that imports torch

NOTICE_S = 5.0
"""Longest that a death may go unnoticed (F65); far more than it takes."""

LONG = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("engine") / "tiny")


async def test_a_killed_engine_is_noticed_at_once(model: Path) -> None:
    """F65: kill -9 raises UnavailableError in every stream and question, and sets ``closed``; nothing of it is left."""
    engine = ProcessEngine(EngineConfig(model=str(model), device="cpu", max_total_tokens=8192, threads=1))
    await engine.start()
    streams = [engine.submit(submit_command(f"k{i}", [3, 4, 5], max_tokens=LONG)) for i in range(3)]
    for stream in streams:
        await anext(stream)
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(NOTICE_S):
        for stream in streams:
            with pytest.raises(UnavailableError):
                async for _ in stream:
                    pass
        await engine.closed.wait()
        with pytest.raises(UnavailableError):
            await engine.stats()
        await engine.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(("chosen", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
async def test_the_models_threads_wait_without_spinning(
    model: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str
) -> None:
    """The engine's process is told so before torch is loaded; a choice from outside is left alone."""
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    engine = ProcessEngine(EngineConfig(model=str(model), device="cpu", max_total_tokens=64, threads=1))
    await engine.start()
    try:
        assert engine.pid is not None
        assert psutil.Process(engine.pid).environ()["OMP_WAIT_POLICY"] == expected
    finally:
        await engine.close()


FRONT = """
import asyncio, sys
from prefixmesh.config import EngineConfig
from prefixmesh.worker.process_engine import ProcessEngine

async def main():
    engine = ProcessEngine(EngineConfig(model=sys.argv[1], device="cpu", max_total_tokens=4096, threads=1))
    if sys.argv[2] == "starting":
        asyncio.get_running_loop().create_task(engine.start())
        while engine.pid is None:
            await asyncio.sleep(0.001)
    else:
        await engine.start()
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["starting", "serving"])
def test_an_engine_does_not_outlive_its_front(model: Path, when: str) -> None:
    """The front is killed with -9, also while the engine still loads; a Ctrl-C alone does not end an engine."""
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, str(model), when], stdout=subprocess.PIPE, text=True
    )
    try:
        assert front.stdout is not None
        engine = psutil.Process(int(front.stdout.readline()))
        if when == "serving":
            engine.send_signal(signal.SIGINT)
            assert engine.is_running()
    finally:
        front.kill()
        front.wait()
        assert front.stdout is not None
        front.stdout.close()
    engine.wait(NOTICE_S)
