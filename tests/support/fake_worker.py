"""A worker without a model: it speaks the real gRPC, answers what it is told, and can wait, refuse, go silent and die.

Its cache is the longest common prefix with what it has computed in the namespace, its tokens depend on the prompt alone; of the cache's
blocks and of its requests it tells as a real one does (``told_blocks``).
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixmesh.cache.fingerprint import FINGERPRINT_VERSION
from prefixmesh.cache.namespace import short_digest
from prefixmesh.errors import (
    AdapterChangedError,
    AuthenticationError,
    InvalidRequestError,
    PrefixmeshError,
    UnsupportedError,
)
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation
from prefixmesh.proto import codec
from prefixmesh.proto.cache_news import encode_pool
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import worker_control_pb2 as control
from prefixmesh.requests import TokenPrompt
from prefixmesh.rpc.identity import bearer_token
from prefixmesh.rpc.server import add_service, make_server
from prefixmesh.rpc.status import AnyContext
from prefixmesh.ticket import TICKET_METADATA, Ticket, verify
from prefixmesh.tokens import pack, unpack
from tests.support.told_blocks import ToldBlocks

ANSWER_TOKENS = 4
MODEL, REVISION, TOKENIZER_DIGEST = "tiny", "revision-1", "tokenizer-1"


def deterministic_answer(tokens: bytes) -> list[int]:
    """A few ids that depend on every token of the prompt."""
    digest = hashlib.blake2b(tokens, digest_size=ANSWER_TOKENS).digest()
    return [97 + byte % 26 for byte in digest]


def common_prefix_tokens(one: bytes, other: bytes) -> int:
    """Leading tokens that two packed sequences share."""
    a, b = unpack(one), unpack(other)
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differs[0]) if len(differs) else shorter


class Gate:
    """Something that waits until it is let through; open from the start."""

    def __init__(self) -> None:
        self.waiting = 0
        self._is_open = True
        self._permits = 0
        self._changed = asyncio.Event()

    def shut(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._changed.set()

    def let_one(self) -> None:
        """Let one through that waits, or the next that comes."""
        self._permits += 1
        self._changed.set()

    async def wait(self) -> None:
        self.waiting += 1
        try:
            while not self._is_open and not self._permits:
                self._changed.clear()
                await self._changed.wait()
            self._permits = max(0, self._permits - 1)
        finally:
            self.waiting -= 1


@dataclass(frozen=True)
class Received:
    """One Generate call as it arrived."""

    ticket: Ticket
    tokens: bytes
    message: pb.GenerateRequest
    time_left_s: float | None


@dataclass
class Script:
    """What the worker does; may be changed at any time."""

    answer: Callable[[bytes], Sequence[int]] = deterministic_answer
    decode: Callable[[Sequence[int]], str] = lambda ids: "".join(chr(97 + i % 26) for i in ids)
    error: PrefixmeshError | None = None
    """Raised instead of an answer."""

    breaks_with: PrefixmeshError | None = None
    """Raised instead of the second token."""

    dies_before: int | None = None
    """Whoever comes to this token of an answer dies instead, and nobody after that; the number of all of them stands for its end."""

    goes_on_with: PrefixmeshError | None = None
    """Raised instead of going on with an answer that its caller has a part of."""

    ignores_resumed_branches: bool = False
    """As workers of an earlier version, which begin several answers anew."""

    before_start: Gate = field(default_factory=Gate)
    before_delta: Gate = field(default_factory=Gate)
    """Each delta but the first waits here."""

    before_describe: Gate = field(default_factory=Gate)

    ends_early: bool = False
    """End the stream with OK and no Finished."""

    cached_tokens: int | None = None
    """Told instead of what is true."""

    found_on_host: bool = False
    """What it finds is told to have come from its host tier."""

    tiers: control.TierCounts | None = None
    """What it tells of its host tier's moves when it is asked; nothing, as workers without one, when None."""

    counts: control.CacheCounts | None = None
    """What it tells of its cache; nothing, as workers of an earlier version, when None."""

    adapters: dict[str, str] = field(default_factory=dict)
    """Content digests of its adapters by name; as a real worker it refuses a ticket that was made with another."""

    model_revision: str = REVISION
    tokenizer_digest: str = TOKENIZER_DIGEST
    context_length: int = 100_000
    prefill_tokens_per_s: float = 2000.0
    decode_step_ms: float = 30.0
    prefix_cache: str = "radix"
    """``radix`` tells of its blocks; others do not."""

    block_size: int = 0
    """What it says that its blocks have; 0: it does not tell."""


class _Health(health.aio.HealthServicer):
    """Whose single answers may be held back, beside its streams."""

    def __init__(self, worker: "FakeWorker") -> None:
        super().__init__()
        self._worker = worker

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        self._worker.checks_begun += 1
        await self._worker.before_check.wait()
        return await super().Check(request, context)


