"""What a failed call of a direct request means to its plan and to the client's memory. For both clients; without a channel or a clock."""

import dataclasses

import grpc

from prefixmesh.client.answer_builder import AnswerBuilder
from prefixmesh.client.direct import DirectPlan, RouteMemory
from prefixmesh.client.target import Target, is_unreached
from prefixmesh.errors import UnavailableError, UnsupportedError


def note_route_failure(
    failure: grpc.RpcError, plan: DirectPlan, target: Target, memory: RouteMemory, now: float
) -> None:
    """The router named no worker. Returns where the request goes on, by the proxy; raises what ends it."""
    error = target.error(failure)
    if isinstance(error, UnsupportedError):
        memory.no_route(now)
    plan.route_failed(error)


def note_failure(
    failure: grpc.RpcError,
    plan: DirectPlan,
    target: Target,
    memory: RouteMemory,
    builder: AnswerBuilder,
    now: float,
) -> None:
    """A stream broke, a worker's or the proxy's. Returns where there is another attempt; raises what ends the request."""
    worker = plan.worker
    error = dataclasses.replace(target, address=worker or target.address).error(failure)
    if builder.has_begun:
        raise error from failure  # what was answered stays answered
    reached = not (worker and is_unreached(failure))
    if not reached:
        memory.unreached(worker, now)
        error = UnavailableError(f"{worker} cannot be reached from here: {error}")
    plan.worker_failed(error, reached=reached)
    builder.begin_again()


def note_early_end(plan: DirectPlan, builder: AnswerBuilder) -> None:
    """A worker ended its stream well, and has answered nothing. Returns where there is another attempt; else raises."""
    plan.worker_failed(UnavailableError("it ended the stream before the answer"), reached=True)
    builder.begin_again()
