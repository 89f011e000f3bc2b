"""What the parts of ``prefixmesh bench tiers`` share: engines by settings, prompts, and the results so far."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prefixmesh.bench.engine_bench import FIRST_ID, LAST_ID
from prefixmesh.bench.engine_drive import GREEDY, EngineDrive, Served
from prefixmesh.bench.result import Result
from prefixmesh.bench.tier_figures import Figure, measured
from prefixmesh.bench.tier_plan import FIGURES, Effort
from prefixmesh.bench.timed_mover import TimedMover
from prefixmesh.bench.yardstick import Yardstick, mean_yardstick, measure_yardstick
from prefixmesh.config import EngineConfig
from prefixmesh.errors import InternalError
from prefixmesh.worker.messages import EngineInfo

SETTLE_S: Final = 60.0
"""What was computed must have its copies after so long: far more than all the memory of a bench takes."""

_LOOK_S: Final = 0.001
"""Between two looks at copies under way, so that they get the cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierEngine:
    """One engine of the bench."""

    drive: EngineDrive
    mover: TimedMover | None = None
    """None without a host tier."""

    @property
    def timed(self) -> TimedMover:
        """Its mover. InternalError without a host tier."""
        if self.mover is None:
            raise InternalError("an engine of the bench has no host tier")
        return self.mover

    def answer(self, prompt: Sequence[int], *, cached: int = 0, host: int = 0, disk: int = 0) -> Served:
        """Serve one request alone, for one token. Raises InternalError when less of it was cached, or came from host or disk, than
        said: a figure of a cache that did not hit would be one of something else."""
        served = self.drive.answer(prompt, GREEDY)
        found = (served.cached_tokens, served.host_tokens, served.disk_tokens)
        if any(got < least for got, least in zip(found, (cached, host, disk), strict=True)):
            raise InternalError(
                f"the bench found (cached, host, disk) = {found} tokens, not {(cached, host, disk)}"
            )
        return served

    def settle(self) -> None:
        """Step until no copy is under way, none begins any more, and nothing is being written to a disk. Raises InternalError after
        ``SETTLE_S``."""
        core, end, before = self.drive.core, time.monotonic() + SETTLE_S, None
        while time.monotonic() < end:
            self.drive.step()
            tiers = core.stats().tiers
            if not tiers.copies_in_flight and not tiers.host_protected_pages and tiers == before:
                return
            before = tiers
            time.sleep(_LOOK_S)
        raise InternalError(f"copies of the bench did not end: {before}")


class Stage:
    """Engines of one model, each with its own settings."""

    def __init__(
        self, effort: Effort, config: EngineConfig, open_engine: Callable[[EngineConfig], TierEngine]
    ) -> None:
        self.effort = effort
        self.config = config
        self._open = open_engine
        self.rng = np.random.default_rng(0)
        self._info: EngineInfo | None = None
        self._yardsticks: list[Yardstick] = [measure_yardstick()]
        self.results: list[Result[Figure]] = []

    @contextmanager
    def engine(self, **changes: Any) -> Iterator[TierEngine]:
        """An engine with the bench's settings but for ``changes``; closed at the end."""
        engine = self._open(dataclasses.replace(self.config, page_size=self.effort.page_size, **changes))
        self._info = engine.drive.core.info
        try:
            yield engine
        finally:
            engine.drive.core.close()

    @property
    def info(self) -> EngineInfo:
        """Of the engine that was opened last. InternalError before the first."""
        if self._info is None:
            raise InternalError("no engine of the bench was opened")
        return self._info

    def draw(self, size: int) -> list[int]:
        """Random ids of the model's."""
        vocab_size = self.info.vocab_size
        low, high = (FIRST_ID, LAST_ID) if vocab_size >= LAST_ID else (0, vocab_size)
        ids: list[int] = self.rng.integers(low, high, size=size).tolist()
        return ids

    def whole_pages(self, size_tokens: float) -> int:
        """So many tokens, or as few more as make whole pages."""
        page = self.effort.page_size
        return -(-int(size_tokens) // page) * page

    def add(
        self, name: str, values: Sequence[float], notes: Mapping[str, float] | None = None, calls: int = 1
    ) -> None:
        """A figure was taken."""
        self._yardsticks.append(measure_yardstick())
        self.results.append(
            Result(
                figure=FIGURES[name],
                measurement=measured(values, calls),
                yardstick=mean_yardstick(self._yardsticks[-2:]),
                notes=notes or {},
            )
        )
