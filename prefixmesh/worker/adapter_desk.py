"""Adapters at run time: does what the adapter table says, and reads files on threads of its own while the engine's loop goes on.

The engine's own thread calls every method; only inspecting, hashing and reading run elsewhere: one thread for what is loaded by name,
which may be gigabytes, and one for weights that requests wait for. Both are made at the first use and stay.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from prefixmesh.errors import BudgetError, ConfigError, InvalidRequestError, NotFoundError
from prefixmesh.model_files.adapter_folder import AdapterRoot
from prefixmesh.model_files.linear_sizes import NO_LINEARS, LinearSizes
from prefixmesh.model_files.peft_adapter import (
    PeftAdapter,
    check_adapter_name,
    inspect_adapter,
    read_digest,
)
from prefixmesh.worker.adapter_records import Drop, Grant, Load, Refusal, Unloaded
from prefixmesh.worker.adapters import UNKNOWN, AdapterTable
from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.messages import (
    AdapterAnswer,
    AdapterCommand,
    AdapterInfo,
    AdapterProblem,
    Event,
    ListAdapters,
    LoadAdapter,
    Refused,
    Submit,
    UnloadAdapter,
)

logger = logging.getLogger(__name__)

MAX_LOADS: Final = 64
"""Commands to load that wait for the thread; an operator who sends more at once waits for some of them first."""


LOAD_WEIGHT: Final = 0.3
"""Of the newest load in their average: the last few count, since the next one's size is not known."""


class Slots(Protocol):
    """Where weights live: ``worker.model.lora.LoraSlots``, or a fake."""

    def read(self, path: str, digest: str) -> Any:
        """An adapter's weights; on a thread. InvalidRequestError when they are not of that digest."""
        ...

    def put(self, slot: int, weights: Any) -> None:
        """Compute rows of ``slot`` with these weights."""
        ...

    def drop(self, slot: int) -> None:
        """Free a slot."""
        ...


class Waiting(NamedTuple):
    """A request that waits for its adapter, or has it."""

    command: Submit
    arrived_at: float
    grammar: AnswerGrammar | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterShop:
    """What adapters are to one engine: where they lie, what they must fit, and how much room there is."""

    root: AdapterRoot
    sizes: LinearSizes
    slots: Slots | None
    element_bytes: int
    """Of a number in the model's dtype."""

    max_resident: int
    budget_bytes: int
    """For the weights of all resident adapters together."""

    max_waiting: int


NO_SHOP: Final = AdapterShop(
    root=AdapterRoot(None),
    sizes=NO_LINEARS,
    slots=None,
    element_bytes=1,
    max_resident=0,
    budget_bytes=0,
    max_waiting=0,
)
"""For engines without an adapter root: every load is refused, and so every request that names an adapter."""


