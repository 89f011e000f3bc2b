"""Whatever is taken from the cache, the answer is the cold one: a real (tiny) model in float32, driven step by step.

The cold answers come from an engine that keeps nothing.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from prefixmesh import tokens
from prefixmesh.config import EngineConfig
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_builder import build_engine
from prefixmesh.worker.messages import Admitted, Ended, EngineSampling, Event, Submit, TokensOut
from tests.support.tiny_model import make_tiny_model

PAGE = 16
NEW_TOKENS = 8
VOCAB = 500


class Driven:
    """An engine that steps when it is told to."""

    def __init__(self, model: Path, **settings: object) -> None:
        defaults: dict[str, object] = {"max_total_tokens": 4096, "max_running_requests": 8}
        config = EngineConfig(
            model=str(model),
            dtype="float32",
            device="cpu",
            threads=1,
            **(defaults | settings),  # type: ignore[arg-type]
        )
        self.core: EngineCore = build_engine(config)
        self._events: list[Event] = []
        self._count = 0

    def submit(self, prompt: Sequence[int], *, namespace: bytes = b"a" * 16, seed: int | None = None) -> str:
        """Queue a prompt, greedy without a ``seed``; returns its id."""
        self._count += 1
        sampling = EngineSampling(
            temperature=0.0 if seed is None else 1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=seed or 0,
            max_tokens=NEW_TOKENS,
            stop_token_ids=(),
        )
        name = f"r{self._count}"
        command = Submit(request_id=name, namespace=namespace, tokens=tokens.pack(prompt), sampling=sampling)
        self._events += self.core.submit(command, 0.0)
        return name

    def step(self) -> None:
        self._events += self.core.step(0.0)

    def abort(self, name: str) -> None:
        self._events += self.core.abort(name, 0.0)

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        self.core.check_invariants()

    def answer(self, name: str) -> list[int]:
        """Asserts that the request has come to its end."""
        (ended,) = [e for e in self._events if isinstance(e, Ended) and e.request_id == name]
        assert ended.reason == "length"
        return [
            token
            for event in self._events
            if isinstance(event, TokensOut) and event.request_id == name
            for token in event.token_ids
        ]

    def cached(self, name: str) -> int:
        (told,) = [e for e in self._events if isinstance(e, Admitted) and e.request_id == name]
        return told.cached_tokens

    def ask(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """The answer to a prompt alone, and how much of the prompt was found."""
        name = self.submit(prompt)
        self.run()
        return self.answer(name), self.cached(name)

    def pages_of(self, name: str) -> set[int]:
        """The pages that a running request's tokens are in."""
        (request,) = [r for r in self.core._scheduler.running if r.request_id == name]
        return set(request.page_table[: request.pages].tolist())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cold(model: Path) -> Driven:
    return Driven(model, prefix_cache="off")


def random_prompt(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(size)]


def test_a_prompt_that_leaves_the_cached_one_anywhere_in_a_page(model: Path, cold: Driven) -> None:
    """F42: at each offset 0..15 of a page what is matched is whole pages, and the answer is the cold one."""
    rng = random.Random(42)
    engine = Driven(model, page_size=PAGE)
    base = random_prompt(rng, 5 * PAGE)
    engine.ask(base)
    for offset in range(PAGE):
        at = 2 * PAGE + offset
        prompt = [*base[:at], (base[at] + 1) % VOCAB, *random_prompt(rng, 4 * PAGE - at)]
        answer, cached = engine.ask(prompt)
        assert cached == 2 * PAGE
        assert answer == cold.ask(prompt)[0]


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_a_prompt_that_was_broken_off_after_its_first_chunk(
    model: Path, cold: Driven, page_size: int
) -> None:
    """F39: its first chunk is cached, the rest of its pages serve another request, and the prompt again answers as if cold."""
    rng = random.Random(39)
    engine = Driven(model, page_size=page_size, max_total_tokens=8 * PAGE, chunked_prefill_size=2 * PAGE)
    prompt, other = random_prompt(rng, 6 * PAGE), random_prompt(rng, 6 * PAGE)
    broken = engine.submit(prompt)
    engine.step()
    pages = engine.pages_of(broken)
    engine.abort(broken)
    taker = engine.submit(other)
    engine.step()
    assert pages & engine.pages_of(taker), "the test must use pages again to mean anything"
    engine.run()
    assert engine.answer(taker) == cold.ask(other)[0]
    for _ in range(2):
        assert engine.ask(prompt)[0] == cold.ask(prompt)[0]


@pytest.mark.slow
def test_200_prompts_answer_the_same_cold_and_warm(model: Path, cold: Driven) -> None:
    """F44 (device): families with common beginnings, greedy and with seeds, batched as they come; what is warm is really found."""
    rng = random.Random(44)
    families = [random_prompt(rng, rng.randrange(20, 90)) for _ in range(12)]
    asked: list[tuple[list[int], int | None]] = []
    for number in range(200):
        family = rng.choice(families)
        prompt = family[: rng.randrange(1, len(family))] + random_prompt(rng, rng.randrange(1, 20))
        asked.append((prompt, number if number % 2 else None))
    engine = Driven(model, max_total_tokens=16_384, chunked_prefill_size=64)

    def answers(driven: Driven) -> tuple[list[list[int]], list[int]]:
        names = [driven.submit(prompt, seed=seed) for prompt, seed in asked]
        driven.run()
        return [driven.answer(name) for name in names], [driven.cached(name) for name in names]

    expected, nothing = answers(cold)
    assert set(nothing) == {0}
    assert answers(engine)[0] == expected
    warm, cached = answers(engine)
    assert warm == expected
    assert cached == [len(prompt) - 1 for prompt, _ in asked]
