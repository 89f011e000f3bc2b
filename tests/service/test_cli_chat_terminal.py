"""``prefixmesh chat`` at a real (pseudo) terminal: the prompt, errors that do not end the chat, Ctrl-C and Ctrl-D."""

import asyncio
import os
import pty
import select
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

import pytest

from prefixmesh.errors import OverloadedError
from tests.support.fake_inference import FakeInference

WAIT_S = 20
CTRL_C, CTRL_D = b"\x03", b"\x04"
CHAT = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the session's own terminal, so that its Ctrl-C is a signal
from prefixmesh.cli.main import main
main()
"""


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(self, process: Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    async def until(self, text: bytes) -> bytes:
        """What is shown up to ``text``; the rest is left for the next call."""
        async with asyncio.timeout(WAIT_S):
            while text not in self._seen:
                await self._read()
        shown, _, self._seen = self._seen.partition(text)
        return shown

    async def press_until(self, keys: bytes, text: bytes) -> None:
        """Press keys until ``text`` is shown. A signal that comes between the prompt and the system's wait for a key is only
        noticed at the next key: a person presses again, after a second of silence."""
        async with asyncio.timeout(WAIT_S):
            self.type(keys)
            while text not in self._seen:
                if not await self._read():
                    self.type(keys)
        self._seen = self._seen.partition(text)[2]

    async def _read(self) -> bool:
        """Take in what comes next; False after a second of silence."""
        is_readable = await asyncio.to_thread(self._is_readable_within, 1.0)
        if is_readable:
            self._seen += os.read(self._descriptor, 4096)
        return is_readable

    def _is_readable_within(self, wait_s: float) -> bool:
        return bool(select.select([self._descriptor], [], [], wait_s)[0])


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference() as server:
        yield server


@pytest.fixture
async def terminal(fake: FakeInference) -> AsyncIterator[Terminal]:
    outer, inner = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", CHAT, "chat", "--address", fake.address),
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    os.close(inner)
    yield Terminal(process, outer)
    if process.returncode is None:
        process.kill()
        await process.wait()
    os.close(outer)


async def test_chat_at_a_terminal(fake: FakeInference, terminal: Terminal) -> None:
    """A failed turn is told and forgotten; escape sequences are taken out; a mistyped command goes to nobody; Ctrl-C at the
    prompt explains; Ctrl-D ends."""
    await terminal.until(b"> ")
    fake.error = OverloadedError("queue full")
    terminal.type(b"one\r")
    await terminal.until(b"Error: queue full")
    await terminal.until(b"> ")
    fake.error, fake.words = None, ("\x1b]0;owned\x07", "fine")
    terminal.type(b"two\r")
    assert b"\x1b]0;" not in await terminal.until(b"]0;ownedfine")
    await terminal.until(b"cached 1,152/1,204")
    await terminal.until(b"> ")
    terminal.type(b"/help\r")
    await terminal.until(b"there is no /help: /new begins anew, /quit ends")
    await terminal.until(b"> ")
    await terminal.press_until(CTRL_C, b"/quit or Ctrl-D ends")
    await terminal.until(b"> ")
    terminal.type(CTRL_D)
    assert await asyncio.wait_for(terminal.process.wait(), WAIT_S) == 0
    assert [[m.content for m in request.chat.messages] for request in fake.requests] == [["one"], ["two"]]


async def test_ctrl_c_at_a_terminal_stops_the_answer(fake: FakeInference, terminal: Terminal) -> None:
    """The prompt comes back and the server has been told (F17)."""
    fake.hold_after = 1
    await terminal.until(b"> ")
    terminal.type(b"one\r")
    await terminal.until(b"The")
    terminal.type(CTRL_C)
    await terminal.until(b"stopped")
    await terminal.until(b"> ")
    await asyncio.wait_for(fake.cancelled.wait(), WAIT_S)