class AdapterDesk:
    """See the module. What happened gathers until ``take_events`` and ``take_ready``."""

    def __init__(self, shop: AdapterShop, clock: Callable[[], float] = time.perf_counter) -> None:
        self._shop = shop
        self._clock = clock
        self._table = AdapterTable(
            max_resident=shop.max_resident, budget_bytes=shop.budget_bytes, max_waiting=shop.max_waiting
        )
        self._waiting: dict[str, Waiting] = {}
        self._looks: dict[Future[tuple[PeftAdapter, str]], LoadAdapter] = {}
        self._reads: dict[Future[Any], Load] = {}
        self._looker: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._began: dict[str, float] = {}
        """When each load under way was begun."""

        self.load_ms = 0.0
        """From a load's beginning to weights that can be used, over the last loads; 0 before the first. Behind others it waits for them."""

        self._ready: list[Waiting] = []
        self._events: list[Event] = []

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request has an adapter, or waits for one."""
        return request_id in self._table

    @property
    def is_reading(self) -> bool:
        """Whether a thread is at work, so that ``collect`` will have something."""
        return bool(self._looks or self._reads)

    @property
    def table(self) -> AdapterTable:
        """The core."""
        return self._table

    def load_now(self, name: str, path: str) -> None:
        """Load at start, before anything is served, and wait for it. Raises ConfigError naming the adapter."""
        try:
            adapter, digest = self._look(path)
            self._learn(LoadAdapter(question=0, name=name, path=path), adapter, digest)
        except (InvalidRequestError, BudgetError) as error:
            raise ConfigError(f"adapter {name}={path} cannot be loaded: {error}") from error
        self.collect(wait_s=None)
        self._events.clear()

    def infos(self) -> tuple[AdapterInfo, ...]:
        """All names, sorted."""
        return self._table.infos()

    def handle(self, command: AdapterCommand) -> None:
        """Take a command; its answer comes at once, or when it is done."""
        match command:
            case ListAdapters():
                self._events.append(AdapterAnswer(question=command.question, adapters=self._table.infos()))
            case UnloadAdapter():
                try:
                    self._table.forget(command.name, command.question)
                except NotFoundError as error:
                    self._fail(command.question, "not_found", "name", str(error))
            case LoadAdapter():
                self._begin_look(command)
        self._perform()

    def knows(self, digest: str) -> bool:
        """Whether some name means this content."""
        return self._table.knows(digest)

    def enter(self, command: Submit, arrived_at: float, grammar: AnswerGrammar | None) -> None:
        """A request wants the adapter ``command.adapter``: ``take_ready`` gives it back when it has it, ``take_events`` tells when not."""
        self._waiting[command.request_id] = Waiting(command, arrived_at, grammar)
        self._table.acquire(command.adapter, command.request_id)
        self._perform()

    def leave(self, request_id: str) -> None:
        """The request has ended. One without an adapter is ignored."""
        self._waiting.pop(request_id, None)
        if request_id in self._table:
            self._table.release(request_id)
            self._perform()

    def waits(self, request_id: str) -> bool:
        """Whether the request waits here."""
        return request_id in self._waiting

    def waiting(self) -> list[Waiting]:
        """All that wait, in the order of their coming."""
        return list(self._waiting.values())

    @property
    def in_use(self) -> bool:
        """Whether any request has an adapter now."""
        return self._table.using > 0

    def complete(self, plan: BatchPlan, request_ids: list[str]) -> BatchPlan:
        """The plan of these requests, in this order, with the slots of their adapters; as it is when none has one. O(requests)."""
        slots = self._table.slots_of(request_ids)
        return replace(plan, adapter_slots=np.array(slots, dtype=np.int32)) if slots else plan

    def take_ready(self) -> list[Waiting]:
        """Requests that have their adapter now and can go on, in order."""
        ready, self._ready = self._ready, []
        return ready

    def take_events(self) -> list[Event]:
        """What callers must be told, in order."""
        events, self._events = self._events, []
        return events

    def collect(self, wait_s: float | None) -> None:
        """Take what the threads have done; waits at most ``wait_s`` for the first (None: until all is done)."""
        while self._looks or self._reads:
            futures: list[Future[Any]] = [*self._looks, *self._reads]
            if wait_s != 0.0:
                wait(futures, wait_s, FIRST_COMPLETED)
            for future in futures:
                if future.done():
                    self._take_done(future)
            if wait_s is not None:
                return

    def _take_done(self, future: Future[Any]) -> None:
        if future in self._looks:
            self._looked(self._looks.pop(future), future)
        else:
            self._was_read(self._reads.pop(future), future)
        self._perform()

    def _begin_look(self, command: LoadAdapter) -> None:
        try:
            check_adapter_name(command.name)
        except InvalidRequestError as error:
            self._fail(command.question, "invalid", error.field, error.problem)
            return
        if len(self._looks) >= MAX_LOADS:
            self._fail(command.question, "overloaded", "", f"{MAX_LOADS} adapters are being loaded already")
            return
        if self._looker is None:
            self._looker = ThreadPoolExecutor(1, thread_name_prefix="prefixmesh-adapter-look")
        self._looks[self._looker.submit(self._look, command.path)] = command

    def _look(self, path: str) -> tuple[PeftAdapter, str]:
        adapter = inspect_adapter(self._shop.root, path, self._shop.sizes)
        return adapter, read_digest(self._shop.root, adapter)

    def _looked(self, command: LoadAdapter, future: Future[tuple[PeftAdapter, str]]) -> None:
        error = future.exception()
        try:
            if error is not None:
                raise error
            self._learn(command, *future.result())
        except InvalidRequestError as refused:
            self._fail(command.question, "invalid", refused.field, refused.problem)
        except BudgetError as refused:
            self._fail(command.question, "over_budget", "", str(refused))
        except Exception as failed:
            logger.exception("engine.adapter_not_loaded name=%s", command.name)
            problem = f"it could not be read: {type(failed).__name__}"
            self._fail(command.question, "invalid", "path", problem)

    def _learn(self, command: LoadAdapter, adapter: PeftAdapter, digest: str) -> None:
        self._table.learn(
            command.name,
            digest=digest,
            path=command.path,
            rank=adapter.rank,
            size_bytes=adapter.elements * self._shop.element_bytes,
            pinned=command.pinned,
        )
        logger.info("adapter_loaded name=%s digest=%s path=%s", command.name, digest, command.path)
        self._perform()
        info = self._table.info(command.name)
        self._events.append(AdapterAnswer(question=command.question, adapters=(info,)))

    def _was_read(self, load: Load, future: Future[Any]) -> None:
        error, began = future.exception(), self._began.pop(load.digest)
        if error is None:
            assert self._shop.slots is not None
            self._shop.slots.put(load.slot, future.result())
            took_ms = (self._clock() - began) * 1e3
            self.load_ms += (took_ms - self.load_ms) * (LOAD_WEIGHT if self.load_ms else 1.0)
            self._table.loaded(load.digest)
            return
        if isinstance(error, InvalidRequestError):
            problem = error.problem
        else:
            logger.error("engine.adapter_not_read digest=%s", load.digest, exc_info=error)
            problem = f"the adapter's weights could not be read: {type(error).__name__}"
        self._table.load_failed(load.digest, problem)

    def _perform(self) -> None:
        for action in self._table.take_actions():
            match action:
                case Grant(request_id=request_id):
                    self._ready.append(self._waiting.pop(request_id))
                case Refusal():
                    del self._waiting[action.request_id]
                    field = "" if action.is_full else "adapter"
                    self._events.append(
                        Refused(
                            request_id=action.request_id,
                            field=field,
                            problem=action.problem,
                            adapter_left=action.problem == UNKNOWN,
                        )
                    )
                case Load():
                    self._reads[self._begin_read(action)] = action
                case Drop(slot=slot):
                    assert self._shop.slots is not None
                    self._shop.slots.drop(slot)
                case Unloaded(question=question):
                    self._events.append(AdapterAnswer(question=question))

    def _begin_read(self, load: Load) -> Future[Any]:
        assert self._shop.slots is not None
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="prefixmesh-adapter-read")
        self._began[load.digest] = self._clock()
        read: Callable[[str, str], Any] = self._shop.slots.read
        return self._reader.submit(read, load.path, load.digest)

    def _fail(self, question: int, error: AdapterProblem, field: str, problem: str) -> None:
        self._events.append(AdapterAnswer(question=question, error=error, field=field, problem=problem))


def refuse_nameless(request_id: str) -> Refused:
    """What a request of a content that no name means is told."""
    return Refused(request_id=request_id, field="adapter", problem=UNKNOWN, adapter_left=True)
