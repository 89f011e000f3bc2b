"""How the gRPC front speaks to an engine, wherever it runs.

Two makers stand behind it: ``InProcessEngine`` (a thread) and ``ProcessEngine`` (a process of its own).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from prefixmesh.worker.messages import (
    AdapterInfo,
    Admitted,
    CacheChanges,
    Ended,
    EngineInfo,
    Refused,
    Stats,
    Submit,
    TokensOut,
)
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand

RequestEvent = Admitted | TokensOut | Ended | Refused


class EngineClient(Protocol):
    """An engine, from the front's event loop. Every method is for that loop only."""

    @property
    def closed(self) -> asyncio.Event:
        """Set when the engine is gone: closed, or dead. Its streams have been told by then."""
        ...

    def watch_cache(self, listener: Callable[[CacheChanges], None]) -> None:
        """Have ``listener`` told of everything that happens to the cache, in order. Call it before ``start``, so that nothing is missed;
        there is one listener."""
        ...

    async def start(self) -> EngineInfo:
        """Load the model and begin to serve. Raises ConfigError, ModelFileError or InternalError as the engine did."""
        ...

    def submit(self, command: Submit) -> AsyncGenerator[RequestEvent, None]:
        """The events of one request, up to ``Ended`` or ``Refused``; it is sent at the first ``__anext__``.

        Closing the generator earlier (``aclose``, or cancelling its reader) aborts the request. Raises UnavailableError when
        the engine is or becomes gone, OverloadedError when it cannot even take the request.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends in ``Ended(reason="aborted")``. Unknown ids are ignored."""
        ...

    async def stats(self) -> Stats:
        """The engine's state after the step it is in."""
        ...

    async def flush(self) -> None:
        """Empty the prefix cache; returns when it is done."""
        ...

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> AdapterInfo:
        """Make the LoRA adapter in the folder ``path``, relative to the adapter root, known under ``name``.

        What is malformed, outside the root or does not fit the model is refused at once, whatever the engine is computing:
        InvalidRequestError, with the field ``name``, ``path`` or ``pinned``. BudgetError when there is no room for one more name, or
        for one more pin; OverloadedError when too many are being loaded. Takes the time of reading all its bytes once.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget a name; new requests by its digest are refused at once. Returns when those that had it have ended. NotFoundError."""
        ...

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """All names, sorted, after the step the engine is in."""
        ...

    async def ask_prefix(self, make: Callable[[int], PrefixCommand]) -> PrefixAnswer:
        """The answer to the command that ``make`` makes with a number. What is refused says so in the answer. Raises UnavailableError when the
        engine is or becomes gone."""
        ...

    async def close(self) -> None:
        """End the engine and all its streams. May be called again."""
        ...
