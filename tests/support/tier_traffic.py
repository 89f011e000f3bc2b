"""Random traffic on a fake engine with a host tier, in virtual time: conversations, aborts, priorities, floods, pauses and flushes.

The scheduler, the cache, the keeper of the host tier and the engine's core are the real ones; the model's KV is numbers that only right pages
give the right answers by (``sim.fake_model``), and copies really take their time, are slow, fail, and are told of in any order.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass

from prefixmesh.cache.radix_cache import RadixCache
from prefixmesh.config import EngineConfig
from prefixmesh.sim.copy_troubles import TroubleOdds, drawn_troubles
from prefixmesh.sim.fake_engine import ModelIdentity, VirtualTime, build_fake_engine
from prefixmesh.sim.fake_model import expected_answer
from prefixmesh.sim.fake_mover import FakeMover
from prefixmesh.sim.timing import TimingModel
from prefixmesh.tokens import pack
from prefixmesh.worker.messages import (
    Abort,
    Admitted,
    Ended,
    EngineSampling,
    Event,
    Flush,
    Refused,
    Submit,
    TokensOut,
)

VOCAB = 32
NAMESPACES = (b"a" * 16, b"b" * 16)

MOST_STEP_S = 1.0
"""F50: no step takes longer, whatever becomes of copies."""

TIMING = TimingModel(
    step_ms=2.0,
    prefill_ms_per_token=0.5,
    prefill_ms_per_token2=0.001,
    decode_ms_per_sequence=0.1,
    load_back_ms_per_token=0.1,
    offload_ms_per_token=0.1,
)
"""Computing is slow enough that most load-backs are worth it, and copies take as long as some steps."""

GOOD = TroubleOdds()
SLOW = TroubleOdds(slow=0.05, most_slow_s=1.0)
FAILING = TroubleOdds(fail=0.2)
REORDERED = TroubleOdds(told_late=0.3, most_late_s=0.2)
BAD = TroubleOdds(slow=0.02, most_slow_s=1.5, fail=0.1, told_late=0.1, most_late_s=0.6)
"""All at once: some copies are given up, half of the late ends are later than a step waits for."""

ALL_ODDS = (GOOD, SLOW, FAILING, REORDERED, BAD)


@dataclass
class Asked:
    """One request, and what has come of it."""

    namespace: bytes
    prompt: list[int]
    count: int
    expected: list[int]
    answer: list[int]
    admitted: Admitted | None = None
    end: Ended | Refused | None = None
    aborted: bool = False


class TierEngine:
    """A fake engine with a host tier, in virtual time, and what was asked of it."""

    def __init__(
        self,
        *,
        seed: int = 0,
        pages: int = 64,
        page_size: int = 1,
        host_ratio: float = 2.0,
        odds: TroubleOdds = GOOD,
        timing: TimingModel = TIMING,
        **settings: object,
    ) -> None:
        config = EngineConfig(
            page_size=page_size,
            max_total_tokens=pages * page_size,
            hicache_ratio=host_ratio,
            **{"chunked_prefill_size": 64, "max_running_requests": 6, "max_queued_requests": 32} | settings,  # type: ignore[arg-type]
        )
        self.time = VirtualTime()
        self.engine = build_fake_engine(
            config,
            ModelIdentity(vocab_size=VOCAB, context_length=pages * page_size),
            timing,
            self.time,
            decode_room_tokens=2,
            rng=random.Random(f"{seed}/bytes"),
        )
        assert self.engine.mover is not None
        self.mover: FakeMover = self.engine.mover
        self.mover.troubles = drawn_troubles(random.Random(f"{seed}/copies"), odds)
        self.core = self.engine.core
        self.scheduler = self.engine.scheduler
        cache = self.scheduler.kv._cache
        assert isinstance(cache, RadixCache)
        self.cache = cache
        self.pages = pages
        self.asked: dict[str, Asked] = {}
        self.steps = 0
        self.longest_step_s = 0.0

    def ask(
        self,
        prompt: list[int],
        count: int,
        namespace: bytes = NAMESPACES[0],
        *,
        priority: int = 0,
        time_left_s: float = math.inf,
    ) -> str:
        name = f"r{len(self.asked)}"
        self.asked[name] = Asked(
            namespace, prompt, count, expected_answer(namespace, prompt, count, VOCAB), []
        )
        sampling = EngineSampling(
            temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=count, stop_token_ids=()
        )
        self._note(
            self.core.handle(
                Submit(
                    request_id=name,
                    namespace=namespace,
                    tokens=pack(prompt),
                    sampling=sampling,
                    priority=priority,
                    time_left_s=time_left_s,
                ),
                self.time.now(),
            )
        )
        return name

    def abort(self, name: str) -> None:
        self.asked[name].aborted = True
        self._note(self.core.handle(Abort(request_id=name), self.time.now()))

    def flush(self) -> None:
        self._note(self.core.handle(Flush(), self.time.now()))

    def step(self) -> None:
        """One turn of the engine's loop."""
        began = self.time.now()
        self._note(self.core.step(began))
        self.steps += 1
        self.longest_step_s = max(self.longest_step_s, self.time.now() - began)
        assert self.time.now() - began <= MOST_STEP_S, f"a step of {self.time.now() - began:.3f} s (F50)"

    def pause(self, pause_s: float) -> None:
        """Let time pass; an engine without work takes what ends meanwhile, as its loop does when it is woken."""
        end = self.time.now() + pause_s
        while not self.core.has_work and (due := self.engine.next_due()) is not None and due <= end:
            self.time.pass_until(due)
            self._note(self.core.step(due))
        self.time.pass_until(end)

    def run(self, limit: int = 20_000) -> None:
        """Until nobody waits."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"somebody waits for ever: {self.scheduler!r} {self.mover!r}")

    def rest(self) -> None:
        """Until nobody waits, and nothing is copied any more."""
        self.run()
        while (due := self.engine.next_due()) is not None:
            self.pause(max(0.0, due - self.time.now()))

    def ask_now(self, prompt: list[int], count: int = 4, namespace: bytes = NAMESPACES[0]) -> Asked:
        """Ask, and run to the end."""
        asked = self.asked[self.ask(prompt, count, namespace)]
        self.run()
        return asked

    def forget(self, pages: int | None = None) -> None:
        """Device pages go, as for others; all that nobody holds, unless told how many. What the host has stays there."""
        self.cache.evict(self.pages if pages is None else pages)

    def check(self) -> None:
        self.core.check_invariants()

    def check_rest(self) -> None:
        """Nobody holds anything: no lock, no copy, no count is left on either tier."""
        self.check()
        kv, cache, tiers = self.scheduler.kv, self.cache, self.core.stats().tiers
        left = {
            "receipts": kv.receipts_out,
            "double releases": kv.double_releases,
            "protected pages": kv.protected_pages,
            "pages of copies": cache.copying_pages,
            "copies in the tree": len(cache.transfers.in_flight),
            "copies that are told of": tiers.copies_in_flight,
            "jobs": len(self.mover._copies),
            "locked host pages": cache.host_protected_pages,
            "device pages that nobody owns": kv.total_pages - kv.free_pages - kv.evictable_pages,
            "host pages that nobody owns": tiers.host_total_pages
            - tiers.host_free_pages
            - tiers.host_evictable_pages,
        }
        assert not any(left.values()), left

    def check_ends(self) -> Counter[str]:
        """Every request has had one end and its own answer; how often which end came."""
        ends: Counter[str] = Counter()
        for name, asked in self.asked.items():
            assert asked.end is not None, f"{name} has no end"
            if isinstance(asked.end, Refused):
                ends["refused"] += 1
                assert not asked.end.field, asked.end
                continue
            ends[asked.end.reason] += 1
            assert asked.end.reason in {"length", "too_late"} | ({"aborted"} if asked.aborted else set()), (
                f"{name}: {asked.end}"
            )
            if asked.end.reason == "length":
                assert asked.answer == asked.expected
        return ends

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(event, Admitted | TokensOut | Ended | Refused):
                continue
            asked = self.asked[event.request_id]
            assert asked.end is None, f"{event.request_id} goes on after its end"
            match event:
                case Admitted():
                    assert asked.admitted is None
                    assert event.host_tokens <= event.cached_tokens < len(asked.prompt)
                    asked.admitted = event
                case TokensOut():
                    assert asked.admitted is not None
                    assert event.position == len(asked.answer), "a token was lost or repeated"
                    asked.answer += event.token_ids
                    assert asked.answer == asked.expected[: len(asked.answer)], "wrong KV was read"
                case _:
                    asked.end = event


class TierTraffic:
    """Random traffic on one engine: ``run`` so many of the engine's steps."""

    def __init__(self, engine: TierEngine, seed: int, *, flushes: bool = True) -> None:
        self.engine = engine
        self._rng = random.Random(f"{seed}/traffic")
        self._flushes = flushes
        self._room = engine.scheduler.token_limit
        self._conversations: list[tuple[bytes, list[int]]] = []
        self.done: Counter[str] = Counter()

    def run(self, steps: int, *, check_every: int = 10) -> None:
        """Go on for so many steps of the engine, then until all is at rest."""
        engine, end = self.engine, self.engine.steps + steps
        while engine.steps < end:
            self._act()
            for _ in range(self._rng.randrange(6)):
                if engine.core.has_work:
                    engine.step()
                    if not engine.steps % check_every:
                        engine.check()
        engine.rest()
        engine.check_rest()

    def _act(self) -> None:
        rng, engine = self._rng, self.engine
        choice = rng.random()
        open_requests = [name for name, asked in engine.asked.items() if asked.end is None][-40:]
        if choice < 0.6 and len(open_requests) < 12:
            self._turn()
        elif choice < 0.65 and open_requests:
            self.done["aborts"] += 1
            engine.abort(rng.choice(open_requests))
        elif choice < 0.655 and self._flushes:
            self.done["flushes"] += 1
            engine.flush()
        elif choice < 0.79:
            engine.forget(rng.randint(1, engine.pages))
        elif choice < 0.95 and not engine.core.has_work:
            engine.pause(rng.expovariate(2.0))

    def _turn(self) -> None:
        """Somebody asks the next thing of a conversation, or begins one; several at once now and then."""
        rng, engine = self._rng, self.engine
        for _ in range(rng.choice((1, 1, 1, 3))):
            if self._conversations and rng.random() < 0.7:
                namespace, prompt = rng.choice(self._conversations)
            else:
                system = random.Random(rng.randrange(4)).choices(range(VOCAB), k=self._room // 5)
                namespace, prompt = rng.choice(NAMESPACES), system
            asks = rng.choices(range(VOCAB), k=rng.randint(1, max(2, self._room // 12)))
            count = rng.randint(1, max(2, self._room // 10))
            prompt = [*prompt, *asks]
            if len(prompt) + count > self._room:
                self._conversations = [one for one in self._conversations if one[1] is not prompt]
                continue
            hasty = rng.random() < 0.05
            engine.ask(
                prompt,
                count,
                namespace,
                priority=rng.choice((-1, 0, 0, 1)),
                time_left_s=rng.uniform(0.01, 1.0) if hasty else math.inf,
            )
            answer = expected_answer(namespace, prompt, count, VOCAB)
            self._conversations.append((namespace, prompt + answer))
            self._conversations = self._conversations[-12:]
