"""``WorkerControl.ReadPrefix``: KV of a prefix to another worker of the fleet, a header first and then part by part.

A thin shell. Each part is read by the engine between two steps, told with a checksum, and waits for its turn under the rate that this worker may
give at; a stream ends early, and well, where the cache has no more of the prefix. It works while a worker drains: that is when its prefixes are
handed over.
"""

import asyncio
import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prefixmesh.errors import (
    AuthenticationError,
    InvalidRequestError,
    OtherKvError,
    OverloadedError,
    UnsupportedError,
)
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.rpc.identity import bearer_token
from prefixmesh.rpc.server import Send
from prefixmesh.rpc.status import AnyContext
from prefixmesh.tokens import TOKEN_BYTES
from prefixmesh.worker.caller import Metadata
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.kv_copies.books import CopyBooks
from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.kv_copies.parts import checksum, part_pages
from prefixmesh.worker.kv_copies.rate_bound import RateBound
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.prefix_calls import ask
from prefixmesh.worker.prefix_messages import KvRead, PrefixName, ReadKv
from prefixmesh.worker.unheard import look_at
from prefixmesh.worker.warm_order import read_prefix

MAX_READERS: Final = 4
"""Streams at once: each has two parts in memory, and all of them share the engine's turns."""


class ReadPrefixService:
    """Serves ``ReadPrefix`` of one life of one worker. One event loop owns it."""

    def __init__(
        self,
        *,
        secret: FleetSecret,
        incarnation: Incarnation,
        info: EngineInfo,
        engine: EngineClient,
        books: CopyBooks,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``bytes_per_s`` is what all streams together may send; 0 sets no bound."""
        self._control_token = secret.control_token().encode()
        self._incarnation = incarnation
        self._info = info
        self._engine = engine
        self._books = books
        self._bytes_per_s = bytes_per_s
        self._rate = RateBound(bytes_per_s)
        self._clock = clock

    async def ReadPrefix(  # noqa: N802  the service's own name
        self, request: pb.ReadPrefixRequest, context: AnyContext, send: Send
    ) -> None:
        """Header, then parts. Whatever does not fit is refused before a byte of KV is sent."""
        self._authenticate(context.invocation_metadata())
        layout = self._books.layout
        if layout is None:
            raise UnsupportedError("this worker's KV is not copied: that takes prefix_cache=radix")
        self._check_kv(request, layout)
        prefix = read_prefix(request.prefix, self._info)
        start = self._checked_start(request.start_tokens, prefix, layout)
        with self._place():
            await self._stream(prefix, start, layout, send)

    async def _stream(self, prefix: PrefixName, start: int, layout: CopyLayout, send: Send) -> None:
        read = await self._read(prefix, start, layout)
        header = pb.KvHeader(
            model_revision=self._info.model_revision,
            layout=encode_layout(layout),
            incarnation=self._incarnation,
            held_tokens=read.held_tokens,
        )
        await send(pb.ReadPrefixResponse(header=header).SerializeToString())
        end = len(prefix.tokens) // TOKEN_BYTES
        while read.kv:
            tokens = len(read.kv) // layout.page_bytes * layout.page_size
            message = _part(prefix, start, tokens, read.kv)
            start += tokens
            # The next part is read while this one is on its way; it is dropped with the stream.
            ahead = asyncio.create_task(self._read(prefix, start, layout)) if start < end else None
            if ahead is not None:
                ahead.add_done_callback(look_at)
            try:
                await self._wait_turn(len(read.kv))
                await send(message)
                self._books.given(tokens, len(read.kv))
                if ahead is None:
                    return
                read = await ahead
            finally:
                if ahead is not None:
                    ahead.cancel()

    async def _wait_turn(self, size_bytes: int) -> None:
        """Until so many bytes may be sent. Who leaves before that leaves its share to others."""
        wait_s = self._rate.take(size_bytes, self._clock())
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self._rate.give_back(size_bytes)
            raise

    async def _read(self, prefix: PrefixName, start: int, layout: CopyLayout) -> KvRead:
        size = part_pages(layout, self._bytes_per_s) * layout.page_bytes
        answer = await ask(
            self._engine,
            lambda question: ReadKv(question=question, prefix=prefix, start_tokens=start, max_bytes=size),
        )
        assert answer.read is not None, "what was not refused is answered"
        return answer.read

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._books.giving >= MAX_READERS:
            raise OverloadedError(f"{MAX_READERS} others read KV here, which is the limit")
        self._books.giving += 1
        try:
            yield
        finally:
            self._books.giving -= 1

    def _check_kv(self, request: pb.ReadPrefixRequest, layout: CopyLayout) -> None:
        """That what is here is what the reader takes it for: by every name, since equal bytes of another model are no KV of its own."""
        if request.incarnation and request.incarnation != self._incarnation:
            raise OtherKvError("this is another life of the worker that is meant; what that held is gone")
        if request.model_revision != self._info.model_revision:
            raise OtherKvError(
                f"this worker serves revision {self._info.model_revision[:12]}, not {request.model_revision[:12]!r}"
            )
        if request.layout_digest != layout.digest:
            raise OtherKvError(
                f"KV lies otherwise here ({layout.dtype}, pages of {layout.page_size} tokens, rank "
                f"{layout.tensor_parallel_rank} of {layout.tensor_parallel_size}): its digest is {layout.digest}"
            )

    def _checked_start(self, start: int, prefix: PrefixName, layout: CopyLayout) -> int:
        size = len(prefix.tokens) // TOKEN_BYTES
        if not 0 <= start < size or start % layout.page_size:
            raise InvalidRequestError(
                "start_tokens",
                f"must be whole pages of {layout.page_size} tokens, less than all {size}, got {start}",
            )
        return start

    def _authenticate(self, metadata: Metadata | None) -> None:
        token = bearer_token(dict(metadata or ()))
        if not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._control_token):
            raise AuthenticationError("this is not the fleet's control token")


def encode_layout(layout: CopyLayout) -> pb.KvLayout:
    """As a stream's header tells it."""
    return pb.KvLayout(
        digest=layout.digest,
        dtype=layout.dtype,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        tensor_parallel_rank=layout.tensor_parallel_rank,
        tensor_parallel_size=layout.tensor_parallel_size,
        page_bytes=layout.page_bytes,
    )


def _part(prefix: PrefixName, start: int, tokens: int, kv: bytes) -> bytes:
    part = pb.KvPart(
        start_tokens=start, tokens=tokens, kv=kv, checksum=checksum(prefix.tokens, start + tokens, kv)
    )
    return pb.ReadPrefixResponse(part=part).SerializeToString()
