"""The examples run as they stand."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.support.fake_inference import FakeInference

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raw_stub.py", b"The quick brown fox\n1152 prompt tokens were cached\n"),
        (
            "chat_client.py",
            b"[a poet] How long is it? -> The quick brown fox (1152/1204 cached on worker-1)\n",
        ),
    ],
)
async def test_example_prints_its_answer(name: str, expected: bytes) -> None:
    """Against a fake server, as a program of its own."""
    async with FakeInference() as fake:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLES / name),
            fake.address,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err
    assert expected in out


def test_raw_stub_stays_short() -> None:
    """It is shown in the README as what a caller without our library writes: at most 15 lines of code."""
    lines = (EXAMPLES / "raw_stub.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith(("#", '"""'))]
    assert len(code) <= 15
