"""The stream by which a router follows one worker's cache and load (``WatchCache``): opened, read, and opened anew when it must be.

What a message means is the core's business. Here it is decided only when the stream is of no more use: the core asks for a snapshot,
the worker falls silent or ends it, or says what makes no sense. Then a new one begins, at once where the last one had proved the view,
else after a pause that grows. Every end and every change of trust is logged with its reason.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, Self

import grpc.aio

from prefixmesh.errors import InvalidRequestError, PrefixmeshError, UnavailableError, UnsupportedError
from prefixmesh.ids import Incarnation
from prefixmesh.proto.cache_news import decode_news, encode_place
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.fleet_view import TrustChange, silence_of
from prefixmesh.router.report_interval import report_interval_s
from prefixmesh.router.routing import RouterCore
from prefixmesh.router.worker_view import Need, Trust
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.worker_report import WorkerReport

_log = logging.getLogger(__name__)

MOST_OFF: Final = 1.25
"""How far the interval that a stream was opened with may be from what the fleet's size asks for now, up or down. Then it is opened anew,
where it was: so a fleet that grows worker by worker keeps near the bound, and each stream begins anew once in so much growth."""

_RESIZED: Final = "fleet_resized"

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
"""Pauses between streams double from the first to this: a snapshot of a large cache is no small thing to ask for twice a second."""

SILENCES: Final = 1.5
"""A stream is given up after so many times what makes a view stale: first it is believed less, then something is done about it."""

Metadata = tuple[tuple[str, str | bytes], ...]


class CacheStream:
    """Follows one worker. ``follow`` it for as long as one life of the worker is connected to."""

    def __init__(
        self,
        endpoint: Endpoint,
        core: RouterCore,
        watch: Callable[..., Any],
        *,
        metadata: Metadata,
        router_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``watch`` is the stub's ``WatchCache``; ``router_id`` what this router calls itself in tickets."""
        self._clock = clock
        self._endpoint = endpoint
        self._core = core
        self._watch = watch
        self._metadata = metadata
        self._router_id = router_id
        self._has_proved = False
        # The worker's cache does not name its blocks: of its load it tells all the same.
        self._reports_only = False
        self.heard_at = -math.inf
        """When the worker has said anything, by the core's clock."""

    async def follow(self) -> None:
        """Read one stream after the other until cancelled. A worker that tells nothing of its cache is asked for its reports alone, and
        one that does not tell those either is not asked again."""
        self._reports_only = False
        pause_s = FIRST_PAUSE_S
        while True:
            if not self._core.registry.is_like_us(self._endpoint):
                await asyncio.sleep(LONGEST_PAUSE_S)  # refused: what its cache holds is of no use here
                continue
            cause = await self._read_one()
            if cause == UnsupportedError.reason:
                if self._reports_only:
                    await asyncio.Event().wait()
                self._reports_only = True
                continue
            if self._has_proved:
                pause_s = FIRST_PAUSE_S
                if cause in _AT_ONCE:
                    continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _read_one(self) -> str:
        """One stream from its beginning to its end; why it has ended."""
        self._has_proved = False
        detail, is_void = "", False
        try:
            cause = await self._read()
        except TimeoutError:
            cause = "silent"
        except InvalidRequestError as error:
            cause, detail, is_void = "malformed", str(error), True
        except PrefixmeshError as error:
            cause, detail = error.reason, str(error)
        except Exception:  # a bug of ours: the worker goes on serving, and is followed from the beginning
            _log.exception("cache_stream_failed endpoint=%s", self._endpoint)
            cause, is_void = "failed", True
        now = self._clock()
        if cause == UnsupportedError.reason:
            self._core.view.tells_nothing(self._endpoint, now)
            what = "of its load" if self._reports_only else "of its cache"
            _log.warning("worker_tells_nothing %s endpoint=%s detail=%r", what, self._endpoint, detail)
        else:
            self._core.view.ended(self._endpoint, cause.lower(), now, is_void=is_void)
            level = logging.INFO if cause in _PASSING else logging.WARNING
            _log.log(
                level, "cache_stream_ended endpoint=%s cause=%s detail=%r", self._endpoint, cause, detail
            )
        log_trust(self._core)
        return cause

    async def _read(self) -> str:
        """Feed the core until it asks for a snapshot, or reports come too often or too seldom; which it was. Raises what the stream ends in, TimeoutError when it is silent."""
        interval_s = report_interval_s(len(self._core.registry))
        opening = self._core.fleet.opened(
            self._endpoint, interval_s, self._clock(), tells=not self._reports_only
        )
        request = pb.WatchCacheRequest(
            resume_from=encode_place(opening.resume_from),
            report_interval_ms=round(1000 * interval_s),
            router_id=self._router_id,
            reports_only=self._reports_only,
        )
        call = self._watch(request, metadata=self._metadata)
        try:
            async with _Patience(SILENCES * silence_of(interval_s)) as patience:
                while (message := await call.read()) is not grpc.aio.EOF:
                    patience.heard()
                    self.heard_at = now = self._clock()
                    if self._take(message, opening.incarnation, now) is Need.SNAPSHOT:
                        return Need.SNAPSHOT.value
                    if self._has_proved and self._is_off(interval_s):
                        return _RESIZED
            raise UnavailableError("it ended its cache stream")
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def _is_off(self, interval_s: float) -> bool:
        wanted_s = report_interval_s(len(self._core.registry))
        return not interval_s / MOST_OFF < wanted_s < interval_s * MOST_OFF

    def _take(self, message: pb.WatchCacheResponse, incarnation: Incarnation, now: float) -> Need:
        news = decode_news(message)
        if news is None:
            return Need.NOTHING  # of a later version
        need = self._core.stream_news(self._endpoint, incarnation, news, now)
        if isinstance(news, WorkerReport) and need is Need.NOTHING:
            self._has_proved = True
        log_trust(self._core)
        return need


class _Patience:
    """Raises TimeoutError in its block once nothing was heard for so long, or for an eighth less: news come far more often than a timer
    needs to be set anew."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(silence_s)
        self._renew_at = 0.0

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._timeout.__aexit__(*error)

    def heard(self) -> None:
        """Begin to wait anew."""
        now = self._loop.time()
        if now >= self._renew_at:
            self._renew_at = now + self._silence_s / 8
            self._timeout.reschedule(now + self._silence_s)


_AT_ONCE: Final = frozenset({Need.SNAPSHOT.value, _RESIZED})
"""Ends after which the next stream begins without a pause, where this one had proved the view."""

_PASSING: Final = frozenset({*_AT_ONCE, "UNAVAILABLE"})
"""Ends that are no trouble, or told elsewhere, too: by the view's change, or by the link to the worker."""


def log_trust(core: RouterCore) -> None:
    """Tell of every change of trust since the last call."""
    for change in core.view.take_changes():
        _log.log(_level_of(change), "worker_view endpoint=%s from=%s to=%s cause=%s", *_words_of(change))


def _level_of(change: TrustChange) -> int:
    is_loss = change.after in (Trust.STALE, Trust.BLIND) and change.cause != "new_life"
    return logging.WARNING if is_loss else logging.INFO


def _words_of(change: TrustChange) -> tuple[str, str, str, str]:
    return change.endpoint, change.before.value, change.after.value, change.cause
