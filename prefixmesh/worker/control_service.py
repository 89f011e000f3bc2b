"""``WorkerControl``: what members of the fleet ask a worker. Every call must carry the fleet's control token.

A thin shell: what it answers comes from the engine's figures and from ``front_adapters``.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

from prefixmesh.cache.fingerprint import DEFAULT_BLOCK_SIZE, FINGERPRINT_VERSION
from prefixmesh.errors import AuthenticationError, InvalidRequestError, UnsupportedError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation
from prefixmesh.proto.cache_counts import encode_cache_counts
from prefixmesh.proto.cache_news import decode_place, encode_news, encode_pool
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.rpc.draining import Drainer
from prefixmesh.rpc.identity import bearer_token
from prefixmesh.rpc.status import AnyContext
from prefixmesh.wall_clock import unix_ms
from prefixmesh.worker.cache_watchers import CacheWatchers
from prefixmesh.worker.caller import Metadata
from prefixmesh.worker.engine_client import EngineClient
from prefixmesh.worker.engine_stats import TierCounts
from prefixmesh.worker.front_adapters import FrontAdapters
from prefixmesh.worker.kv_copies.books import CopyBooks
from prefixmesh.worker.messages import AdapterInfo, EngineInfo
from prefixmesh.worker.pin_answers import encode_hot, encode_pins
from prefixmesh.worker.prefix_calls import ask
from prefixmesh.worker.prefix_messages import ListHotPrefixes, ListPins, UnpinPrefix
from prefixmesh.worker.recent_stats import RecentStats
from prefixmesh.worker.warm_order import check_pin_id, read_order
from prefixmesh.worker.warming import Warming
from prefixmesh.worker.worker_reports import host_pool_of

TELLING_CACHES: Final = frozenset({"radix", "off"})
"""Kinds of ``--prefix-cache`` of which routers are told the truth: that which says what comes and goes, and that which keeps nothing."""

MAX_HOT_PREFIXES: Final = 1024
"""More than anybody can take over within the time that a leaving worker has."""

MAX_HOT_TOKENS: Final = 4 << 20
"""Of all of them together: their ids fill a quarter of what one message may carry."""

_S_PER_MS: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What stays the same for one life of a worker."""

    worker_id: str
    incarnation: Incarnation
    tokenizer_digest: str
    """Of the tokenizer and the template. A router must use the same, since it sends tokens."""

    template_digest: str = ""
    """Of the chat template alone; empty where there is none."""


