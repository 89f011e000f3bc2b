"""The ends at which a fake worker's process does wrong: its engine's steps and answers, and what it tells of its cache.

All of them ask one ``FaultFile`` what is in effect now. The file is read again whenever it changes, so that whoever writes it switches
faults on and off while the worker runs, without a signal or a call.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError, OverloadedError, PrefixmeshError, UnavailableError
from prefixmesh.proto.cache_news import News
from prefixmesh.sim.copy_alarm import CopyAlarm
from prefixmesh.sim.copy_troubles import scripted_troubles
from prefixmesh.sim.fake_engine import FakeEngine, ModelIdentity, RealTime, build_fake_engine
from prefixmesh.sim.faults import FaultScript, FaultsNow, parse_faults, told_tokens
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import count
from prefixmesh.worker.cache_watchers import CacheWatchers
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.in_process_engine import InProcessEngine
from prefixmesh.worker.messages import Admitted, Submit
from prefixmesh.worker_report import WorkerReport

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.02
"""How often the file is looked at where nothing else does: a fault begins so late at most."""

_REFUSALS: Final[dict[str, type[PrefixmeshError]]] = {
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
}

EXIT_CRASHED: Final = 70
"""Of a process that was told to crash."""


class FaultFile:
    """The script in a file, which may not be there yet; read by any thread."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """``at_s`` counts from now on. Raises ConfigError when what is there already is malformed."""
        self._path = path
        self._clock = clock
        self._started = clock()
        self._version: tuple[int, ...] | None = None
        self._script = FaultScript()
        self._load()

    def now(self) -> FaultsNow:
        """What is in effect. One question to the file system; a file that has become malformed is logged, and the last good one counts."""
        try:
            self._load()
        except ConfigError as error:
            logger.error("faults_malformed problem=%r", str(error))
        return self._script.at(self._clock() - self._started)

    def _load(self) -> None:
        if self._path is None:
            return
        version: tuple[int, ...] = ()
        text = b""
        with suppress(OSError):  # a file that is not there has no faults
            stat = self._path.stat()
            version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if version == self._version:
                return
            text = self._path.read_bytes()
        if version != self._version:
            self._version = version
            self._script = parse_faults(text)
            logger.info("faults_read script=%r", self._script)


class FaultyEngine(InProcessEngine):
    """A fake engine on a thread: slow, refusing, falling silent in the middle of answers and lying about cached tokens, as told. Given a
    runner that asks before every step."""

    def __init__(
        self, config: EngineConfig, identity: ModelIdentity, timing: TimingModel, faults: FaultFile
    ) -> None:
        super().__init__(config, lambda: self._make(config, identity, timing))
        self._faults = faults

    def submit(self, command: Submit) -> AsyncGenerator[RequestEvent, None]:
        """See ``EngineClient.submit``."""
        return self._faulty(command)

    async def _faulty(self, command: Submit) -> AsyncGenerator[RequestEvent, None]:
        refusal = self._faults.now().refusal
        if refusal:
            raise _REFUSALS[refusal]("the worker was told to refuse requests")
        async with aclosing(super().submit(command)) as events:
            async for event in events:
                if isinstance(event, Admitted):
                    event = self._faults.now().admitted(event, count(command.tokens))
                else:
                    await _until(partial(self._may_tell, event, count(command.resumed)))
                yield event

    def _may_tell(self, event: RequestEvent, resumed_tokens: int) -> bool:
        return told_tokens(event, resumed_tokens) <= self._faults.now().stream_stops_at

    def _make(self, config: EngineConfig, identity: ModelIdentity, timing: TimingModel) -> EngineCore:
        alarm = CopyAlarm(self._inbox.wake)
        engine: FakeEngine = build_fake_engine(config, identity, timing, RealTime(), alarm=alarm)
        engine.runner.delay_ms = lambda: self._faults.now().delay_ms
        if engine.mover is not None:
            engine.mover.troubles = scripted_troubles(self._faults.now)
        return engine.core


class FaultyWatchers(CacheWatchers):
    """``CacheWatchers`` that are silent, or tell wrong sums, as told."""

    def __init__(self, faults: FaultFile, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._faults = faults

    async def read(self, *arguments: Any, **settings: Any) -> AsyncGenerator[News]:
        """See ``CacheWatchers.read``. While silent, what there is to tell waits."""
        async with aclosing(super().read(*arguments, **settings)) as news:
            async for one in news:
                await _until(lambda: not self._faults.now().silent)
                if isinstance(one, WorkerReport):
                    one = replace(one, summary=self._faults.now().summary(one.summary))
                yield one


async def crash_when_told(faults: FaultFile) -> None:
    """End this process as a bug of the operating system's would, once the script says so."""
    await _until(lambda: faults.now().crashed)
    logger.error("crashing as told")
    os._exit(EXIT_CRASHED)


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(LOOK_S)
