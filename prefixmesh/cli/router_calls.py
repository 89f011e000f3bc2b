"""Calls of the ``Router`` service by commands: where the router is, who calls, and what a failure means."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from prefixmesh.errors import NotFoundError, PrefixmeshError

if TYPE_CHECKING:
    from prefixmesh.proto.v1.router_pb2 import FleetAdapter, PinStatus

DEFAULT_TIMEOUT_S: Final = 10.0
"""A router answers from what it knows; longer means that nobody is there."""


class RouterCalls:
    """Calls to one router; made by ``open_router``."""

    def __init__(self, stub: Any, target: Any) -> None:
        self._stub = stub
        self._target = target

    def __call__(self, method: str, request: Any, *, more_time_s: float = 0.0) -> Any:
        """The answer to a call; raises the error that it ends in."""
        import grpc

        call: Callable[..., Any] = getattr(self._stub, method)
        timeout_s = (self._target.timeout_s(None) or DEFAULT_TIMEOUT_S) + more_time_s
        try:
            return call(request, timeout=timeout_s, metadata=self._target.metadata)
        except grpc.RpcError as error:
            code: Any = error
            if code.code() is grpc.StatusCode.UNIMPLEMENTED and not code.trailing_metadata():
                raise NotFoundError(
                    f"{self._target.address} is no router that knows {method}; a worker or an older router is there"
                ) from error
            raise self._target.error(error) from error


@contextmanager
def open_router(values: Mapping[str, Any]) -> Iterator[RouterCalls]:
    """The router that the connection options name, else that of the fleet that is up."""
    from prefixmesh.client.target import make_target
    from prefixmesh.fleet.hold import find_fleet
    from prefixmesh.proto.v1 import router_pb2_grpc
    from prefixmesh.rpc.channel import open_sync_channel

    if values["address"] is None and find_fleet() is None:
        raise NotFoundError("no fleet is up; start one with: prefixmesh up, or name a router with --address")
    target = make_target(values["address"], values["api_key"], values["tenant"], values["timeout"])
    make_stub: Any = router_pb2_grpc.RouterStub
    with open_sync_channel(target.address) as channel:
        yield RouterCalls(make_stub(channel), target)


def all_pins(call: RouterCalls) -> "list[PinStatus] | None":
    """Everybody's pins, for what else is shown beside them; None where the router does not tell: it knows none, or not this caller."""
    from prefixmesh.proto.v1 import router_pb2 as pb

    try:
        answer: pb.ListPinsResponse = call("ListPins", pb.ListPinsRequest(owner="*"))
    except PrefixmeshError:
        return None
    return list(answer.pins)


def all_adapters(call: RouterCalls) -> "list[FleetAdapter] | None":
    """The fleet's adapters, likewise."""
    from prefixmesh.proto.v1 import router_pb2 as pb

    try:
        answer: pb.ListFleetAdaptersResponse = call("ListAdapters", pb.ListFleetAdaptersRequest())
    except PrefixmeshError:
        return None
    return list(answer.adapters)
