"""``KvTransport`` over gRPC's ``ReadPrefix``: connections to other workers of the fleet, few and kept, and their answers as parts.

Addresses come from tickets and control calls alone, which the fleet has signed, and every call carries the fleet's control token.
"""

from collections.abc import AsyncGenerator
from typing import Any, Final

import grpc
import grpc.aio

from prefixmesh.client.worker_channels import WorkerChannels
from prefixmesh.errors import InvalidRequestError, OverloadedError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.kv_source import KvSource
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2_grpc
from prefixmesh.rpc.channel import WORKER_OPTIONS, open_channel
from prefixmesh.rpc.identity import AUTHORIZATION_METADATA
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.worker.kv_copies.transport import CopiedPart, WantedKv

MAX_CHANNELS: Final = 16
"""To other workers at once; the one that was used longest ago is closed for a new one."""


class GrpcTransport:
    """See the module."""

    def __init__(self, secret: FleetSecret) -> None:
        self._metadata = ((AUTHORIZATION_METADATA, f"Bearer {secret.control_token()}"),)
        self._channels: WorkerChannels[grpc.aio.Channel] = WorkerChannels(
            lambda address: open_channel(address, WORKER_OPTIONS), MAX_CHANNELS
        )

    async def read(self, source: KvSource, wanted: WantedKv) -> AsyncGenerator[CopiedPart, None]:
        """See ``KvTransport.read``."""
        taken = self._channels.take(source.address)
        if taken is None:
            raise OverloadedError(f"copies from {MAX_CHANNELS} workers are under way, which is the limit")
        try:
            if taken.to_close is not None:
                await taken.to_close.close()
            stub = worker_control_pb2_grpc.WorkerControlStub(taken.channel)  # type: ignore[no-untyped-call]
            call = stub.ReadPrefix(_request(source, wanted), metadata=self._metadata)
            try:
                is_open = False
                async for message in call:
                    if not is_open:
                        _check_header(message, wanted)
                        is_open = True
                    elif (part := _part(message)) is not None:
                        yield part
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            finally:
                call.cancel()
        finally:
            self._channels.release(source.address)

    async def close(self) -> None:
        """See ``KvTransport.close``."""
        for channel in self._channels.close():
            await channel.close()


def _request(source: KvSource, wanted: WantedKv) -> pb.ReadPrefixRequest:
    prefix = wanted.prefix
    return pb.ReadPrefixRequest(
        prefix=pb.Prefix(
            namespace=prefix.namespace,
            token_ids=prefix.tokens,
            boundary_tokens=prefix.boundary_tokens,
            tail_namespace=prefix.tail,
        ),
        start_tokens=wanted.start_tokens,
        model_revision=wanted.model_revision,
        layout_digest=wanted.layout_digest,
        incarnation=source.incarnation,
    )


def _check_header(message: Any, wanted: WantedKv) -> None:
    """Raise InvalidRequestError unless a stream begins by naming what was asked for. ``message`` is None where gRPC could not read it."""
    if message is None or message.WhichOneof("news") != "header":
        raise InvalidRequestError("header", "must come first")
    told = message.header.model_revision, message.header.layout.digest
    if told != (wanted.model_revision, wanted.layout_digest):
        raise InvalidRequestError("header", "names another model or layout of KV than was asked for")


def _part(message: Any) -> CopiedPart | None:
    """A part; None for news that only later versions know. Raises InvalidRequestError for what is no message."""
    if message is None:
        raise InvalidRequestError("part", "is no message")
    if message.WhichOneof("news") != "part":
        return None
    part = message.part
    return CopiedPart(part.start_tokens, part.tokens, part.kv, part.checksum)
