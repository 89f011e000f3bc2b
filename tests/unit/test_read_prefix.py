"""Giving KV under a rate: who leaves while it waits for its turn takes nothing from who stays."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from prefixmesh.fleet_secret import generate
from prefixmesh.ids import Incarnation
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.rpc.identity import AUTHORIZATION_METADATA
from prefixmesh.worker.kv_copies.books import CopyBooks
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand, ReadKv
from prefixmesh.worker.read_prefix import MAX_READERS, ReadPrefixService
from tests.support.kv_copying import LAYOUT, PAGE_BYTES, CopyBench, name_of
from tests.support.servers import eventually

pytestmark = pytest.mark.asyncio(loop_scope="function")

PROMPT = list(range(100, 112))
OWN = Incarnation(7)
SLOW = PAGE_BYTES / 1000.0
"""Bytes a second: a page takes a quarter of an hour."""


class Giver:
    """The service before a cache that has the prompt."""

    def __init__(self, bytes_per_s: float) -> None:
        self.cache = CopyBench()
        self.cache.compute(PROMPT)
        self.books = CopyBooks()
        self.books.open(LAYOUT)
        self.asked: list[int] = []
        secret = generate()
        self.context: Any = SimpleNamespace(
            invocation_metadata=lambda: ((AUTHORIZATION_METADATA, f"Bearer {secret.control_token()}"),)
        )
        info: Any = SimpleNamespace(
            model_revision="rev", page_size=LAYOUT.page_size, context_length=512, vocab_size=512
        )
        self.service = ReadPrefixService(
            secret=secret,
            incarnation=OWN,
            info=info,
            engine=self,  # type: ignore[arg-type]
            books=self.books,
            bytes_per_s=bytes_per_s,
            clock=lambda: 50.0,
        )

    async def ask_prefix(self, make: Callable[[int], PrefixCommand]) -> PrefixAnswer:
        command = make(1)
        assert isinstance(command, ReadKv)
        self.asked.append(command.max_bytes)
        return self.cache.ask(command)

    async def give(self) -> list[bytes]:
        """Messages that one reader got."""
        name, sent = name_of(PROMPT), list[bytes]()

        async def send(message: bytes) -> None:
            sent.append(message)

        request = pb.ReadPrefixRequest(
            prefix=pb.Prefix(namespace=name.namespace, token_ids=name.tokens),
            model_revision="rev",
            layout_digest=LAYOUT.digest,
        )
        await self.service.ReadPrefix(request, self.context, send)
        return sent


async def test_readers_that_leave_while_they_wait_take_nothing_of_the_rate() -> None:
    giver = Giver(SLOW)
    for _ in range(3):
        readers = [asyncio.create_task(giver.give()) for _ in range(MAX_READERS)]
        await eventually(lambda: giver.books.giving == MAX_READERS and len(giver.asked) >= 2 * MAX_READERS)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        giver.asked.clear()
    assert giver.books.giving == giver.books.given_bytes == 0
    assert giver.service._rate.take(0, 50.0) == 0.0


async def test_parts_are_as_small_as_the_rate_wants() -> None:
    giver = Giver(2.5 * PAGE_BYTES)
    reader = asyncio.create_task(giver.give())
    await eventually(lambda: bool(giver.asked))
    reader.cancel()
    await asyncio.wait({reader})
    assert set(giver.asked) == {2 * PAGE_BYTES}
