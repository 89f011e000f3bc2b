"""What happens to each request, as records: who noted what, and when. A checker reads them (``history_check``).

A router notes what it decides and what it passes on, so that anybody can see afterwards whether every request ended once, every token was
passed on once, and every reservation was given back. It is not a log for people (``logging`` is), and no metric: no record is ever left out
to save space, since a history that lacks some proves nothing. It says nothing of what prompts and answers hold.

In order, of one request that a worker failed and another carried on::

    asked  placed(1)  admitted  tokens...  failed(1)  settled  placed(2)  resumed(2)  admitted  tokens...  settled  ended

Where no history is wanted, ``NO_HISTORY`` stands in: ``if history.is_on:`` is all that it costs on the way of a token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, Final, ParamSpec

import msgspec

P = ParamSpec("P")

ROUNDED: Final = 6
"""Digits of seconds that are kept: a microsecond is less than anything that is noted takes."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="event", tag=str.lower):
    """One line of a history. Its name in the file, ``event``, is its class's in lower case."""

    at: float
    """Seconds, by the clock of whoever notes it: since 1970 in a file, simulated ones in a simulation."""

    request_id: str
    """The request's own name; that of whoever writes, for what is of its life; a reservation's, where only that is known."""


class Began(Record, frozen=True):
    """A life of whoever writes begins, under this name. Whatever was open in the file before was cut off by a death."""


class Asked(Record, frozen=True, kw_only=True):
    """A caller's request was taken in, and owes its caller one end."""

    branches: int = 1
    resumed: tuple[int, ...] = ()
    """By branch, how many tokens its caller has already; none where it begins anew."""

    prompt_tokens: int = 0
    max_tokens: int | None = None
    timeout_s: float | None = None
    """Until the caller's deadline; None where there is none."""


class Placed(Record, frozen=True, kw_only=True):
    """A worker was chosen for an attempt, and work reserved there."""

    attempt: int
    """From 1 on."""

    worker: str
    incarnation: int
    reservation: str
    """Its name in the ticket, unique in the router's life."""

    by_ticket: bool = False
    """Whether the caller streams from the worker itself: nothing but ``settled`` is heard of it here."""


class Admitted(Record, frozen=True, kw_only=True):
    """A worker has begun with an attempt."""

    attempt: int
    cached: int
    """Tokens of its prompt that it found cached."""


class Tokens(Record, frozen=True, kw_only=True):
    """So many tokens of an answer were passed on to the caller, the first of them at this position."""

    branch: int = 0
    position: int
    count: int


class Failed(Record, frozen=True, kw_only=True):
    """An attempt is over without an answer's end. Another may follow, or ``ended``."""

    attempt: int
    kind: str
    """``died``, ``refused`` or ``callers``."""

    reason: str
    """For people."""


class Resumed(Record, frozen=True, kw_only=True):
    """An attempt goes on where the ones before it stopped."""

    attempt: int
    positions: tuple[int, ...]
    """By branch, at which token."""


class Ended(Record, frozen=True, kw_only=True):
    """The request's one end."""

    outcome: str
    """``finished``, or the reason of the error that its caller was told; ``CANCELLED`` where it left."""

    completion_tokens: int
    """Passed on by all attempts together."""


class Settled(Record, frozen=True, kw_only=True):
    """What was reserved for an attempt was given back."""

    reservation: str


class Taken(Record, frozen=True, kw_only=True):
    """Noted by a worker: it has taken in what was reserved under ``request_id``."""

    worker: str
    incarnation: int


class Released(Record, frozen=True, kw_only=True):
    """Noted by a worker: what it had taken in is over, and it holds nothing more of it."""

    incarnation: int


class Lost(Record, frozen=True, kw_only=True):
    """So many records are missing here: the disk was full, or slower than what happened."""

    count: int


class Closed(Record, frozen=True):
    """The life that ``Began`` named ends in order: nothing is left open."""


ANY: Final = (
    Began
    | Asked
    | Placed
    | Admitted
    | Tokens
    | Failed
    | Resumed
    | Ended
    | Settled
    | Taken
    | Released
    | Lost
    | Closed
)
"""Every kind, as a type to decode a line by."""

FINISHED: Final = "finished"
"""The outcome of a request that has its whole answer."""


class History(ABC):
    """Takes notes. ``note`` gives a record its time; what becomes of it is the business of who inherits."""

    is_on: ClassVar[bool] = True
    """False where notes are thrown away: what it would cost to make one can be saved."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def note(
        self,
        event: Callable[Concatenate[float, str, P], Record],
        request_id: str,
        *args: P.args,
        **fields: P.kwargs,
    ) -> None:
        """Note that ``event`` happened now to a request: ``history.note(Tokens, request_id, position=4, count=1)``. Never waits, never
        fails for what becomes of it. O(1)."""
        self.put(event(round(self._clock(), ROUNDED), request_id, *args, **fields))

    @abstractmethod
    def put(self, record: Record) -> None:
        """Keep a record."""


class NoHistory(History):
    """Keeps nothing."""

    is_on = False

    def __init__(self) -> None:
        super().__init__(float)

    def note(self, *_: Any, **__: Any) -> None:
        """Nothing happens."""

    def put(self, record: Record) -> None:
        """Nothing happens."""


class HistoryList(History):
    """Keeps records in memory: for tests and simulations."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.records: list[Record] = []

    def put(self, record: Record) -> None:
        """Append it."""
        self.records.append(record)


NO_HISTORY: Final = NoHistory()
