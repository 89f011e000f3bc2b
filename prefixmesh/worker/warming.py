"""Making a prefix warm on this worker: pin it, if that is asked for, bring what others have of it, and compute the rest.

The pin comes first. It is a wish, which costs nothing but its place in the budget, and what is brought or computed after it is held from the
moment at which it is there: nothing can evict it in between. What is computed is an ordinary request, which asks for no token of an answer; it
comes after whatever callers ask for, pays with the pin's owner, and counts among nobody's requests.

A call that fails, or whose caller leaves, lets go of the pin that it has made; of one that was there before it has only begun the time anew.
Nothing is kept here that the engine has not, but for which pins the calls under way have made.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from prefixmesh.cache.tier import Tier
from prefixmesh.errors import InternalError, NotFoundError, OverloadedError
from prefixmesh.ids import RequestId, TenantId
from prefixmesh.kv_source import KvSource
from prefixmesh.requests import MAX_PRIORITY
from prefixmesh.tokens import count as count_tokens
from prefixmesh.worker.ended_errors import problem_of, refusal_of
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.front_adapters import FrontAdapters
from prefixmesh.worker.messages import Admitted, Ended, EngineSampling, Refused, Submit
from prefixmesh.worker.prefix_calls import ask
from prefixmesh.worker.prefix_messages import (
    KvWritten,
    ListPins,
    PinPrefix,
    PrefixAnswer,
    PrefixName,
    UnpinPrefix,
    WriteKv,
)
from prefixmesh.worker.running_calls import RunningCalls
from prefixmesh.worker.unheard import look_at
from prefixmesh.worker.warm_metrics import WarmedTokens, WarmMetrics
from prefixmesh.worker.warm_order import PinOrder, WarmOrder

MAX_WARMS: Final = 2
"""Prefixes that are brought or computed at once. Each takes its part of every step's tokens while it lasts: more would end no sooner together,
and callers would wait longer."""

MAX_WAITING_WARMS: Final = 64
"""Calls that wait for their turn; whoever sends more at once does so again later."""

WARM_PRIORITY: Final = -MAX_PRIORITY - 1
"""Below whatever a caller may ask for: where the worker schedules by priority it goes last, and of a full queue it is put out first."""

HOST_WAIT_S: Final = 5.0
"""How long a pin of the host tier is waited for once its KV is on the device. Its copy goes on all the same."""

HOST_LOOK_S: Final = 0.02
"""Between two looks at it."""

_ID_PREFIX: Final = "warm-"
"""Of the requests' ids: callers' are of hexadecimal digits, or made by a router."""

_NO_TENANT: Final = TenantId("")
"""Whose calls these are: nobody's, so that nobody can abort them."""

_S_TO_MS: Final = 1e3

_NO_ANSWER: Final = EngineSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=0, stop_token_ids=()
)


class Brought(Protocol):
    """What copying came to (``kv_copies.copier``)."""

    @property
    def copied(self) -> int:
        """Tokens that came from other workers."""
        ...

    @property
    def problem(self) -> str:
        """Why a source that was tried did not give all; empty where none was, or did."""
        ...


class Bringer(Protocol):
    """Who copies KV from other workers (``kv_copies.copier``)."""

    async def bring(
        self, prefix: PrefixName, sources: Sequence[KvSource], owner: str, *, must: bool = False
    ) -> Brought:
        """Bring what of ``prefix`` is worth bringing, or with ``must`` all that can be."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """What a call came to. The parts sum to ``held_tokens``, unless something was evicted meanwhile."""

    held_tokens: int = 0
    """Leading tokens, whole pages, that are cached now: on the pin's tier, or on any without one."""

    found_tokens: int = 0
    copied_tokens: int = 0
    computed_tokens: int = 0
    elapsed_ms: float = 0.0
    copy_problem: str = ""


