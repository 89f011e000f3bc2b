"""F44: whatever comes back from the host, the answer is the cold one. A real (tiny) model in float32 and the real mover, driven step by step.

The cold answers come from an engine that keeps nothing.
"""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from prefixmesh import tokens
from prefixmesh.config import EngineConfig
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.messages import Admitted, Ended, EngineSampling, Event, Submit, TokensOut
from tests.support.tiny_model import make_tiny_model

PAGE = 8
NEW_TOKENS = 6
VOCAB = 500
WAIT_S = 60.0

GREEDY = EngineSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=NEW_TOKENS, stop_token_ids=()
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def build(model: Path, **settings: object) -> EngineCore:
    defaults: dict[str, object] = {"page_size": PAGE, "max_total_tokens": 4096, "max_running_requests": 4}
    return build_engine(
        EngineConfig(model=str(model), dtype="float32", device="cpu", threads=1, **(defaults | settings))  # type: ignore[arg-type]
    )


class Driven:
    """An engine that steps when it is told to."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.events: list[Event] = []
        self._count = 0

    def submit(self, prompt: Sequence[int]) -> str:
        self._count += 1
        name = f"r{self._count}"
        command = Submit(request_id=name, namespace=b"a" * 16, tokens=tokens.pack(prompt), sampling=GREEDY)
        self.events += self.core.submit(command, time.monotonic())
        return name

    def run(self) -> None:
        end = time.monotonic() + WAIT_S
        while self.core.has_work:
            assert time.monotonic() < end
            self.events += self.core.step(time.monotonic())

    def settle(self) -> None:
        """Until no copy is under way either."""
        end = time.monotonic() + WAIT_S
        while self.core.has_work or self.core.stats().tiers.copies_in_flight:
            assert time.monotonic() < end
            self.events += self.core.step(time.monotonic())
            time.sleep(0.0005)
        self.core.check_invariants()

    def answer(self, name: str) -> list[int]:
        [ended] = [e for e in self.events if isinstance(e, Ended) and e.request_id == name]
        assert ended.reason == "length"
        tokens_out = [e for e in self.events if isinstance(e, TokensOut) and e.request_id == name]
        return [token for event in tokens_out for token in event.token_ids]

    def admitted(self, name: str) -> Admitted:
        [event] = [e for e in self.events if isinstance(e, Admitted) and e.request_id == name]
        return event


@pytest.fixture
def tiered(model: Path) -> Iterator[Driven]:
    """A device for a third of what the host has room for, in chunks of 64."""
    core = build(model, max_total_tokens=1024, hicache_ratio=8.0, chunked_prefill_size=64)
    yield Driven(core)
    core.close()


def test_cold_warm_and_loaded_back_prompts_answer_the_same(model: Path, tiered: Driven) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(130, 240))] for _ in range(16)]
    cold = Driven(build(model, prefix_cache="off"))
    expected = {}
    for index, prompt in enumerate(prompts):
        expected[index] = cold.submit(prompt)
        cold.run()
    loaded = 0
    for _ in range(3):
        for begin in range(0, len(prompts), 3):
            together = list(range(begin, min(begin + 3, len(prompts))))
            names = {index: tiered.submit(prompts[index]) for index in together}
            tiered.run()
            for index, name in names.items():
                assert tiered.answer(name) == cold.answer(expected[index])
                loaded += tiered.admitted(name).host_tokens
            tiered.settle()
    counts = tiered.core.stats().tiers
    assert counts.failed_copies == 0
    assert counts.loaded_back_tokens >= loaded > 0
    assert counts.host_protected_pages == 0


def test_an_engine_that_is_left_alone_completes_its_backups(tiered: Driven) -> None:
    """F54, in steps: see the loop's own test for one that sleeps."""
    tiered.submit(list(range(100)))
    tiered.run()
    tiered.settle()
    stats = tiered.core.stats()
    assert stats.tiers.backed_up_tokens >= 96
    assert stats.protected_pages == 0
