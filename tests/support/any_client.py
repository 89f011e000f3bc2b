"""Both clients behind one awaited face, so that one test speaks to either."""

import asyncio
from typing import Any, Protocol

from prefixmesh.client import Answer, AsyncClient, Client, ServedModel, Started, TextDelta


class AnyStream(Protocol):
    """A stream of either client, awaited."""

    async def next(self) -> TextDelta: ...
    async def collect(self) -> Answer: ...
    async def leave(self) -> None: ...
    def cancel(self) -> None: ...
    @property
    def started(self) -> Started | None: ...
    @property
    def answer(self) -> Answer: ...


class AnyClient(Protocol):
    """Either client, awaited."""

    async def generate(self, prompt: Any, **options: Any) -> Answer: ...
    async def stream(self, prompt: Any, **options: Any) -> AnyStream: ...
    async def fork(self, context: Any, continuations: Any, **options: Any) -> list[Answer]: ...
    async def abort(self, request_id: str) -> None: ...
    async def tokenize(self, prompt: Any, **options: Any) -> tuple[int, ...]: ...
    async def list_models(self, **options: Any) -> tuple[ServedModel, ...]: ...
    async def close(self) -> None: ...


class BlockingStream:
    """Puts each blocking step in a thread, since the fake server lives on this event loop."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def next(self) -> TextDelta:
        delta: TextDelta | None = await asyncio.to_thread(next, self._stream, None)
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def collect(self) -> Answer:
        answer: Answer = await asyncio.to_thread(self._stream.collect)
        return answer

    async def leave(self) -> None:
        await asyncio.to_thread(self._stream.__exit__, None, None, None)

    def cancel(self) -> None:
        self._stream.cancel()

    @property
    def started(self) -> Started | None:
        started: Started | None = self._stream.started
        return started

    @property
    def answer(self) -> Answer:
        answer: Answer = self._stream.answer
        return answer


class BlockingClient:
    """``Client`` with each call in a thread."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._client = Client(*args, **settings)

    async def generate(self, prompt: Any, **options: Any) -> Answer:
        return await asyncio.to_thread(self._client.generate, prompt, **options)

    async def stream(self, prompt: Any, **options: Any) -> AnyStream:
        return BlockingStream(await asyncio.to_thread(self._client.stream, prompt, **options))

    async def fork(self, context: Any, continuations: Any, **options: Any) -> list[Answer]:
        return await asyncio.to_thread(self._client.fork, context, continuations, **options)

    async def abort(self, request_id: str) -> None:
        await asyncio.to_thread(self._client.abort, request_id)

    async def tokenize(self, prompt: Any, **options: Any) -> tuple[int, ...]:
        return await asyncio.to_thread(self._client.tokenize, prompt, **options)

    async def list_models(self, **options: Any) -> tuple[ServedModel, ...]:
        return await asyncio.to_thread(self._client.list_models, **options)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)


class AwaitedStream:
    """``AsyncStream`` in the words of these tests."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def next(self) -> TextDelta:
        delta: TextDelta = await anext(self._stream)
        return delta

    async def collect(self) -> Answer:
        answer: Answer = await self._stream.collect()
        return answer

    async def leave(self) -> None:
        await self._stream.__aexit__(None, None, None)

    def cancel(self) -> None:
        self._stream.cancel()

    @property
    def started(self) -> Started | None:
        started: Started | None = self._stream.started
        return started

    @property
    def answer(self) -> Answer:
        answer: Answer = self._stream.answer
        return answer


class AwaitedClient:
    """``AsyncClient`` in the words of these tests."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._client = AsyncClient(*args, **settings)
        self.generate = self._client.generate
        self.fork = self._client.fork
        self.abort = self._client.abort
        self.tokenize = self._client.tokenize
        self.list_models = self._client.list_models
        self.close = self._client.close

    async def stream(self, prompt: Any, **options: Any) -> AnyStream:
        return AwaitedStream(self._client.stream(prompt, **options))
