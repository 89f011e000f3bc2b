"""What a router is held beside in ``prefixmesh bench route``: a server that echoes, and a proxy that knows nothing.

Both have this fleet's gRPC settings and the same library under them, so that what a router takes more is what a router does.
"""

from collections.abc import AsyncIterator
from itertools import cycle
from typing import Any

import grpc
import grpc.aio

from prefixmesh.proto.v1 import inference_pb2, router_pb2
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.server import make_server
from prefixmesh.rpc.status import AnyContext

ROUTE = "/{}/Route".format(router_pb2.DESCRIPTOR.services_by_name["Router"].full_name)
GENERATE = "/{}/Generate".format(inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name)


async def serve_echo() -> tuple[grpc.aio.Server, str]:
    """A server whose ``Route`` answers with the message it was sent; and its address."""

    async def echo(data: bytes, _context: AnyContext) -> bytes:
        return data

    return await _serve(ROUTE, grpc.unary_unary_rpc_method_handler(echo))


async def serve_proxy(*workers: str) -> tuple[grpc.aio.Server, str]:
    """A server whose ``Generate`` asks ``workers`` in turns with the same message and passes every frame on as it comes; and its address."""
    asks: Any = cycle([open_channel(worker).unary_stream(GENERATE) for worker in workers])

    async def forward(data: bytes, _context: AnyContext) -> AsyncIterator[bytes]:
        call = next(asks)(data)
        while (frame := await call.read()) is not grpc.aio.EOF:
            yield frame

    return await _serve(GENERATE, grpc.unary_stream_rpc_method_handler(forward))


async def _serve(path: str, handler: Any) -> tuple[grpc.aio.Server, str]:
    """A server with one method, whose messages stay bytes."""
    server = make_server()
    _, service, method = path.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"
