"""Requests that are made to cost: refused by name, at once, and with nothing of them kept (F64).

The worker is a process of its own, so that its memory can be told from the caller's.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc.aio
import psutil
import pytest

from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from prefixmesh.rpc.status import from_rpc_error
from tests.service.test_worker_process import running
from tests.support.servers import eventually
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

GENERATE: Final = "/prefixmesh.v1.Inference/Generate"
SMALL_S: Final = 0.1
"""F64's own bound, for what is small to send."""

LARGE_S: Final = 5.0
"""For 64 MB, whose way through a socket takes most of it; 0.7 to 0.9 s on two cores that fourteen others wanted."""

MOST_GROWTH_BYTES: Final = 50_000_000
TRIES: Final = 3
"""The quickest counts: another process may have had the processor."""

NEARLY_FULL: Final = MAX_MESSAGE_BYTES - 64


def asked(**sampling: Any) -> bytes:
    return pb.GenerateRequest(text="a", sampling=pb.Sampling(**sampling)).SerializeToString()


def repeated(field: bytes, entry: bytes) -> bytes:
    """A message of nearly 64 MB: a prompt, and one entry over and over."""
    body = entry * (NEARLY_FULL // len(entry))
    return pb.GenerateRequest(text="a").SerializeToString() + field + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


SAMPLING: Final = b"\x32"  # field 6, with a length
Body = Callable[[], bytes]
"""Made when it is sent: some are 64 MB."""

SMALL: Final[dict[str, tuple[Body, str]]] = {
    "branches": (lambda: pb.GenerateRequest(text="a", branches=2**31 - 1).SerializeToString(), "branches"),
    "stop": (lambda: asked(stop=["x"] * 1000), "sampling.stop"),
    "long stops": (lambda: asked(stop=["x" * 10_000] * 16), "sampling.stop"),
    "logit_bias": (lambda: asked(logit_bias=dict.fromkeys(range(10_000), 1.0)), "sampling.logit_bias"),
    "deep schema": (
        lambda: asked(json_schema='{"a":' * 100_000 + "0" + "}" * 100_000),
        "sampling.json_schema",
    ),
    "wide schema": (
        lambda: asked(json_schema=json.dumps({"enum": list(range(100_000))})),
        "sampling.json_schema",
    ),
    "regex": (lambda: asked(regex="(a?){100}" * 10_000), "sampling.regex"),
    "extra_key": (
        lambda: pb.GenerateRequest(text="a", extra_key="k" * 10**6).SerializeToString(),
        "extra_key",
    ),
}
LARGE: Final[dict[str, tuple[Body, str]]] = {
    "text": (lambda: pb.GenerateRequest(text="x" * NEARLY_FULL).SerializeToString(), "text"),
    "ids": (
        lambda: pb.GenerateRequest(tokens=pb.TokenPrompt(ids=bytes(NEARLY_FULL))).SerializeToString(),
        "tokens.ids",
    ),
    "resumed": (
        lambda: pb.GenerateRequest(text="a", resumed_output=bytes(NEARLY_FULL)).SerializeToString(),
        "resumed_output",
    ),
    "a schema": (lambda: asked(json_schema=" " * NEARLY_FULL), "sampling.json_schema"),
    "millions of biases": (
        lambda: repeated(SAMPLING, b"\x6a\x07\x08\x01\x15\x00\x00\x00\x00"),
        "sampling.logit_bias",
    ),
    "millions of stops": (lambda: repeated(SAMPLING, b"\x3a\x01x"), "sampling.stop"),
    "millions of messages": (lambda: repeated(b"\x22", b"\x0a\x00"), "chat.messages"),
}


async def refused(channel: grpc.aio.Channel, body: bytes) -> tuple[InvalidRequestError, float]:
    """What this body is refused with, and how long that took."""
    begun = time.perf_counter()
    call: Any = channel.unary_stream(GENERATE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(body, timeout=30).read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequestError), error
    return error, time.perf_counter() - begun


async def test_what_is_made_to_cost_is_refused_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """By field, within the bound, and the worker (its engine too) is as large as before; then it answers."""
    model = make_tiny_model(tmp_path / "tiny")
    async with running(tmp_path, model) as worker, open_channel(worker.address) as channel:
        processes = [psutil.Process(worker.process.pid), worker.engine()]
        await worker.generate("warm up")
        for name in ("text", "millions of stops"):
            await refused(channel, LARGE[name][0]())  # what gRPC keeps to receive with is its own
        before = [process.memory_info().rss for process in processes]
        slow = {}
        for bound_s, times, cases in ((SMALL_S, TRIES, SMALL), (LARGE_S, 1, LARGE)):
            for name, (make, field) in cases.items():
                body = make()
                tries = [await refused(channel, body) for _ in range(times)]
                assert tries[0][0].field.startswith(field), (name, tries[0][0])
                if min(seconds for _, seconds in tries) > bound_s:
                    slow[name] = [seconds for _, seconds in tries]
        assert not slow

        def has_shrunk() -> bool:
            grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
            return max(grown) < MOST_GROWTH_BYTES

        await eventually(has_shrunk)  # the last message's bytes go when its call has been torn down
        assert len((await worker.generate("Hello")).token_ids) == 5