class WorkerControlService:
    """Serves ``WorkerControl`` for one engine."""

    def __init__(
        self,
        *,
        secret: FleetSecret,
        identity: WorkerIdentity,
        info: EngineInfo,
        stats: RecentStats,
        engine: EngineClient,
        adapters: FrontAdapters,
        watchers: CacheWatchers,
        drainer: Drainer,
        copies: CopyBooks,
        warming: Warming,
    ) -> None:
        self._control_token = secret.control_token().encode()
        self._identity = identity
        self._info = info
        self._stats = stats
        self._engine = engine
        self._adapters = adapters
        self._watchers = watchers
        self._drainer = drainer
        self._copies = copies
        self._warming = warming

    async def Describe(  # noqa: N802  the service's own name
        self, request: pb.DescribeRequest, context: AnyContext
    ) -> pb.DescribeResponse:
        """Who this worker is and how fast it has been measured to be."""
        self._authenticate(context.invocation_metadata())
        info, identity = self._info, self._identity
        stats, adapters = await asyncio.gather(self._stats.read(), self._adapters.recent())
        host_pool = host_pool_of(stats.tiers)
        return pb.DescribeResponse(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            model=info.model,
            model_revision=info.model_revision,
            context_length=info.context_length,
            page_size=info.page_size,
            prefix_cache=info.prefix_cache,
            max_total_tokens=info.max_total_tokens,
            max_running_requests=info.max_running_requests,
            protocol_version=PROTOCOL_VERSION,
            fingerprint_version=FINGERPRINT_VERSION,
            rates=pb.Rates(
                prefill_tokens_per_s=stats.prefill_tokens_per_s,
                decode_step_ms=stats.decode_step_ms,
                prefill=pb.PrefillRate(
                    linear_ms_per_token=stats.prefill_ms_per_token,
                    quadratic_ms_per_token2=stats.prefill_ms_per_token2,
                ),
                adapter_load_ms=stats.adapter_load_ms,
                load_back_ms_per_token=stats.load_back_ms_per_token,
            ),
            pool=pb.PoolState(
                total_pages=stats.total_pages,
                free_pages=stats.free_pages,
                evictable_pages=stats.evictable_pages,
                protected_pages=stats.protected_pages,
            ),
            running_requests=stats.running,
            queued_requests=stats.queued,
            tokenizer_digest=identity.tokenizer_digest,
            cache=encode_cache_counts(stats.cache),
            adapters=map(_encode_adapter, adapters),
            block_size=DEFAULT_BLOCK_SIZE,
            template_digest=identity.template_digest,
            draining=self._drainer.is_draining,
            unix_ms=unix_ms(),
            host_pool=None if host_pool is None else encode_pool(host_pool),
            tiers=None if host_pool is None else _encode_tiers(stats.tiers),
            kv_layout=self._copies.digest,
            copies=_encode_copies(self._copies),
        )

    async def LoadAdapter(  # noqa: N802  the service's own name
        self, request: pb.LoadAdapterRequest, context: AnyContext
    ) -> pb.LoadAdapterResponse:
        """Make an adapter known under a name. What is malformed, or outside the root, is refused at once."""
        self._authenticate(context.invocation_metadata())
        adapter = await self._adapters.load(request.name, request.path, pinned=request.pinned)
        return pb.LoadAdapterResponse(adapter=_encode_adapter(adapter))

    async def UnloadAdapter(  # noqa: N802  the service's own name
        self, request: pb.UnloadAdapterRequest, context: AnyContext
    ) -> pb.UnloadAdapterResponse:
        """Refuse new requests by this name at once, and answer when the running ones have ended.

        When the call's own deadline passes before that, the adapter leaves all the same; asking again waits for the same end.
        """
        self._authenticate(context.invocation_metadata())
        await self._adapters.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802  the service's own name
        self, request: pb.ListAdaptersRequest, context: AnyContext
    ) -> pb.ListAdaptersResponse:
        """The adapters that requests may name, and the state of their weights after the step that the engine is in."""
        self._authenticate(context.invocation_metadata())
        return pb.ListAdaptersResponse(adapters=map(_encode_adapter, await self._adapters.list_all()))

    async def Flush(  # noqa: N802  the service's own name
        self, request: pb.FlushRequest, context: AnyContext
    ) -> pb.FlushResponse:
        """Empty the prefix cache; running requests go on."""
        self._authenticate(context.invocation_metadata())
        await self._engine.flush()
        return pb.FlushResponse()

    async def Warm(  # noqa: N802  the service's own name
        self, request: pb.WarmRequest, context: AnyContext
    ) -> pb.WarmResponse:
        """Have a prefix cached, and pinned if that is asked for; or an adapter resident. Answers once it is so."""
        self._authenticate(context.invocation_metadata())
        order = read_order(request, self._info)
        warmed = await self._warming.warm(order, context.time_remaining())
        self._watchers.on_load_change()  # so that reports tell soon of what is pinned now
        return pb.WarmResponse(**asdict(warmed))

    async def Unpin(  # noqa: N802  the service's own name
        self, request: pb.UnpinRequest, context: AnyContext
    ) -> pb.UnpinResponse:
        """Let go of a pin: what it alone kept may be evicted from now on."""
        self._authenticate(context.invocation_metadata())
        check_pin_id("pin_id", request.pin_id)
        answer = await ask(
            self._engine, lambda question: UnpinPrefix(question=question, pin_id=request.pin_id)
        )
        self._watchers.on_load_change()
        return pb.UnpinResponse(removed=bool(answer.pins))

    async def ListPins(  # noqa: N802  the service's own name
        self, request: pb.WorkerPinsRequest, context: AnyContext
    ) -> pb.WorkerPinsResponse:
        """All pins of this worker, and what they hold after the step that the engine is in."""
        self._authenticate(context.invocation_metadata())
        return encode_pins(await ask(self._engine, lambda question: ListPins(question=question)))

    async def ListHotPrefixes(  # noqa: N802  the service's own name
        self, request: pb.HotPrefixesRequest, context: AnyContext
    ) -> pb.HotPrefixesResponse:
        """The prefixes that are used most here, for who takes over from this worker."""
        self._authenticate(context.invocation_metadata())
        for name, most in (("max_prefixes", MAX_HOT_PREFIXES), ("max_tokens", MAX_HOT_TOKENS)):
            if not 1 <= (value := getattr(request, name)) <= most:
                raise InvalidRequestError(name, f"must be from 1 to {most}, got {value}")
        question = partial(ListHotPrefixes, max_prefixes=request.max_prefixes, max_tokens=request.max_tokens)
        return encode_hot(await ask(self._engine, lambda number: question(question=number)))

    async def Drain(  # noqa: N802  the service's own name
        self, request: pb.DrainRequest, context: AnyContext
    ) -> pb.DrainResponse:
        """Take nothing new, and answer when nothing runs any more or the grace is over; or take calls again. What was drained stays so when
        the caller leaves."""
        self._authenticate(context.invocation_metadata())
        if request.grace_ms < 0:
            raise InvalidRequestError("grace_ms", f"must not be negative, got {request.grace_ms}")
        if request.undo:
            return pb.DrainResponse(running_requests=await self._drainer.undo())
        return pb.DrainResponse(running_requests=await self._drainer.drain(request.grace_ms * _S_PER_MS))

    async def WatchCache(  # noqa: N802  the service's own name
        self, request: pb.WatchCacheRequest, context: AnyContext
    ) -> AsyncIterator[pb.WatchCacheResponse]:
        """What the cache holds and how busy the worker is, for as long as the caller listens."""
        self._authenticate(context.invocation_metadata())
        if self._info.prefix_cache not in TELLING_CACHES and not request.reports_only:
            raise UnsupportedError(
                f"prefix_cache={self._info.prefix_cache} tells nothing of its blocks; start the worker with radix"
            )
        if request.report_interval_ms < 0:
            raise InvalidRequestError(
                "report_interval_ms", f"must not be negative, got {request.report_interval_ms}"
            )
        interval_s = request.report_interval_ms * _S_PER_MS
        reading = self._watchers.read(
            decode_place(request), interval_s, request.router_id, reports_only=request.reports_only
        )
        async with aclosing(reading) as news:
            async for one in news:
                yield encode_news(one)

    def _authenticate(self, metadata: Metadata | None) -> None:
        token = bearer_token(dict(metadata or ()))
        if not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._control_token):
            raise AuthenticationError("this is not the fleet's control token")


def _encode_tiers(tiers: TierCounts) -> pb.TierCounts:
    return pb.TierCounts(
        **{field.name: getattr(tiers, field.name) for field in pb.TierCounts.DESCRIPTOR.fields}
    )


def _encode_copies(copies: CopyBooks) -> pb.CopyCounts | None:
    if copies.layout is None:
        return None
    return pb.CopyCounts(
        **{field.name: getattr(copies, field.name) for field in pb.CopyCounts.DESCRIPTOR.fields}
    )


def _encode_adapter(adapter: AdapterInfo) -> pb.Adapter:
    return pb.Adapter(
        name=adapter.name,
        digest=adapter.digest,
        rank=adapter.rank,
        size_bytes=adapter.size_bytes,
        resident=adapter.resident,
        pinned=adapter.pinned,
        running_requests=adapter.running_requests,
    )
