"""Loading, unloading and listing LoRA adapters, as a front asks its engine: what both makers of ``EngineClient`` share.

What can be refused is refused here, before the engine hears of it: a step of the engine may take longer than a caller should wait to
learn that a folder holds no adapter. The engine trusts none of it and looks for itself.
"""

import asyncio
from collections.abc import Awaitable, Callable

from prefixmesh.errors import (
    BudgetError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PrefixmeshError,
)
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import NO_LINEARS, LinearSizes
from prefixmesh.model_files.peft_adapter import check_adapter_name, inspect_adapter
from prefixmesh.worker.messages import (
    AdapterAnswer,
    AdapterCommand,
    AdapterInfo,
    ListAdapters,
    LoadAdapter,
    UnloadAdapter,
)


class AdapterCalls:
    """See the module. ``ask`` is ``EventStreams.ask``."""

    def __init__(
        self, root: str | None, ask: Callable[[Callable[[int], AdapterCommand]], Awaitable[AdapterAnswer]]
    ) -> None:
        self._root = AdapterRoot(root)
        self._ask = ask
        self.linear_sizes: LinearSizes = NO_LINEARS
        """What the engine's model has, once it has told."""

    async def load(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        """``EngineClient.load_adapter``."""
        check_adapter_name(name)
        await asyncio.to_thread(inspect_adapter, self._root, path, self.linear_sizes)
        answer = await self._ask(
            lambda question: LoadAdapter(question=question, name=name, path=path, pinned=pinned)
        )
        [adapter] = _checked(answer)
        return adapter

    async def unload(self, name: str) -> None:
        """``EngineClient.unload_adapter``."""
        check_adapter_name(name)
        _checked(await self._ask(lambda question: UnloadAdapter(question=question, name=name)))

    async def list(self) -> tuple[AdapterInfo, ...]:
        """``EngineClient.list_adapters``."""
        return _checked(await self._ask(lambda question: ListAdapters(question=question)))


def _checked(answer: AdapterAnswer) -> tuple[AdapterInfo, ...]:
    if answer.error is not None:
        raise _error(answer)
    return answer.adapters


def _error(answer: AdapterAnswer) -> PrefixmeshError:
    match answer.error:
        case "invalid":
            return InvalidRequestError(answer.field, answer.problem)
        case "not_found":
            return NotFoundError(answer.problem)
        case "over_budget":
            return BudgetError(answer.problem)
        case "overloaded":
            return OverloadedError(answer.problem)
        case _:
            return InternalError(answer.problem)
