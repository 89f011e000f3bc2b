"""What a simulated worker's events are on the wire: the part of a real front that needs no text."""

from prefixmesh.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PrefixmeshError,
    QueueTimeoutError,
)
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.tokens import pack
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokensOut


def as_response(event: RequestEvent) -> pb.GenerateResponse:
    """The message that tells of an event. Raises the error that the call ends with."""
    match event:
        case Admitted():
            on_device = event.cached_tokens - event.host_tokens
            cached = pb.CachedTokens(device=on_device, host=event.host_tokens)
            return pb.GenerateResponse(started=pb.Started(cached_tokens=cached))
        case TokensOut():
            return pb.GenerateResponse(
                delta=pb.Delta(position=event.position, token_ids=pack(event.token_ids))
            )
        case Refused():
            if event.field:
                raise InvalidRequestError(event.field, event.problem)
            raise OverloadedError(event.problem)
        case Ended():
            return _end(event)


def _end(ended: Ended) -> pb.GenerateResponse:
    error: PrefixmeshError
    match ended.reason:
        case "stop" | "length":
            is_stop = ended.reason == "stop"
            reason = pb.FINISH_REASON_STOP if is_stop else pb.FINISH_REASON_LENGTH
            usage = pb.Usage(completion_tokens=ended.completion_tokens)
            return pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=usage))
        case "aborted":
            error = CancelledError("the request was aborted")
        case "queue_timeout":
            error = QueueTimeoutError("it has waited as long as it may")
        case "too_late":
            error = DeadlineError("its answer could not have ended before its deadline")
        case "no_room":
            error = OverloadedError(ended.error)
        case "failed":
            error = InternalError(ended.error)
    raise error