class FakeWorker:
    """See the module. ``start`` binds a free port (or the one it had), ``kill`` ends it like a crash."""

    def __init__(self, secret: FleetSecret, worker_id: str = "w0", script: Script | None = None) -> None:
        self.secret = secret
        self.worker_id = worker_id
        self.script = script or Script()
        self.port = 0
        self.incarnation = Incarnation(secrets.randbits(64))
        self.received: list[Received] = []
        self.running = 0
        self.cancelled = 0
        self.described = 0
        self.aborted: list[str] = []
        self._dying: asyncio.Task[None] | None = None
        self._seen: dict[bytes, list[bytes]] = {}
        self.told = ToldBlocks()
        self._server: grpc.aio.Server | None = None
        self.before_check = Gate()
        self.checks_begun = 0
        self.health = _Health(self)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> "FakeWorker":
        self._server = make_server()
        self.health = _Health(self)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        add_service(self._server, pb.DESCRIPTOR.services_by_name["Inference"], self)
        add_service(self._server, control.DESCRIPTOR.services_by_name["WorkerControl"], self, partial=True)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return self

    async def kill(self) -> None:
        """Every connection breaks at once; what was cached is gone."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        self._seen.clear()
        self.told = ToldBlocks()

    async def restart(self) -> None:
        """A new life at the same address."""
        await self.kill()
        self.incarnation = Incarnation(secrets.randbits(64))
        await self.start()

    async def set_serving(self, *, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        await self.health.set("", states.SERVING if serving else states.NOT_SERVING)

    async def Generate(
        self, message: pb.GenerateRequest, context: AnyContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        ticket = self._ticket_of(context)
        prompt = codec.decode_generate(message).prompt
        assert isinstance(prompt, TokenPrompt), "a router sends tokens"
        tokens = prompt.packed
        self.received.append(Received(ticket, tokens, message, context.time_remaining()))
        with self.told.running(ticket):
            async with aclosing(self._answer(message, ticket, tokens)) as events:
                async for event in events:
                    yield event

    async def _answer(
        self, message: pb.GenerateRequest, ticket: Ticket, tokens: bytes
    ) -> AsyncGenerator[pb.GenerateResponse]:
        self.running += 1
        finished = False
        try:
            if self.script.error is not None:
                raise self.script.error
            if self.script.goes_on_with is not None and message.resumed_output:
                raise self.script.goes_on_with
            if self.script.adapters.get(message.adapter, "") != ticket.adapter_digest:
                raise AdapterChangedError("it has other content here")
            await self.script.before_start.wait()
            cached = self._cache(ticket.namespace, tokens)
            yield pb.GenerateResponse(started=self._started(message, ticket, tokens, cached))
            answer = self._limited(message, self.script.answer(tokens))
            brought = self._brought(message, answer)
            steps = [
                (position, branch)
                for position in range(len(answer))
                for branch, begun in enumerate(brought)
                if position >= begun
            ]
            for number, (position, branch) in enumerate(steps):
                await self._die_before(number)
                if number:
                    await self.script.before_delta.wait()
                    if self.script.breaks_with is not None:
                        raise self.script.breaks_with
                token_id = answer[position] + branch
                delta = pb.Delta(
                    position=position,
                    token_ids=pack([token_id]),
                    text=self.script.decode([token_id]),
                    branch=branch,
                )
                yield pb.GenerateResponse(delta=delta)
            await self._die_before(len(steps))
            self._cache(ticket.namespace, tokens + pack(answer[:-1]))
            finished = True
            for branch, begun in enumerate(brought if len(brought) > 1 else ()):
                ended = pb.BranchEnded(
                    branch=branch,
                    reason=pb.FINISH_REASON_LENGTH,
                    completion_tokens=len(answer) - begun,
                )
                yield pb.GenerateResponse(branch_ended=ended)
            if not self.script.ends_early:
                usage = pb.Usage(
                    prompt_tokens=len(tokens) // 4,
                    cached_tokens=self._cached_tokens(cached),
                    completion_tokens=len(steps),
                    resumed_tokens=sum(brought),
                )
                yield pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=usage))
        finally:
            self.running -= 1
            if not finished and self.script.error is None:
                self.cancelled += 1

    async def _die_before(self, number: int) -> None:
        if number == self.script.dies_before:
            self.script.dies_before = None  # so that who shares the script goes on with the answer
            self._dying = asyncio.create_task(self.kill())
            await asyncio.Event().wait()

    def _brought(self, message: pb.GenerateRequest, answer: Sequence[int]) -> list[int]:
        """By branch, how many tokens of its answer the caller has already; they must be the answer's."""
        brought = message.resumed_branches or [message.resumed_output] * max(1, message.branches)
        if self.script.ignores_resumed_branches and message.resumed_branches:
            brought = [b""] * message.branches
        for branch, packed in enumerate(brought):
            assert [int(one) - branch for one in unpack(packed)] == list(answer)[: len(packed) // 4]
        return [len(packed) // 4 for packed in brought]

    async def WatchCache(
        self, request: control.WatchCacheRequest, context: AnyContext
    ) -> AsyncIterator[control.WatchCacheResponse]:
        if self.script.prefix_cache != "radix":
            raise UnsupportedError("it tells nothing of its blocks")
        async with aclosing(self.told.watch(request)) as messages:
            async for message in messages:
                yield message

    async def Describe(
        self, request: control.DescribeRequest, context: AnyContext
    ) -> control.DescribeResponse:
        if bearer_token(dict(context.invocation_metadata() or ())) != self.secret.control_token():
            raise AuthenticationError("wrong control token")
        self.described += 1
        script = self.script
        await script.before_describe.wait()
        return control.DescribeResponse(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            model=MODEL,
            model_revision=script.model_revision,
            tokenizer_digest=script.tokenizer_digest,
            context_length=script.context_length,
            page_size=1,
            prefix_cache=script.prefix_cache,
            block_size=script.block_size,
            max_running_requests=64,
            protocol_version=codec.PROTOCOL_VERSION,
            fingerprint_version=FINGERPRINT_VERSION,
            rates=control.Rates(
                prefill_tokens_per_s=script.prefill_tokens_per_s, decode_step_ms=script.decode_step_ms
            ),
            cache=script.counts,
            adapters=[control.Adapter(name=name, digest=digest) for name, digest in script.adapters.items()],
            host_pool=None if self.told.host_pool is None else encode_pool(self.told.host_pool),
            tiers=script.tiers,
        )

    async def LoadAdapter(self, message: control.LoadAdapterRequest, context: AnyContext) -> None:
        raise AssertionError("a router loads nothing")

    async def UnloadAdapter(self, message: control.UnloadAdapterRequest, context: AnyContext) -> None:
        raise AssertionError("a router unloads nothing")

    async def ListAdapters(self, message: control.ListAdaptersRequest, context: AnyContext) -> None:
        raise AssertionError("a router reads what Describe tells")

    async def Flush(self, message: control.FlushRequest, context: AnyContext) -> None:
        raise AssertionError("a router empties no cache")

    async def Drain(self, message: control.DrainRequest, context: AnyContext) -> None:
        raise AssertionError("a router drains no worker unasked")

    async def Abort(self, message: pb.AbortRequest, context: AnyContext) -> pb.AbortResponse:
        self.aborted.append(message.request_id)
        return pb.AbortResponse()

    async def Tokenize(self, message: pb.TokenizeRequest, context: AnyContext) -> pb.TokenizeResponse:
        raise AssertionError("a router tokenises by itself")

    async def ListModels(self, message: pb.ListModelsRequest, context: AnyContext) -> pb.ListModelsResponse:
        raise AssertionError("a router knows its model")

    def _ticket_of(self, context: AnyContext) -> Ticket:
        notes = [v for name, v in context.invocation_metadata() or () if name == TICKET_METADATA]
        if len(notes) != 1 or not isinstance(notes[0], bytes):
            raise AuthenticationError("one ticket is needed")
        return verify(notes[0], self.secret, self.incarnation)

    def _started(self, message: pb.GenerateRequest, ticket: Ticket, tokens: bytes, cached: int) -> pb.Started:
        told = cached if self.script.cached_tokens is None else self.script.cached_tokens
        return pb.Started(
            request_id=ticket.request_id,
            worker_id=self.worker_id,
            model=MODEL,
            prompt_tokens=len(tokens) // 4,
            cached_tokens=self._cached_tokens(told),
            namespace_digest=short_digest(ticket.namespace),
            seed=message.sampling.seed if message.sampling.HasField("seed") else secrets.randbits(31),
            adapter_digest=ticket.adapter_digest,
        )

    def _cached_tokens(self, found: int) -> pb.CachedTokens:
        return pb.CachedTokens(host=found) if self.script.found_on_host else pb.CachedTokens(device=found)

    def _cache(self, namespace: bytes, tokens: bytes) -> int:
        """Tokens of ``tokens`` that were computed before in this namespace; now all of them are."""
        if self.script.prefix_cache == "off":
            return 0
        seen = self._seen.setdefault(namespace, [])
        longest = max((common_prefix_tokens(old, tokens) for old in seen), default=0)
        seen.append(tokens)
        self.told.computed(namespace, tokens)
        return min(longest, len(tokens) // 4 - 1)

    def _limited(self, message: pb.GenerateRequest, ids: Sequence[int]) -> list[int]:
        if not message.HasField("sampling") or not message.sampling.HasField("max_tokens"):
            return list(ids)
        if message.sampling.max_tokens < 0:
            raise InvalidRequestError("sampling.max_tokens", "must not be negative")
        return list(ids)[: message.sampling.max_tokens]
