"""What all direct calls of one asyncio client share: connections to workers, and what was learnt of them."""

import asyncio
from typing import Final

import grpc.aio

from prefixmesh.client.direct import RouteMemory
from prefixmesh.client.worker_channels import WorkerChannels
from prefixmesh.rpc.channel import WORKER_OPTIONS, open_channel


class AsyncWorkers:
    """See the module."""

    def __init__(self) -> None:
        self.memory: Final = RouteMemory()
        self._channels: WorkerChannels[grpc.aio.Channel] = WorkerChannels(
            lambda address: open_channel(address, WORKER_OPTIONS)
        )
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"AsyncWorkers({self._channels!r})"

    def take(self, address: str) -> grpc.aio.Channel | None:
        """A channel for one stream; None when all places are in use, or when the client was closed."""
        taken = self._channels.take(address)
        if taken is None:
            return None
        if taken.to_close is not None:
            task = asyncio.ensure_future(taken.to_close.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return taken.channel

    def release(self, address: str) -> None:
        """The stream has ended."""
        self._channels.release(address)

    async def close(self) -> None:
        """Close every connection; streams still open are cancelled."""
        await asyncio.gather(*(channel.close() for channel in self._channels.close()), *self._closing)
