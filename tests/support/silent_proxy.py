"""A TCP proxy that can stop forwarding, in both directions, while every connection stays open: what a stopped process or a lost route looks
like to the other end. Bytes that come meanwhile wait, and go on when it forwards again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK = 2**16
PING_BYTES, PING_TYPE = 17, 6
"""Of a whole frame, and the number of its kind (RFC 9113, 6.7)."""


class SilentProxy:
    """Before one server; made by ``proxy_before``."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ""
        self.connections = 0
        """How many were opened."""

        self.pings = 0
        """HTTP/2 pings and their answers, of both sides, that came alone."""

    def stall(self) -> None:
        self._forwards.clear()

    def go_on(self) -> None:
        self._forwards.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        host, port = self._target.rsplit(":", 1)
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        self._writers.append(back)
        with suppress(OSError):
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def close(self) -> None:
        """Every connection is gone when this returns."""
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(CHUNK):
                self.pings += len(chunk) == PING_BYTES and chunk[3] == PING_TYPE
                await self._forwards.wait()
                sink.write(chunk)
                await sink.drain()
        finally:
            sink.close()


@asynccontextmanager
async def proxy_before(target: str) -> AsyncIterator[SilentProxy]:
    """Listens on a free port before ``target``; all its connections are gone afterwards."""
    proxy = SilentProxy(target)
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await proxy._serve(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()
            serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await proxy.close()
