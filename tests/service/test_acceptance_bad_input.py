"""Bad input, at a real worker and through a router before it: told what and where, at once, and the next request works."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import InvalidRequestError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.server import RouterServer
from prefixmesh.router_config import RouterConfig
from prefixmesh.rpc.channel import open_channel
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.tokens import pack
from tests.support.servers import answer_of, eventually, real_worker
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model

GENERATE = "/prefixmesh.v1.Inference/Generate"
AT_MOST_S = 0.1
TRIES = 3
"""The quickest counts: another process may have had the processor."""

CONTEXT = 4096
GOOD = pb.GenerateRequest(text="Hello", sampling=pb.Sampling(temperature=0, max_tokens=2, ignore_eos=True))
NAN = float("nan")


def asked(**sampling: Any) -> bytes:
    return pb.GenerateRequest(text="Hello", sampling=pb.Sampling(**sampling)).SerializeToString()


def broken_text(request: pb.GenerateRequest) -> bytes:
    """The request with a string that is not UTF-8 where it says MARK."""
    return request.SerializeToString().replace(b"MARK", b"\xc3\x28\xa0\xa1")


def tokens(ids: list[int]) -> bytes:
    return pb.GenerateRequest(tokens=pb.TokenPrompt(ids=pack(ids))).SerializeToString()


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=turns))


BAD: dict[str, tuple[bytes, str, str]] = {
    # name: body, field, the limit or what is allowed
    "missing prompt": (b"", "prompt", "required"),
    "empty text": (pb.GenerateRequest(text="").SerializeToString(), "text", "empty"),
    "empty chat": (chat().SerializeToString(), "chat.messages", "empty"),
    "empty ids": (tokens([]), "tokens.ids", "empty"),
    "unknown role": (chat(("robot", "hi")).SerializeToString(), "chat.messages[0].role", "assistant"),
    "half an id": (
        pb.GenerateRequest(tokens=pb.TokenPrompt(ids=b"abc")).SerializeToString(),
        "tokens.ids",
        "4",
    ),
    "id beyond the vocabulary": (tokens([VOCAB_SIZE]), "tokens.ids", str(VOCAB_SIZE)),
    "text too long": (pb.GenerateRequest(text="word " * 200_000).SerializeToString(), "text", str(CONTEXT)),
    "ids too long": (tokens([5] * (CONTEXT + 1)), "tokens.ids", str(CONTEXT)),
    "answer too long": (asked(max_tokens=CONTEXT), "sampling.max_tokens", str(CONTEXT)),
    "unknown model": (
        pb.GenerateRequest(text="a", model="gpt-9").SerializeToString(),
        "model",
        "tiny",
    ),
    "unknown adapter": (pb.GenerateRequest(text="a", adapter="x").SerializeToString(), "adapter", "'x'"),
    "temperature -1": (asked(temperature=-1), "sampling.temperature", "at least 0"),
    "temperature NaN": (asked(temperature=NAN), "sampling.temperature", "at least 0"),
    "top_p 0": (asked(top_p=0), "sampling.top_p", "above 0"),
    "top_p NaN": (asked(top_p=NAN), "sampling.top_p", "at most 1"),
    "top_k -1": (asked(top_k=-1), "sampling.top_k", "at least 0"),
    "min_p -1": (asked(min_p=-1), "sampling.min_p", "at least 0"),
    "min_p NaN": (asked(min_p=NAN), "sampling.min_p", "at most 1"),
    "max_tokens -1": (asked(max_tokens=-1), "sampling.max_tokens", "at least 0"),
    "max_tokens 2**31": (asked(max_tokens=2**31), "sampling.max_tokens", "at most"),
    "seed -1": (asked(seed=-1), "sampling.seed", "at least 0"),
    "stop id -1": (asked(stop_token_ids=[-1]), "sampling.stop_token_ids", "at least 0"),
    "1,000 stops": (asked(stop=["x"] * 1000), "sampling.stop", "at most"),
    "huge logit_bias": (
        asked(logit_bias=dict.fromkeys(range(10_000), 1.0)),
        "sampling.logit_bias",
        "at most 1024",
    ),
    "logit_bias beyond the vocabulary": (
        asked(logit_bias={VOCAB_SIZE: 1.0}),
        "sampling.logit_bias",
        str(VOCAB_SIZE),
    ),
    "deep JSON": (asked(json_schema='{"a":' * 5000 + "0" + "}" * 5000), "sampling.json_schema", "at most 64"),
    "large JSON": (asked(json_schema=" " * 2**20), "sampling.json_schema", "at most 32768"),
    "large regex": (asked(regex="(" * 2**20), "sampling.regex", "at most 4096"),
    "resumed beyond max_tokens": (
        pb.GenerateRequest(
            text="a", sampling=pb.Sampling(max_tokens=2), resumed_output=pack([5, 5, 5])
        ).SerializeToString(),
        "resumed_output",
        "at most max_tokens, 2",
    ),
    "text not UTF-8": (broken_text(pb.GenerateRequest(text="MARK")), "text", "UTF-8"),
    "extra_key not UTF-8": (
        broken_text(pb.GenerateRequest(text="a", extra_key="MARK")),
        "extra_key",
        "UTF-8",
    ),
    "chat not UTF-8": (broken_text(chat(("user", "MARK"))), "chat.messages.content", "UTF-8"),
}


@asynccontextmanager
async def both(folder: Path) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """Channels to a worker, and to a router before it."""
    model = str(make_tiny_model(folder / "tiny"))
    settings = EngineConfig(model=model, device="cpu", dtype="float32", max_total_tokens=CONTEXT, threads=1)
    async with real_worker(settings) as worker:
        router = RouterServer(RouterConfig(workers=(worker.bound.address,), model=model), worker.secret)
        bound = await router.start()
        try:
            await eventually(lambda: len(router.core.registry.ready) == 1)
            async with open_channel(bound.address) as channel:
                yield {"worker": worker.channel, "router": channel}
        finally:
            await router.stop(0.0)


async def refused(channel: grpc.aio.Channel, body: bytes) -> tuple[grpc.aio.AioRpcError, float]:
    """The error that this body ends in, and how long that took."""
    begun = time.perf_counter()
    call: Any = channel.unary_stream(GENERATE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(body, timeout=10).read()
    return caught.value, time.perf_counter() - begun


async def still_serves(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_stream(
        GENERATE,
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    answer = answer_of([message async for message in call(GOOD, timeout=10)])
    assert len(answer.token_ids) == 2


@pytest.mark.slow
async def test_bad_input_is_refused_by_field_and_limit_at_once(tmp_path: Path) -> None:
    """F58, F59: INVALID_ARGUMENT that names the field and the limit, within 100 ms; and the next request is served."""
    slow = {}
    async with both(tmp_path) as channels:
        for where, channel in channels.items():
            await still_serves(channel)
            for name, (body, field, limit) in BAD.items():
                tries = [await refused(channel, body) for _ in range(TRIES)]
                error = tries[0][0]
                mapped = from_rpc_error(error)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (where, name, error)
                assert isinstance(mapped, InvalidRequestError), (where, name, error)
                assert mapped.field == field, (where, name, str(mapped))
                assert limit in str(mapped), (where, name, str(mapped))
                quickest = min(seconds for _, seconds in tries)
                if quickest > AT_MOST_S:
                    slow[where, name] = quickest
                await still_serves(channel)
    assert not slow


@pytest.mark.slow
async def test_bytes_that_are_no_message_are_refused_at_once(tmp_path: Path) -> None:
    """INVALID_ARGUMENT, not INTERNAL, within 100 ms; no field can be named where none can be read."""
    async with both(tmp_path) as channels:
        for channel in channels.values():
            for body in (b"\xff" * 5, b"\x0a\xff\xff\xff\xff\x0f", b"\x80", b"\x0a\x05ab"):
                tries = [await refused(channel, body) for _ in range(TRIES)]
                assert tries[0][0].code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "well-formed" in (tries[0][0].details() or "")
                assert min(seconds for _, seconds in tries) < AT_MOST_S
            await still_serves(channel)
