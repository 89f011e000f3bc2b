"""What all direct calls of one blocking client share: connections to workers, and what was learnt of them. Thread-safe by its lock."""

import threading
from typing import Final

import grpc

from prefixmesh.client.direct import RouteMemory
from prefixmesh.client.idle_thread import IdleThread
from prefixmesh.client.worker_channels import WorkerChannels
from prefixmesh.rpc.channel import WORKER_OPTIONS, open_sync_channel


class Workers:
    """See the module."""

    def __init__(self, idle_timeout_s: float = 0.0) -> None:
        """``idle_timeout_s`` is how long a worker may be silent between tokens; 0: for ever."""
        self.idle: Final = IdleThread(idle_timeout_s)
        self.memory: Final = RouteMemory()
        self.lock: Final = threading.Lock()
        """Held while ``memory`` or the channels are touched, and never while a call waits."""

        self._channels: WorkerChannels[grpc.Channel] = WorkerChannels(
            lambda address: open_sync_channel(address, WORKER_OPTIONS)
        )

    def __repr__(self) -> str:
        return f"Workers({self._channels!r})"

    def take(self, address: str) -> grpc.Channel | None:
        """A channel for one stream; None when all places are in use, or when the client was closed."""
        with self.lock:
            taken = self._channels.take(address)
        if taken is None:
            return None
        if taken.to_close is not None:
            taken.to_close.close()
        return taken.channel

    def release(self, address: str) -> None:
        """The stream has ended."""
        with self.lock:
            self._channels.release(address)

    def close(self) -> None:
        """Close every connection; streams still open are cancelled."""
        with self.lock:
            channels = self._channels.close()
        for channel in channels:
            channel.close()
