"""Every error a user of prefixmesh can meet, as one tree.

::

    PrefixmeshError                 status              retry helps?
    ├── ConfigError                 (start-up only)     no: change the setting it names
    ├── ModelFileError              (start-up only)     no: the file is missing or malformed
    ├── InvalidRequestError         INVALID_ARGUMENT    no: names the field and the limit
    ├── AuthenticationError         UNAUTHENTICATED     no: credentials missing, unknown or forged
    │   ├── ForgedTicketError                           no: this fleet did not sign it
    │   ├── OtherLifeError                              with a new ticket: the worker has restarted since
    │   ├── ExpiredTicketError                          with a new ticket
    │   ├── UsedTicketError                             with a new ticket: each admits one call
    │   └── TicketLimitError                            no: the request is larger than what was routed
    ├── AccessDeniedError           PERMISSION_DENIED   no
    ├── NotFoundError               NOT_FOUND           no
    ├── OverloadedError             RESOURCE_EXHAUSTED  yes, later
    │   └── QueueTimeoutError       RESOURCE_EXHAUSTED  yes, later: it waited as long as it may
    ├── BudgetError                 RESOURCE_EXHAUSTED  no: once something that counts against it is given up
    ├── OtherKvError                FAILED_PRECONDITION no: another model, layout or life than was meant; ask another worker
    ├── AdapterChangedError         ABORTED             yes: the adapter was loaded anew or unloaded meanwhile
    ├── UnavailableError            UNAVAILABLE         yes: no worker is ready, or it died
    │   ├── StoppingError                               yes: elsewhere, or here once it is back
    │   ├── FrameError                                  yes: front and engine lost each other
    │   ├── EngineLostError                             yes: the worker's engine ended, and what it had is lost
    │   └── DeviceLostError                             yes: the worker's GPU stopped working; the worker ends
    ├── DeadlineError               DEADLINE_EXCEEDED   with a longer deadline
    ├── CancelledError              CANCELLED           the caller wanted it so
    ├── UnsupportedError            UNIMPLEMENTED       no: this server does not do such a thing
    └── InternalError               INTERNAL            no: a bug of ours
        ├── DoubleReleaseError                          a lock was released twice; survived
        ├── LoadBackError                               KV did not come to the device in time; survived: it is computed
        └── InvariantError                              a structure is in an impossible state

Each class carries the gRPC status it becomes and a stable reason for ``google.rpc.ErrorInfo``; foreign errors are mapped
to this tree where they enter, with ``from``. ``assert`` is for our own bugs only.
"""

from typing import ClassVar, Final


class PrefixmeshError(Exception):
    """Base of all errors raised on purpose by this package."""

    status: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code this error becomes."""

    reason: ClassVar[str] = "INTERNAL"
    """Stable, machine-readable reason (``google.rpc.ErrorInfo.reason``)."""

    retryable: ClassVar[bool] = False
    """Whether the same call may succeed when sent again."""


class ConfigError(PrefixmeshError):
    """A setting is out of its range or settings contradict each other; raised at start-up."""

    status = "FAILED_PRECONDITION"
    reason = "BAD_CONFIG"


class ModelFileError(PrefixmeshError):
    """A model's files are missing, malformed or of a kind that is not supported."""

    status = "FAILED_PRECONDITION"
    reason = "BAD_MODEL_FILES"


class InvalidRequestError(PrefixmeshError):
    """The caller's request breaks a limit; ``field`` names where, the message names the limit."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        """Path of the offending field in the request, such as ``sampling.top_p``."""

        self.problem = problem
        """What is wrong with it, and the limit."""


class AuthenticationError(PrefixmeshError):
    """Credentials are missing, unknown or forged."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class ForgedTicketError(AuthenticationError):
    """A ticket is malformed, incomplete, or signed by another fleet."""

    reason = "TICKET_FORGED"


class OtherLifeError(AuthenticationError):
    """A ticket is for another life of the worker: what it was decided on is gone."""

    reason = "TICKET_OTHER_LIFE"


