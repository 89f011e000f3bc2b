"""What a request's last event is to whoever asked for it, where that is an error."""

from prefixmesh.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
    QueueTimeoutError,
)
from prefixmesh.worker.messages import Ended, Refused


def problem_of(event: Ended) -> PrefixmeshError | None:
    """The error that a request's end is to its caller; None for one that is an answer."""
    match event.reason:
        case "failed":
            return InternalError(event.error or "the engine failed on this request")
        case "no_room":
            return OverloadedError(event.error or "the engine has no room for this request")
        case "queue_timeout":
            return QueueTimeoutError(event.error or "the request waited as long as its queue timeout allows")
        case "too_late":
            return DeadlineError("it waited so long that its answer could not have ended before its deadline")
        case "aborted":
            return CancelledError("the request was aborted")
        case "stop" | "length":
            return None


def refusal_of(event: Refused) -> PrefixmeshError:
    """The error that a refusal is to its caller."""
    if event.field:
        return InvalidRequestError(event.field, event.problem)
    return OverloadedError(event.problem, event.retry_after_s)
