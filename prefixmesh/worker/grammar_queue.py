"""Requests whose grammar is being compiled: one thread does it, so that the engine's loop goes on meanwhile.

The engine's own thread calls every method; only ``compile`` runs on the other one.
"""

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from prefixmesh.errors import InvalidRequestError
from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.messages import Refused, Submit

logger = logging.getLogger(__name__)


class Compiled(NamedTuple):
    """A request that can go on to the scheduler."""

    command: Submit
    arrived_at: float
    grammar: AnswerGrammar


class GrammarQueue:
    """Compiles in the order of arrival. Its bound is the front's: a call waits in its table meanwhile."""

    def __init__(self, compile_: Callable[[Submit], AnswerGrammar]) -> None:
        self._compile = compile_
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: dict[str, tuple[Submit, float, Future[AnswerGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def waiting(self) -> list[tuple[Submit, float]]:
        """All requests here, with their times of arrival."""
        return [(command, arrived_at) for command, arrived_at, _ in self._waiting.values()]

    def begin(self, command: Submit, now: float) -> None:
        """Start to compile. The thread is made at the first use and stays."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefixmesh-grammar")
        future = self._thread.submit(self._compile, command)
        self._waiting[command.request_id] = (command, now, future)

    def forget(self, request_id: str) -> bool:
        """Let go of a request; whether it was here. A compilation that has begun runs to its end, unheard."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            entry[2].cancel()
        return entry is not None

    def take_ready(self, wait_s: float) -> list[Compiled | Refused]:
        """What has been compiled, or could not be; waits at most ``wait_s`` for the first."""
        if wait_s > 0.0:
            wait([future for _, _, future in self._waiting.values()], wait_s, FIRST_COMPLETED)
        done = [name for name, (_, _, future) in self._waiting.items() if future.done()]
        return [self._outcome(*self._waiting.pop(name)) for name in done]

    def _outcome(
        self, command: Submit, arrived_at: float, future: Future[AnswerGrammar]
    ) -> Compiled | Refused:
        error = future.exception()
        if error is None:
            return Compiled(command, arrived_at, future.result())
        if isinstance(error, InvalidRequestError):
            return Refused(request_id=command.request_id, field=error.field, problem=error.problem)
        logger.error("engine.grammar_failed", exc_info=error)
        field = "sampling.json_schema" if command.sampling.json_schema else "sampling.regex"
        problem = f"the grammar could not be compiled: {type(error).__name__}"
        return Refused(request_id=command.request_id, field=field, problem=problem)
