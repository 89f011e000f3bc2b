"""Requests sent at a fixed rate, whatever becomes of them, and what became of each: who answered, when, what, or which error.

The load is open: a fleet that slows down is sent no less. What each answer must be is known, so that a token that is lost, repeated or
another's is seen as such.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from prefixmesh.client import AsyncClient, GenerateOptions, TokenPrompt
from prefixmesh.client.aio import AsyncStream
from prefixmesh.errors import PrefixmeshError
from prefixmesh.tokens import pack

LEAST_ID: Final = 100
"""Below it are a vocabulary's special tokens."""

START_LOOK_S: Final = 0.004
"""How often it is looked whether a stream was begun with: well within the prefill of a long prompt."""


class Output(NamedTuple):
    """One answer."""

    tokens: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Sent:
    """One request and what became of it. Times are of the monotonic clock, in seconds."""

    prompt: Sequence[int]
    max_tokens: int
    deadline_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    """When its first token came; 0 before."""

    last_s: float = 0.0
    """When its last piece came."""

    longest_gap_s: float = 0.0
    """Between two pieces."""

    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    """In the order in which they came, of all branches."""

    outputs: tuple[Output, ...] = ()
    """By branch, once all is whole."""

    worker: str = ""
    """Who began with it."""

    request_id: str = ""
    cached_tokens: int = 0
    interruptions: int = 0
    is_whole: bool = False
    error: Exception | None = None

    @property
    def took_s(self) -> float:
        """From sending to its end, whichever."""
        return self.ended_s - self.sent_s

    def note_piece(self, now: float) -> None:
        """The next piece has come."""
        self.first_s = self.first_s or now
        self.longest_gap_s = max(self.longest_gap_s, now - (self.last_s or now))
        self.last_s = now

    def __repr__(self) -> str:
        what = f"{type(self.error).__name__}: {self.error}" if self.error else f"{len(self.tokens)} tokens"
        return f"<{self.request_id} on {self.worker} after {self.took_s:.2f} s: {what}>"


async def run(
    client: AsyncClient,
    sent: Sent,
    seen: Callable[[Sent], None] = lambda _: None,
    options: GenerateOptions | None = None,
) -> Sent:
    """Send the request and read it to its end; ``seen`` is called after every piece. Never raises what the request ended with."""
    sent.sent_s = time.monotonic()
    prompt = TokenPrompt(pack(sent.prompt))
    settings: GenerateOptions = {"temperature": 0.0, "ignore_eos": True, "max_tokens": sent.max_tokens}
    settings.update(options or {})
    try:
        async with client.stream(prompt, timeout_s=sent.deadline_s, **settings) as stream:
            await _read(stream, sent, seen)
    except PrefixmeshError as error:
        sent.error = error
    finally:
        sent.ended_s = time.monotonic()
    return sent


async def _read(stream: AsyncStream, sent: Sent, seen: Callable[[Sent], None]) -> None:
    watching = asyncio.create_task(_note_start(stream, sent, seen))
    try:
        async for delta in stream:
            sent.note_piece(time.monotonic())
            sent.tokens += delta.token_ids
            _note_worker(stream, sent)
            seen(sent)
        answer = stream.answer
        _note_worker(stream, sent)
        sent.is_whole, sent.cached_tokens = True, answer.cached_tokens
        sent.outputs = tuple(Output(branch.token_ids, branch.text) for branch in answer.branches)
        sent.interruptions = answer.interruptions
    finally:
        watching.cancel()


async def _note_start(stream: AsyncStream, sent: Sent, seen: Callable[[Sent], None]) -> None:
    """That it was begun with is told in no delta: it is looked for until it is so."""
    while stream.started is None:  # noqa: ASYNC110  a stream tells it in no other way
        await asyncio.sleep(START_LOOK_S)
    _note_worker(stream, sent)
    seen(sent)


def _note_worker(stream: AsyncStream, sent: Sent) -> None:
    started = stream.started
    if started is not None and not sent.request_id:
        sent.worker, sent.request_id = started.worker_id, started.request_id


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts that share prefixes: ``prefixes`` of them, each of ``prefix_tokens`` tokens, with ``tail_tokens`` of the prompt's own."""

    vocab_size: int
    prefixes: int = 4
    prefix_tokens: int = 512
    tail_tokens: int = 64
    max_tokens: int = 32
    deadline_s: float = 30.0
    seed: int = 6

    def prompt(self, index: int) -> list[int]:
        """The same for the same index."""
        which = random.Random(f"{self.seed}/{index}").randrange(self.prefixes)
        prefix = self._draw(f"{self.seed}/prefix/{which}", self.prefix_tokens)
        return prefix + self._draw(f"{self.seed}/tail/{index}", self.tail_tokens)

    def request(self, index: int) -> Sent:
        """Not sent yet."""
        return Sent(self.prompt(index), self.max_tokens, self.deadline_s)

    def _draw(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(range(LEAST_ID, self.vocab_size), k=count)


class OpenLoad:
    """Requests at ``per_s``, from ``start`` to ``stop``."""

    def __init__(
        self, clients: Sequence[AsyncClient], workload: Workload, per_s: float, first_index: int = 0
    ) -> None:
        """The clients take turns."""
        self.requests: list[Sent] = []
        self._clients = clients
        self._workload = workload
        self._interval_s = 1.0 / per_s
        self._next_index = first_index
        self._running: list[asyncio.Task[Sent]] = []
        self._sending: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to send."""
        self._sending = asyncio.create_task(self._send())

    async def stop(self) -> list[Sent]:
        """Send no more, and wait until every request has ended; all of them."""
        assert self._sending is not None
        self._sending.cancel()
        await asyncio.wait({self._sending})
        await asyncio.gather(*self._running)
        return self.requests

    async def _send(self) -> None:
        due = time.monotonic()
        while True:
            client = self._clients[len(self.requests) % len(self._clients)]
            request = self._workload.request(self._next_index)
            self._next_index += 1
            self.requests.append(request)
            self._running.append(asyncio.create_task(run(client, request)))
            due += self._interval_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
