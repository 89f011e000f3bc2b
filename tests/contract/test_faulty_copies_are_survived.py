"""A real (tiny) model, a real thread that copies, and bad days: whatever fails, comes late or out of order, every answer is the cold one, and
nothing stays held."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.tokens import pack
from prefixmesh.worker.engine import EngineCore, Runner
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.messages import Ended, EngineSampling, Event, Submit, TokensOut
from prefixmesh.worker.tiers.copies import CopyJob, Mover
from prefixmesh.worker.tiers.mover_faults import FaultyMover, MoverFaults
from tests.support.tiny_model import make_tiny_model

PAGE = 4
LAYERS = 2
WAIT_S = 60.0
GREEDY = EngineSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=4, stop_token_ids=()
)
RUINED = 1e4
"""Where KV of about 1 belongs: whoever reads it answers otherwise."""


class BadDays:
    """An engine whose mover is faulty, with the bytes of failed load-backs ruined."""

    def __init__(self, folder: Path, seed: int, faults: MoverFaults) -> None:
        self.movers: list[FaultyMover] = []
        self._pools: list[Any] = []

        def watch(runner: Runner) -> Runner:
            self._pools.append(runner.pool)  # type: ignore[attr-defined]
            return runner

        def watch_mover(mover: Mover) -> Mover:
            self.movers.append(FaultyMover(mover, LAYERS, faults, random.Random(seed), spoil=self._ruin))
            return self.movers[0]

        config = EngineConfig(
            model=str(folder), dtype="float32", device="cpu", threads=1, page_size=PAGE, max_total_tokens=256,
            max_running_requests=3, chunked_prefill_size=32, hicache_ratio=6.0,
        )  # fmt: skip
        self.core = build_engine(config, watch=watch, watch_mover=watch_mover)
        self._pools[0].arrivals = self.movers[0]

    def _ruin(self, job: CopyJob) -> None:
        if job.kind != "offload":
            self._pools[0].storage[:, :, job.device_pages.tolist()] = RUINED


def answers(core: EngineCore, prompts: Sequence[Sequence[int]], name: str) -> list[list[int]]:
    """Of all prompts, asked for together."""
    events: list[Event] = []
    for index, prompt in enumerate(prompts):
        command = Submit(
            request_id=f"{name} {index}", namespace=b"a" * 16, tokens=pack(prompt), sampling=GREEDY
        )
        events += core.submit(command, time.monotonic())
    end = time.monotonic() + WAIT_S
    while core.has_work:
        assert time.monotonic() < end
        events += core.step(time.monotonic())
    assert [event.reason for event in events if isinstance(event, Ended)] == ["length"] * len(prompts)
    out: dict[str, list[int]] = {f"{name} {index}": [] for index in range(len(prompts))}
    for event in events:
        if isinstance(event, TokensOut):
            out[event.request_id] += event.token_ids
    return list(out.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cold(folder: Path) -> EngineCore:
    settings: dict[str, Any] = {"max_total_tokens": 4096, "threads": 1, "prefix_cache": "off"}
    return build_engine(EngineConfig(model=str(folder), dtype="float32", device="cpu", **settings))


MIXED = MoverFaults(fail=0.2, late_outcome=0.3, late_start=0.2, late_layer=0.2, most_looks=6)


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (1, MIXED),
        pytest.param(2, replace(MIXED, fail=0.6), marks=pytest.mark.slow),
        pytest.param(3, replace(MIXED, late_layer=0.7), marks=pytest.mark.slow),
        pytest.param(4, replace(MIXED, late_outcome=1.0, most_looks=20), marks=pytest.mark.slow),
    ],
)
def test_every_answer_is_the_cold_one_and_nothing_stays_held(
    folder: Path, cold: EngineCore, seed: int, faults: MoverFaults
) -> None:
    """Conversations over a device that holds two of them, in turns."""
    rng, bad = random.Random(seed), BadDays(folder, seed, faults)
    talks = [[rng.randrange(3, 500) for _ in range(rng.randrange(40, 90))] for _ in range(6)]
    for turn in range(3):
        for first in range(0, len(talks), 2):
            asked = talks[first : first + 2]
            name = f"{turn} {first}"
            expected = answers(cold, asked, name)
            assert answers(bad.core, asked, name) == expected
            for index, answer in enumerate(expected):
                talks[first + index] = [*asked[index], *answer, rng.randrange(3, 500)]
    end = time.monotonic() + WAIT_S
    while bad.core.has_work or bad.core.stats().tiers.copies_in_flight:
        assert time.monotonic() < end
        bad.core.step(time.monotonic())
    bad.core.check_invariants()
    stats = bad.core.stats()
    assert bad.movers[0].injected > 0
    assert stats.tiers.failed_copies > 0
    assert stats.tiers.loaded_back_tokens + stats.tiers.recomputed_tokens > 0
    assert stats.tiers.host_protected_pages == stats.protected_pages == stats.double_releases == 0
    assert stats.free_pages + stats.evictable_pages == stats.total_pages
    bad.core.close()
