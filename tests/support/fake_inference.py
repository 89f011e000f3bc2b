"""An Inference server without a model, for tests of callers: it answers what it is told and remembers what it was asked.

It is a router and its only worker at once: ``Route`` names its own address, or those it is told.

Its answer to a prompt is ``words``, one token and one delta each; every branch says them, in turns. Everything else is a knob: hold still after some deltas, fail,
end too early, send odd pieces.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc.aio

from prefixmesh import tokens
from prefixmesh.errors import PrefixmeshError, UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1 import router_pb2
from prefixmesh.rpc.server import add_service, make_server
from prefixmesh.rpc.status import AnyContext
from prefixmesh.ticket import TICKET_METADATA

MODEL = "fake"
CONTEXT_LENGTH = 4096


@dataclass(kw_only=True)
class FakeInference:
    """The server; use it in ``async with``. Knobs may be turned between calls."""

    words: tuple[str, ...] = ("The", " quick", " brown", " fox")
    prompt_tokens: int = 1204
    cached_tokens: int = 1152
    reason: pb.FinishReason = pb.FINISH_REASON_STOP
    saved: pb.PrefillSavings | None = None
    """What it tells of the prefill that the cache saved; nothing, as servers of an earlier version, when None."""

    hold_after: int | None = None
    """After this many deltas the answer stands still until the call is cancelled."""

    dies_at: int | None = None
    """When this token is due, the server vanishes: connections break, and new ones are refused. Callers may miss what they had not read."""

    fails_at: int | None = None
    """When this token is due, the answer ends in UnavailableError."""

    error: PrefixmeshError | None = None
    """Raised in place of ``Finished``, or at once by the unary calls."""

    error_after_end: PrefixmeshError | None = None
    """Raised behind ``Finished``."""

    error_for: Callable[[pb.GenerateRequest], PrefixmeshError | None] = lambda request: None
    """What one request, as its caller asked, is refused with at once."""

    events: tuple[pb.GenerateResponse, ...] | None = None
    """Sent in place of the usual answer."""

    serves_route: bool = True
    """Whether it knows ``Route``; routers of earlier versions and workers do not. Before it starts."""

    routes: tuple[str, ...] = ()
    """Addresses that ``Route`` gives, the first that is not excluded; its own when empty."""

    route_error: PrefixmeshError | None = None
    """What every ``Route`` ends in."""

    requests: list[pb.GenerateRequest] = field(default_factory=list)
    """As callers asked, by ``Generate`` or ``Route``."""

    ticketed: list[pb.GenerateRequest] = field(default_factory=list)
    """What came to ``Generate`` with a ticket."""

    questions: list[router_pb2.RouteRequest] = field(default_factory=list)
    """What came to ``Route``."""

    given_back: list[str] = field(default_factory=list)
    """Requests whose decisions came to nothing, told without asking for another."""

    routing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a ``Route`` has come in."""

    hold_route: bool = False
    """``Route`` stands still until it is cancelled."""

    aborted: list[str] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call stands still."""

    died: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has vanished."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call was cancelled by the other side."""

    address: str = ""
    """Where it listens; before it starts: the port to listen at again."""

    _routed: dict[object, pb.GenerateRequest] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        self._server: grpc.aio.Server = make_server()
        add_service(self._server, pb.DESCRIPTOR.services_by_name["Inference"], self)
        if self.serves_route:
            add_service(self._server, router_pb2.DESCRIPTOR.services_by_name["Router"], self, partial=True)
        at = self.address or "127.0.0.1:0"
        self.address = f"127.0.0.1:{self._server.add_insecure_port(at)}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_now()

    async def stop_now(self) -> None:
        """Vanish: running calls are torn down."""
        await self._server.stop(None)

    async def Generate(
        self, request: pb.GenerateRequest, context: AnyContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        ticket = dict(context.invocation_metadata() or ()).get(TICKET_METADATA)
        (self.requests if ticket is None else self.ticketed).append(request)
        self._remember(context)
        refusal = self.error_for(self._routed.get(ticket, request))
        if refusal is not None:
            raise refusal
        try:
            async for response in self._answer(request):
                yield response
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Route(self, question: router_pb2.RouteRequest, context: AnyContext) -> router_pb2.RouteResponse:
        if question.request.WhichOneof("prompt") is None:
            self.given_back.append(question.unused_request_id)
            return router_pb2.RouteResponse()
        self.requests.append(question.request)
        self.questions.append(question)
        self._remember(context)
        self.routing.set()
        if self.hold_route:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if self.route_error is not None:
            raise self.route_error
        left = [one for one in self.routes or (self.address,) if one not in question.exclude]
        if not left:
            raise UnavailableError("no worker is ready")
        number = len(self.questions)
        ticket = b"ticket %d" % number
        self._routed[ticket] = question.request
        return router_pb2.RouteResponse(
            address=left[0],
            ticket=ticket,
            prompt_ids=b"" if question.request.HasField("tokens") else tokens.pack([1, 2, 3]),
            routing=pb.Routing(policy="cost", predicted_cached_tokens=1088, predicted_first_token_ms=80.0),
            request_id=f"request-{number}",
            model="routed-model",
            retokenized_tokens=5,
        )

    async def Abort(self, request: pb.AbortRequest, context: AnyContext) -> pb.AbortResponse:
        self._remember(context)
        self.aborted.append(request.request_id)
        return pb.AbortResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: AnyContext) -> pb.TokenizeResponse:
        self._remember(context)
        if self.error is not None:
            raise self.error
        text = request.text or "".join(message.content for message in request.chat.messages)
        return pb.TokenizeResponse(ids=tokens.pack([ord(char) for char in text]))

    async def ListModels(self, request: pb.ListModelsRequest, context: AnyContext) -> pb.ListModelsResponse:
        self._remember(context)
        model = pb.Model(name=MODEL, revision="r1", context_length=CONTEXT_LENGTH, adapters=["poet"])
        return pb.ListModelsResponse(models=[model])

    async def _answer(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        if self.events is not None:
            for event in self.events:
                yield event
            return
        branches, cached = max(1, request.branches), pb.CachedTokens(device=self.cached_tokens)
        resumed = request.resumed_branches or [request.resumed_output] * branches
        begun = [tokens.count(packed) for packed in resumed]
        yield started(prompt_tokens=self.prompt_tokens, cached_tokens=cached)
        for position, word in enumerate(self.words):
            if position == self.hold_after:
                self.holding.set()
                await asyncio.Event().wait()
            await self._fail(position)
            for branch in range(branches):
                if position >= begun[branch]:
                    yield delta(position, word, branch=branch)
        await self._fail(len(self.words))
        for branch in range(branches if branches > 1 else 0):
            computed = len(self.words) - begun[branch]
            ended = pb.BranchEnded(branch=branch, reason=self.reason, completion_tokens=computed)
            yield pb.GenerateResponse(branch_ended=ended)
        if self.error is not None:
            raise self.error
        yield finished(
            branches * len(self.words) - sum(begun),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached,
            reason=self.reason,
            saved=self.saved,
        )
        if self.error_after_end is not None:
            raise self.error_after_end

    async def _fail(self, position: int) -> None:
        if position == self.fails_at:
            raise UnavailableError("the engine died")
        if position == self.dies_at:
            self._dying = asyncio.ensure_future(self._vanish())
            await asyncio.Event().wait()

    async def _vanish(self) -> None:
        await self.stop_now()
        self.died.set()

    def _remember(self, context: AnyContext) -> None:
        self.metadata.append(dict(context.invocation_metadata() or ()))


@contextmanager
def refusing_address() -> Iterator[str]:
    """An address where connections are refused: bound, so that nobody else takes it, and never listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def started(
    *, prompt_tokens: int = 4, cached_tokens: pb.CachedTokens | None = None, request_id: str = "req-1"
) -> pb.GenerateResponse:
    """A ``Started`` of worker-1."""
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=request_id,
            worker_id="worker-1",
            model=MODEL,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            namespace_digest="0a0b0c0d",
            seed=7,
            routing=pb.Routing(policy="cost", predicted_cached_tokens=1088, predicted_first_token_ms=80.0),
        )
    )


def delta(position: int, text: str, *token_ids: int, branch: int = 0) -> pb.GenerateResponse:
    """A ``Delta``; its one token is ``100 + position`` unless others are given."""
    packed = tokens.pack(token_ids or (100 + position,))
    return pb.GenerateResponse(delta=pb.Delta(position=position, token_ids=packed, text=text, branch=branch))


def finished(
    completion_tokens: int,
    *,
    prompt_tokens: int = 4,
    cached_tokens: pb.CachedTokens | None = None,
    reason: pb.FinishReason = pb.FINISH_REASON_STOP,
    saved: pb.PrefillSavings | None = None,
) -> pb.GenerateResponse:
    """A ``Finished``."""
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=reason,
            usage=pb.Usage(
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                completion_tokens=completion_tokens,
                retokenized_tokens=3,
                prefill_saved=saved,
            ),
            timings=pb.Timings(
                queued_ms=1.0, prefill_ms=20.0, first_token_ms=21.0, decode_ms=30.0, load_back_ms=5.0
            ),
        )
    )