class Warming:
    """See the module. One event loop owns it."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        adapters: FrontAdapters,
        calls: RunningCalls,
        copier: Bringer | None = None,
        metrics: WarmMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``calls`` are the worker's: who drains or stops takes no warming, and waits for what is under way. Without ``copier`` all is
        computed."""
        self._engine = engine
        self._adapters = adapters
        self._calls = calls
        self._copier = copier
        self._metrics = WarmMetrics() if metrics is None else metrics
        self._clock = clock
        self._turns = asyncio.Semaphore(MAX_WARMS)
        self._numbers = count(1)
        self._entered = 0
        self._by_pin: Counter[str] = Counter()
        """Calls under way by the pin that they ask for."""

        self._made: set[str] = set()
        """Pins that calls under way have made, and no call has ended well with."""

        self._undoing: set[asyncio.Task[None]] = set()

    async def warm(self, order: WarmOrder, time_left_s: float | None) -> Warmed:
        """Do what ``order`` says, within ``time_left_s`` where there is such a limit.

        Raises NotFoundError for an adapter that is not known here, BudgetError for a pin without room, UnavailableError while the worker
        drains, OverloadedError where too many wait or the pool has no room, DeadlineError where the time cannot suffice.
        """
        began = self._clock()
        try:
            async with self._turn() as request_id:
                left_s = math.inf if time_left_s is None else time_left_s - (self._clock() - began)
                warmed = await self._see_to(order, request_id, left_s, began)
        except BaseException as error:
            self._metrics.failed(error)
            raise
        self._metrics.warmed(WarmedTokens(warmed.found_tokens, warmed.copied_tokens, warmed.computed_tokens))
        return warmed

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[RequestId]:
        """A place among those that are seen to, and the id of the request there."""
        self._calls.check_open()
        if self._entered >= MAX_WARMS + MAX_WAITING_WARMS:
            raise OverloadedError(
                f"{MAX_WAITING_WARMS} prefixes wait to be warmed already, which is the limit"
            )
        self._entered += 1
        try:
            async with self._turns:
                request_id = RequestId(f"{_ID_PREFIX}{next(self._numbers)}")
                with self._calls.enter(request_id, _NO_TENANT, branches=0):
                    yield request_id
        finally:
            self._entered -= 1

    async def _see_to(self, order: WarmOrder, request_id: RequestId, left_s: float, began: float) -> Warmed:
        if order.adapter_digest and not self._adapters.has_content(order.adapter_digest):
            raise NotFoundError("prefix.adapter_digest: no adapter of this content is loaded here")
        if not order.prefix.tokens:
            await self._compute(order, request_id, left_s)
            return Warmed(elapsed_ms=(self._clock() - began) * _S_TO_MS)
        if order.pin is None:
            return await self._fill(order, request_id, left_s, began)
        async with self._pinned(order.prefix, order.pin):
            return await self._fill(order, request_id, left_s, began)

    @asynccontextmanager
    async def _pinned(self, prefix: PrefixName, pin: PinOrder) -> AsyncIterator[None]:
        """The pin, for as long as what is done under it goes well."""
        pin_id = pin.pin_id
        self._by_pin[pin_id] += 1
        # Not ended with its caller: it has to be known whether there is a pin to let go of.
        pinning = asyncio.create_task(self._pin(prefix, pin))
        pinning.add_done_callback(look_at)
        try:
            await asyncio.shield(pinning)
            yield
        except BaseException as error:
            self._leave(pin_id)
            undoing = asyncio.create_task(self._undo(pinning, pin_id))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            undoing.add_done_callback(look_at)
            if isinstance(error, Exception):
                await asyncio.shield(undoing)
            raise
        self._made.discard(pin_id)
        self._leave(pin_id)

    def _leave(self, pin_id: str) -> None:
        self._by_pin[pin_id] -= 1
        if not self._by_pin[pin_id]:
            del self._by_pin[pin_id]

    async def _pin(self, prefix: PrefixName, pin: PinOrder) -> None:
        answer = await self._ask_engine(
            lambda question: PinPrefix(
                question=question,
                pin_id=pin.pin_id,
                prefix=prefix,
                owner=pin.owner,
                tier=int(pin.tier),
                ttl_s=pin.ttl_s,
            ),
            message="pin",
        )
        if answer.made:
            self._made.add(pin.pin_id)

    async def _undo(self, pinning: "asyncio.Task[None]", pin_id: str) -> None:
        """Let go of a pin that was made for nothing, unless another call of the same pin goes on: then that one sees to it."""
        await asyncio.wait({pinning})
        if pin_id not in self._made or pin_id in self._by_pin:
            return
        self._made.discard(pin_id)
        await self._ask_engine(lambda question: UnpinPrefix(question=question, pin_id=pin_id))

    async def _fill(self, order: WarmOrder, request_id: RequestId, left_s: float, began: float) -> Warmed:
        """Bring and compute what is missing."""
        whole, owner = count_tokens(order.prefix.tokens), _owner(order)
        copied, problem = 0, ""
        if self._copier is not None and order.sources and await self._missing(order, whole):
            brought = await self._copier.bring(order.prefix, order.sources, owner, must=order.copy_only)
            copied, problem = brought.copied, brought.problem
        computed = 0
        if not order.copy_only and await self._missing(order, whole):
            spent_s = self._clock() - began
            computed = whole - await self._compute(order, request_id, left_s - spent_s)
        held = await self._settled(order, whole)
        return Warmed(
            held_tokens=held,
            found_tokens=max(0, held - copied - computed),
            copied_tokens=copied,
            computed_tokens=computed,
            elapsed_ms=(self._clock() - began) * _S_TO_MS,
            copy_problem=problem,
        )

    async def _missing(self, order: WarmOrder, whole: int) -> bool:
        """Whether anything is missing where it is wanted."""
        if _tier(order) is Tier.HOST:
            return await self._held_by_pin(order) < whole
        return (await self._look(order.prefix)).held_tokens < whole

    async def _settled(self, order: WarmOrder, whole: int) -> int:
        """What is held in the end. What is on the device is waited for until it has come to the host, where that is wanted."""
        if order.pin is None:
            found = await self._look(order.prefix)
            return found.held_tokens + found.host_tokens
        if _tier(order) is Tier.DEVICE:
            return (await self._look(order.prefix)).held_tokens
        wait_until = self._clock() + (0.0 if order.copy_only else HOST_WAIT_S)
        while True:
            held = await self._held_by_pin(order)
            if held >= whole or self._clock() >= wait_until:
                return held
            await asyncio.sleep(HOST_LOOK_S)

    async def _held_by_pin(self, order: WarmOrder) -> int:
        """What the order's pin holds on its tier: nothing, once somebody has let go of it."""
        assert order.pin is not None
        pin_id = order.pin.pin_id
        # Only this one: to list them all, time and again, would take the engine's time from whoever is answered.
        answer = await self._ask_engine(lambda question: ListPins(question=question, pin_id=pin_id))
        return sum(pin.held_tokens for pin in answer.pins)

    async def _look(self, prefix: PrefixName) -> KvWritten:
        """How much of a prefix is here."""
        answer = await self._ask_engine(
            lambda question: WriteKv(question=question, prefix=prefix, start_tokens=0)
        )
        if answer.written is None:
            raise InternalError("the engine did not tell how much of a prefix it has")
        return answer.written

    async def _compute(self, order: WarmOrder, request_id: RequestId, left_s: float) -> int:
        """Have the engine compute the prefix, or get the adapter that it is for; returns the tokens that it found."""
        submit = Submit(
            request_id=request_id,
            namespace=order.prefix.namespace,
            tokens=order.prefix.tokens,
            boundary_tokens=order.prefix.boundary_tokens,
            tail=order.prefix.tail,
            sampling=_NO_ANSWER,
            owner=_owner(order),
            priority=WARM_PRIORITY,
            queue_timeout_s=math.inf,
            time_left_s=left_s,
            adapter=order.adapter_digest,
            is_warming=True,
        )
        found = 0
        async with aclosing(self._engine.submit(submit)) as events:
            async for event in events:
                match event:
                    case Admitted():
                        found = event.cached_tokens
                    case Refused(adapter_left=True):
                        raise NotFoundError(f"prefix.adapter_digest: {event.problem}")
                    case Refused():
                        raise refusal_of(event)
                    case Ended() if (problem := problem_of(event)) is not None:
                        raise problem
        return found

    async def _ask_engine(
        self,
        make: Callable[[int], PinPrefix | UnpinPrefix | ListPins | WriteKv],
        message: str = "",
    ) -> PrefixAnswer:
        return await ask(self._engine, make, message)


def _owner(order: WarmOrder) -> str:
    return order.pin.owner if order.pin is not None else ""


def _tier(order: WarmOrder) -> Tier:
    return order.pin.tier if order.pin is not None else Tier.DEVICE
