"""The fake worker's engine: its answers are known beforehand whatever its scheduler and cache do, and its steps take what they should."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefixmesh.config import EngineConfig
from prefixmesh.errors import ConfigError
from prefixmesh.sim.fake_engine import FakeEngine, ModelIdentity, VirtualTime, build_fake_engine
from prefixmesh.sim.fake_model import expected_answer
from prefixmesh.sim.timing import H100_8B, TimingModel
from prefixmesh.tokens import pack
from prefixmesh.worker.messages import Admitted, EngineSampling, Event, Submit, TokensOut

VOCAB = 64
NAMESPACES = (b"a" * 16, b"b" * 16)
IDENTITY = ModelIdentity(vocab_size=VOCAB, context_length=4096)
PLAIN = TimingModel(
    step_ms=10.0,
    prefill_ms_per_token=0.5,
    prefill_ms_per_token2=0.005,
    decode_ms_per_sequence=1.0,
    decode_ms_per_kv_token=0.1,
)


class Bench:
    """A fake engine in virtual time, and what it has answered."""

    def __init__(
        self, config: EngineConfig, identity: ModelIdentity = IDENTITY, timing: TimingModel = PLAIN
    ) -> None:
        self.time = VirtualTime()
        self.engine: FakeEngine = build_fake_engine(config, identity, timing, self.time, decode_room_tokens=2)
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.host: dict[str, int] = {}

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        namespace: bytes = NAMESPACES[0],
        *,
        temperature: float = 0.0,
        resumed: list[int] | None = None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.answers[name] = []
        sampling = EngineSampling(
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=1,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
        )
        command = Submit(
            request_id=name,
            namespace=namespace,
            tokens=pack(prompt),
            sampling=sampling,
            resumed=pack(resumed or []),
        )
        self._note(self.engine.core.handle(command, self.time.now()))

    def step(self) -> None:
        self._note(self.engine.core.step(self.time.now()))

    def run(self) -> None:
        while self.engine.core.has_work:
            self.step()

    def rest(self) -> None:
        """Until nothing is copied any more."""
        while (due := self.engine.next_due()) is not None:
            self.time.pass_until(due)
            self.step()

    def evict(self, pages: int) -> None:
        self.engine.scheduler.kv._cache.evict(pages)

    def _note(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TokensOut):
                self.answers[event.request_id] += event.token_ids
            elif isinstance(event, Admitted):
                self.cached[event.request_id] = event.cached_tokens
                self.host[event.request_id] = event.host_tokens


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 16), (4, 32), (16, 0)])
def test_answers_are_known_whatever_is_batched_chunked_shared_evicted_or_preempted(
    page_size: int, chunk: int
) -> None:
    bench = Bench(
        EngineConfig(
            page_size=page_size, max_total_tokens=400, max_running_requests=8, chunked_prefill_size=chunk
        )
    )
    rng = random.Random(page_size)
    asked = {}
    for number in range(60):
        begun = random.Random(number % 3).choices(range(VOCAB), k=rng.randrange(1, 60))
        prompt = begun + rng.choices(range(VOCAB), k=rng.randrange(1, 60))
        namespace, count = rng.choice(NAMESPACES), rng.randrange(1, 40)
        asked[str(number)] = (namespace, prompt, count)
        bench.submit(str(number), prompt, count, namespace, temperature=rng.choice((0.0, 2.0)))
        for _ in range(rng.randrange(4)):
            bench.step()
    bench.run()
    for name, (namespace, prompt, count) in asked.items():
        assert bench.answers[name] == expected_answer(namespace, prompt, count, VOCAB)
    stats = bench.engine.core.stats()
    assert stats.evicted_pages > 0
    assert stats.preemptions > 0
    assert sum(bench.cached.values()) > 0
    bench.engine.core.check_invariants()


def test_namespaces_have_answers_of_their_own() -> None:
    one, other = (expected_answer(namespace, [1, 2, 3], 8, VOCAB) for namespace in NAMESPACES)
    assert one != other
    assert expected_answer(NAMESPACES[0], [1, 3, 2], 8, VOCAB) != one


def test_answer_that_was_cut_goes_on_alike_at_another_worker() -> None:
    settings = EngineConfig(max_total_tokens=400)
    prompt = list(range(30))
    whole = expected_answer(NAMESPACES[0], prompt, 20, VOCAB)
    for cut in (0, 1, 19):
        bench = Bench(settings)
        bench.submit("again", prompt, 20, resumed=whole[:cut])
        bench.run()
        assert bench.answers["again"] == whole[cut:]


def test_wrong_kv_gives_a_wrong_answer() -> None:
    """Else the other tests would prove nothing."""
    bench = Bench(EngineConfig(max_total_tokens=400))
    prompt = list(range(40))
    bench.submit("first", prompt, 4)
    bench.run()
    bench.engine.runner._kv[:] += 1
    bench.submit("second", prompt, 4)
    bench.run()
    assert bench.cached["second"] == 39
    assert bench.answers["second"] != bench.answers["first"]


def test_ids_that_end_answers_are_not_answered() -> None:
    ending = tuple(range(0, VOCAB, 2))
    identity = ModelIdentity(vocab_size=VOCAB, context_length=4096, eos_token_ids=ending)
    bench = Bench(EngineConfig(max_total_tokens=400), identity)
    bench.submit("long", [1, 2, 3], 100, stop_token_ids=ending)
    bench.run()
    assert bench.answers["long"] == expected_answer(NAMESPACES[0], [1, 2, 3], 100, VOCAB, ending)
    assert len(bench.answers["long"]) == 100


def test_steps_take_what_the_timing_says() -> None:
    bench = Bench(EngineConfig(max_total_tokens=400, chunked_prefill_size=16))
    bench.submit("one", list(range(20)), 3)
    expected_ms = [
        10 + 16 * 0.5 + 0.005 * 2 * sum(range(16)),
        10 + 4 * 0.5 + 0.005 * 2 * sum(range(16, 20)),
        10 + 1.0 + 0.1 * 21,
        10 + 1.0 + 0.1 * 22,
    ]
    for step_ms in expected_ms:
        before = bench.time.now()
        bench.step()
        assert bench.time.now() - before == pytest.approx(step_ms / 1e3)
    assert not bench.engine.core.has_work


def test_prefill_is_the_curve_that_workers_report_by_the_same_names() -> None:
    a, b = 700, 1000
    curve_ms = H100_8B.prefill_ms_per_token * (b - a) + H100_8B.prefill_ms_per_token2 * (b**2 - a**2)
    assert H100_8B.prefill_ms(b - a, before=a) == pytest.approx(curve_ms, rel=1e-4)


def test_prefill_in_pieces_takes_what_it_takes_whole() -> None:
    pieces = H100_8B.prefill_ms(700) + H100_8B.prefill_ms(300, before=700)
    assert pieces == pytest.approx(H100_8B.prefill_ms(1000))


TIERED = EngineConfig(max_total_tokens=100, hicache_ratio=3.0)
COPIES = replace(PLAIN, load_back_ms_per_token=0.25, offload_ms_per_token=0.25)


def test_host_tier_has_the_pages_that_its_flags_say() -> None:
    identity = replace(IDENTITY, kv_bytes_per_token=1 << 20)
    settings = EngineConfig(page_size=16, max_total_tokens=1600)
    sized = (
        replace(settings, hicache_ratio=2.5),
        replace(settings, hicache_size=0.5),
        replace(settings, hicache_ratio=9.0, hicache_size=0.25),
    )
    pages = [build_fake_engine(one, identity, PLAIN, VirtualTime()).core.stats().tiers for one in sized]
    assert [tiers.host_total_pages for tiers in pages] == [250, 32, 16]
    assert build_fake_engine(settings, identity, PLAIN, VirtualTime()).mover is None


def test_steps_overlap_with_what_comes_from_the_host_layer_by_layer() -> None:
    """The copy of 60 tokens takes 15 ms, a step of 20 ms that reads them no longer than that when it begins after a layer has come."""
    bench = Bench(TIERED, timing=COPIES)
    prompt = list(range(60))
    bench.submit("cold", prompt, 1)
    bench.run()
    bench.rest()
    bench.evict(100)
    began = bench.time.now()
    bench.submit("again", [*prompt, 7], 1)
    bench.run()
    assert (bench.cached["again"], bench.host["again"]) == (60, 60)
    assert bench.answers["again"] == expected_answer(NAMESPACES[0], [*prompt, 7], 1, VOCAB)
    step_s, copy_s = 17.1 / 1e3, 15.0 / 1e3
    assert max(step_s, copy_s) < bench.time.now() - began < step_s + copy_s


def test_copies_that_nobody_waits_for_take_no_time_of_steps() -> None:
    took = []
    for config in (TIERED, replace(TIERED, hicache_ratio=0.0)):
        bench = Bench(config, timing=COPIES)
        bench.submit("one", list(range(60)), 3)
        bench.run()
        took.append(bench.time.now())
    assert took[0] == took[1]


def test_delay_is_added_to_every_step() -> None:
    bench = Bench(EngineConfig(max_total_tokens=400))
    bench.engine.runner.delay_ms = lambda: 1000.0
    bench.submit("one", list(range(20)), 2)
    bench.run()
    assert bench.time.now() > 2.0


def test_what_a_fake_worker_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter_root"):
        build_fake_engine(EngineConfig(adapter_root="adapters"), IDENTITY, PLAIN, VirtualTime())
    with pytest.raises(
        ConfigError, match="no page of 131,072 bytes fits in a host tier of hicache_size=1e-09"
    ):
        build_fake_engine(EngineConfig(hicache_size=1e-9), IDENTITY, PLAIN, VirtualTime())
    settings = EngineConfig(hicache_ratio=1.0, disk_cache_dir="kept")
    with pytest.raises(ConfigError, match="disk_cache_dir"):
        build_fake_engine(settings, IDENTITY, PLAIN, VirtualTime())
    with pytest.raises(ConfigError, match="step_ms must be milliseconds from 0 on, got nan"):
        TimingModel(step_ms=float("nan"), prefill_ms_per_token=0.0)
