"""The plain reader of ``WatchCache``: it holds what the stream says in a ``CacheView``, and is strict about the stream's order."""

from typing import Any

import grpc.aio

from prefixmesh.cache.view import CacheView, ViewResult
from prefixmesh.proto.cache_news import EventBatch, News, decode_news, encode_place
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.rpc.status import from_rpc_error
from prefixmesh.worker_report import WorkerReport
from tests.support.servers import Worker

REPORT_MS = 50


class Follower:
    """One stream, followed message by message. Every event must apply; nothing is ever missed, doubled or out of order."""

    def __init__(
        self,
        worker: Worker,
        resume_from: Any = None,
        view: CacheView | None = None,
        *,
        router_id: str = "",
        report_ms: int = REPORT_MS,
    ) -> None:
        request = pb.WatchCacheRequest(
            resume_from=encode_place(resume_from), report_interval_ms=report_ms, router_id=router_id
        )
        self.call = worker.control.WatchCache(request, metadata=worker.control_metadata())
        self.view = CacheView() if view is None else view
        self.kinds: list[str] = []
        self.report: WorkerReport | None = None

    async def step(self) -> News:
        """Take the next message in; the error of our tree when the stream ends in one."""
        try:
            message = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        assert message is not grpc.aio.EOF
        self.kinds.append(message.WhichOneof("news"))
        news = decode_news(message)
        assert news is not None
        take_in(self.view, news)
        if isinstance(news, WorkerReport):
            self.report = news
        return news

    async def until(self, condition: Any) -> None:
        """Follow until a condition holds."""
        while not condition():
            await self.step()

    async def next_report(self) -> WorkerReport:
        """Follow up to the next report."""
        while True:
            news = await self.step()
            if isinstance(news, WorkerReport):
                return news

    def close(self) -> None:
        self.call.cancel()


def take_in(view: CacheView, news: News) -> None:
    """Apply a message to a view: events must follow, and a report must agree with what came before it."""
    if isinstance(news, EventBatch):
        assert {view.apply(event) for event in news.events} == {ViewResult.APPLIED}
    elif isinstance(news, WorkerReport):
        assert view.agrees(news.summary), (view, news.summary)
    else:
        view.load(news)
