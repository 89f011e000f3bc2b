"""Our servers as programs: started with one fleet secret, found by what they announce, and gone at the end of the test."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 120.0
"""Far more than a program takes to begin, on a machine that is busy with others."""

LISTENING = " listening on "


@dataclass(frozen=True)
class Program:
    """One that serves."""

    process: Process
    address: str
    log: Path

    async def exit_code(self) -> int:
        """Wait for its end."""
        async with asyncio.timeout(START_S):
            return await self.process.wait()


@asynccontextmanager
async def running_program(
    folder: Path, module: str, *arguments: str, name: str = "program"
) -> AsyncIterator[Program]:
    """``python -m module``, with the secret in ``folder/secret`` and its log in ``folder/name.log``; killed if it is left running."""
    log = folder / f"{name}.log"
    command = ("-m", module, "--fleet-secret-file", str(folder / "secret"), *arguments)
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=PIPE, stderr=stderr, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        assert LISTENING in line, log.read_text()
        yield Program(process, line.split(LISTENING)[1].strip(), log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
