"""What is learned late of a worker says nothing of how it is now."""

import asyncio
import logging
from typing import Any

import pytest

from prefixmesh.router.frame_stream import FrameStream
from prefixmesh.router.worker_health import FAILURES_OUT
from tests.support.fake_worker import Script
from tests.support.router_kit import running_router, token_request
from tests.support.servers import eventually, records_of, rest_of

TOKENS, TEXT = 600, "x" * 20_000
"""More than what stands between worker and caller takes in: who does not read holds up the stream."""


class HeldUp:
    """Whether so many streams have waited for their callers at each of the last looks."""

    LOOKS = 10

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = count
        self._streams: list[FrameStream] = []
        self._looks = 0
        monkeypatch.setattr("prefixmesh.router.relay.FrameStream", self._make)

    def _make(self, *arguments: Any) -> FrameStream:
        self._streams.append(FrameStream(*arguments))
        return self._streams[-1]

    def __call__(self) -> bool:
        waiting = sum(stream.reads_since is None for stream in self._streams)
        self._looks = self._looks + 1 if waiting == self._count else 0
        return self._looks >= self.LOOKS


async def test_what_slow_callers_find_out_of_a_past_connection_is_not_held_against_the_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come to the end of a stream that broke long ago, when its worker is back and well."""
    caplog.set_level(logging.INFO)
    are_held_up = HeldUp(FAILURES_OUT, monkeypatch)
    script = Script(answer=lambda tokens: [97] * TOKENS, decode=lambda ids: TEXT)
    async with running_router(2, script=script) as router:
        home, other = router.workers
        await other.set_serving(serving=False)
        await router.until_ready(1)
        calls = [router.inference.Generate(token_request([n] * 100)) for n in range(FAILURES_OUT)]
        for call in calls:
            assert (await call.read()).HasField("started")
        await eventually(are_held_up)
        await home.restart()
        await other.set_serving(serving=True)
        await eventually(lambda: len(records_of(caplog, "worker_new_life")) == 3)
        await router.until_ready(2)
        caplog.clear()
        for messages in await asyncio.gather(*map(rest_of, calls)):
            assert messages[-1].finished.usage.interruptions == 1
        assert not records_of(caplog, "worker_not_ready")
        assert not records_of(caplog, "worker_ejected")
        assert len(router.server.core.registry.ready) == 2
