"""Why an attempt at a worker failed, as told by the error that its call ended with: what follows for the request and for the worker. Pure."""

import enum
from typing import Final

from prefixmesh.errors import (
    LIFE_IS_OVER,
    AdapterChangedError,
    AuthenticationError,
    CancelledError,
    InternalError,
    OverloadedError,
    PrefixmeshError,
    QueueTimeoutError,
    UnavailableError,
)


class FailureKind(enum.Enum):
    """Why an attempt is over without the answer's end."""

    DIED = "died"
    """The worker, or the way to it: the connection broke, another life answered, the stream stopped short, or the worker was put out."""

    REFUSED = "refused"
    """A live worker said that it does not take it."""

    CALLERS = "callers"
    """Its own: what it asks for is not possible, its time is over, or nobody wants it any more."""

    INTERNAL = "internal"
    """A bug of ours, there or here: another try would meet it again."""

    CHANGED = "changed"
    """The adapter that it was prepared with is not the one that has its name now."""


_COUNTED: Final = frozenset({FailureKind.DIED, FailureKind.INTERNAL})


def kind_of(error: PrefixmeshError, *, is_told: bool, was_accepted: bool) -> FailureKind:
    """What a worker's ``error`` means for the attempt.

    ``is_told`` says that the worker itself has sent it, with our ErrorInfo, and not the library that found the connection broken;
    ``was_accepted`` that it had begun with the request, so that UNAVAILABLE is no refusal any more.
    """
    match error:
        case AdapterChangedError():
            return FailureKind.CHANGED
        case _ if isinstance(error, LIFE_IS_OVER):
            return FailureKind.DIED
        case UnavailableError():
            return FailureKind.REFUSED if is_told and not was_accepted else FailureKind.DIED
        case QueueTimeoutError():
            # It has waited as long as it may: a second line would be as long again.
            return FailureKind.CALLERS
        case OverloadedError() | AuthenticationError():
            # The caller's credentials were checked here: it is our ticket that the worker does not take.
            return FailureKind.REFUSED
        case CancelledError() if not is_told:
            # A server that was stopped cancels what it has; whoever asks this knows that nobody here did.
            return FailureKind.DIED
        case InternalError():
            # Every bug of a server of ours is told. What is not comes from the way there: a proxy reset the stream, or it has no end.
            return FailureKind.INTERNAL if is_told else FailureKind.DIED
        case _:
            return FailureKind.CALLERS


def is_workers_fault(kind: FailureKind) -> bool:
    """Whether a failure of this kind says something of the worker's health."""
    return kind in _COUNTED
