"""The adapters that a worker's front knows by name: what a request's name means, and loading and unloading as operators ask for it.

A name is looked up for every request, so it must not cost a question to the engine. The front may remember the answer because every change
goes through it: changes of one name are carried out in the order in which they came, whatever becomes of the callers that asked for
them. The engine knows no more of a request's adapter than the content's digest, and refuses one that it does not have.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from prefixmesh.errors import AdapterChangedError, NotFoundError, OverloadedError
from prefixmesh.served_model import shown_name, unknown_adapter
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.messages import AdapterInfo
from prefixmesh.worker.unheard import look_at

_log = logging.getLogger(__name__)

STATE_WAIT_S: Final = 0.2
"""How long whoever describes the worker waits for the engine's newest word on its adapters. It answers between steps, which may take seconds."""

MAX_CHANGES: Final = 256
"""Changes under way or waiting for their turn: whoever asked for them may have left long ago."""

_T = TypeVar("_T")


class FrontAdapters:
    """Adapters of one engine by name; one event loop owns it. Looking up is O(1)."""

    def __init__(self, engine: EngineClient, adapters: Iterable[AdapterInfo]) -> None:
        """``adapters`` are those that the engine has at start."""
        self._engine = engine
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._turns: dict[str, asyncio.Task[Any]] = {}
        """The last change of each name that is under way; the next one begins when it is done."""

        self._changes = 0

        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Names that were unloaded and whose requests still run."""

        self._asking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._by_name)

    def names(self) -> list[str]:
        """Those that requests may name, sorted."""
        return sorted(self._by_name)

    def digest_of(self, name: str) -> str:
        """The content that a caller means; empty for the base model, whose name is empty. Raises InvalidRequestError."""
        if not name:
            return ""
        if name not in self._by_name:
            raise unknown_adapter(name)
        return self._by_name[name].digest

    def has_content(self, digest: str) -> bool:
        """Whether some name means this content. O(names)."""
        return any(adapter.digest == digest for adapter in self._by_name.values())

    def check(self, name: str, digest: str) -> None:
        """Raise AdapterChangedError unless ``name`` means the content that a router has made the namespace with."""
        known = self._by_name.get(name)
        if digest != (known.digest if known is not None else "") or bool(name) != bool(digest):
            raise AdapterChangedError(
                f"the adapter {shown_name(name)} is another one here than the router knew, or is loaded no more"
            )

    async def load(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        """``EngineClient.load_adapter``; requests that come after it mean the new content. Goes on when the caller leaves."""
        return await asyncio.shield(self._take_turn(name, self._load(name, path, pinned=pinned)))

    async def unload(self, name: str) -> None:
        """Refuse new requests by this name at once; returns when the running ones have ended. Goes on when the caller leaves, and whoever
        asks again waits for the same end. Raises NotFoundError.
        """
        await asyncio.shield(self._take_turn(name, self._unload(name)))
        if (leaving := self._leaving.get(name)) is not None:
            await asyncio.shield(leaving)

    async def list_all(self) -> tuple[AdapterInfo, ...]:
        """All of them as the engine has them after the step that it is in."""
        return await self._engine.list_adapters()

    async def recent(self) -> list[AdapterInfo]:
        """All of them, sorted: names and contents as they are now, the state of their weights as the engine told it last."""
        if self._by_name:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._learn_state())
                self._asking.add_done_callback(look_at)
            await asyncio.wait({self._asking}, timeout=STATE_WAIT_S)
        return [self._by_name[name] for name in self.names()]

    async def _load(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        adapter = await self._engine.load_adapter(name, path, pinned=pinned)
        self._by_name[name] = adapter
        _log.info("adapter_loaded name=%s digest=%s path=%r", name, adapter.digest, path)
        return adapter

    async def _unload(self, name: str) -> None:
        if self._by_name.pop(name, None) is None:
            if name not in self._leaving:
                raise NotFoundError(f"no adapter {shown_name(name)} is loaded here")
            return
        _log.info("adapter_unloading name=%s", name)
        # Not waited for within the turn: the name may be given to another adapter while requests of this one still run.
        leaving = self._leaving[name] = asyncio.create_task(self._engine.unload_adapter(name))

        def forget(ended: "asyncio.Task[None]") -> None:
            look_at(ended)
            if self._leaving.get(name) is ended:
                del self._leaving[name]

        leaving.add_done_callback(forget)

    def _take_turn(self, name: str, change: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        if self._changes >= MAX_CHANGES:
            change.close()
            raise OverloadedError(f"{MAX_CHANGES} adapters are being loaded or unloaded already")
        task = asyncio.create_task(_after(self._turns.get(name), change))
        self._turns[name] = task
        self._changes += 1

        def leave(ended: "asyncio.Task[_T]") -> None:
            self._changes -= 1
            look_at(ended)
            if self._turns.get(name) is ended:
                del self._turns[name]

        task.add_done_callback(leave)
        return task

    async def _learn_state(self) -> None:
        for told in await self._engine.list_adapters():
            known = self._by_name.get(told.name)
            if known is not None and known.digest == told.digest:  # else it has changed since
                self._by_name[told.name] = told


async def _after(before: "asyncio.Task[Any] | None", change: Coroutine[Any, Any, _T]) -> _T:
    if before is not None:
        await asyncio.wait({before})
    return await change