class ExpiredTicketError(AuthenticationError):
    """A ticket came after its time, by the worker's clock."""

    reason = "TICKET_EXPIRED"


class UsedTicketError(AuthenticationError):
    """A ticket came again. It admits one call."""

    reason = "TICKET_USED"


class TicketLimitError(AuthenticationError):
    """A request asks for more than its ticket admits."""

    reason = "TICKET_LIMIT"


class AccessDeniedError(PrefixmeshError):
    """The caller is known and may not do this."""

    status = "PERMISSION_DENIED"
    reason = "ACCESS_DENIED"


class NotFoundError(PrefixmeshError):
    """What the caller names does not exist."""

    status = "NOT_FOUND"
    reason = "NOT_FOUND"


class OverloadedError(PrefixmeshError):
    """There is no room for it: a bounded queue is full, or the wait would be longer than is worth beginning. Try again later."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"
    retryable = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds after which the same call is expected to be taken (``google.rpc.RetryInfo`` on the wire); None: nobody knows."""


class QueueTimeoutError(OverloadedError):
    """The request waited for its first admission to a batch as long as its queue timeout, or the worker's, allows."""

    reason = "QUEUE_TIMEOUT"


class BudgetError(PrefixmeshError):
    """What is wanted does not fit a budget; the message tells whose, and the sums."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVER_BUDGET"


class OtherKvError(PrefixmeshError):
    """A worker was asked for KV that it has not and will not have: of another revision or layout, or of a life of it that is over."""

    status = "FAILED_PRECONDITION"
    reason = "OTHER_KV"


class AdapterChangedError(PrefixmeshError):
    """The adapter that a request was prepared for is not the one that has its name now. Nothing was computed; sent again, the request
    meets what is there."""

    status = "ABORTED"
    reason = "ADAPTER_CHANGED"
    retryable = True


class UnavailableError(PrefixmeshError):
    """No worker can take the request now, or the one that had it died."""

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"
    retryable = True


class StoppingError(UnavailableError):
    """The server is leaving: it takes nothing new, and ends what it still has. Another is there, or soon will be."""

    reason = "STOPPING"


class FrameError(UnavailableError):
    """The other end of an engine's connection sent what is no frame of ours; the connection is of no more use."""

    reason = "BAD_FRAME"


class EngineLostError(UnavailableError):
    """The engine behind a worker's front has ended: what it had taken in is lost, and was not refused."""

    reason = "ENGINE_LOST"


class DeviceLostError(UnavailableError):
    """The GPU does not answer any more, or answers every call with the same error. Only a new process can use it again."""

    reason = "DEVICE_LOST"


class DeadlineError(PrefixmeshError):
    """The call's deadline passed before it was answered."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class CancelledError(PrefixmeshError):
    """The caller cancelled or aborted the request."""

    status = "CANCELLED"
    reason = "CANCELLED"


class UnsupportedError(PrefixmeshError):
    """What is asked for this server does not do: it is of another version, or was started without what it takes."""

    status = "UNIMPLEMENTED"
    reason = "UNSUPPORTED"


class InternalError(PrefixmeshError):
    """A bug of ours; the message is safe to show."""


class LoadBackError(InternalError):
    """KV that a step was to read did not come to the device, or not in time. The step is void and computed again without it; no caller
    sees this."""

    reason = "LOAD_BACK_FAILED"


class DoubleReleaseError(InternalError):
    """A lock receipt was released twice. Counted and survived by the engine; state is unchanged."""

    reason = "DOUBLE_RELEASE"


class InvariantError(InternalError):
    """``check_invariants`` found a structure in a state it must never have; the message shows the state."""

    reason = "INVARIANT_BROKEN"


LIFE_IS_OVER: Final = (OtherLifeError, EngineLostError, DeviceLostError, FrameError)
"""With these a worker says that what was sent to it is lost with a life of it: a death, and no refusal."""
