"""The scheduler against a world in which anything may happen in any order, over a pool so small that everything runs out.

After every rule the invariants are recomputed. The fake model checks that every slot that is read holds the reading request's own
tokens, in its own namespace; and every answer must equal the undisturbed one, whoever was preempted, aborted or flushed meanwhile.
The ledger must have counted the prompts of those that were admitted, each once, and tell it in ``Stats``.

Branches of a call come together, priorities differ, and some may not wait for long. Owners share prefixes and may have quotas: then some request may find no room, and must end so.
"""

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixmesh.cache.owners import Quota
from prefixmesh.cache.radix_cache import DEFAULT_OPTIONS, RadixOptions
from prefixmesh.ids import Namespace
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.messages import Admitted, Ended, Refused, TokensOut
from tests.support.fake_model import expected_output
from tests.support.scheduling import ENGINE_INFO, NAMESPACE_A, NAMESPACE_B, Bench

MAX_STEPS_TO_END = 2000

NO_QUOTAS: dict[str, Quota] = {}
QUOTAS = [
    NO_QUOTAS,
    {"a": Quota(floor_pages=8)},
    {"a": Quota(ceiling_pages=4)},
    {"a": Quota(floor_pages=6), "b": Quota(floor_pages=2, ceiling_pages=6)},
]
BLOCK_SIZE = 2

REQUESTS = st.tuples(
    st.integers(0, 7),
    st.lists(st.integers(0, 1), max_size=3),
    st.sampled_from([0, 1, 4, 8, 8]),
    st.sampled_from([NAMESPACE_A, NAMESPACE_A, NAMESPACE_B]),
    st.sampled_from([(), (), (7, 21, 38)]),
    st.sampled_from(["a", "b", ""]),
    st.integers(-1, 1),
    st.sampled_from([math.inf, math.inf, math.inf, 20.0]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Random submits, aborts, steps, failures and flushes."""

    @initialize(
        total_pages=st.sampled_from([10, 20]),
        page_size=st.sampled_from([1, 2]),
        kind=st.sampled_from(["radix", "radix", "radix", "hash", "off"]),
        policy=st.sampled_from(["lpm", "lpm", "fcfs", "priority"]),
        max_passed_over=st.sampled_from([0, 1, 32]),
        queue_timeout_s=st.sampled_from([0.0, 0.0, 15.0]),
        chunk=st.sampled_from([0, 1, 3, 64]),
        decode_room=st.sampled_from([0, 0, 4, None]),
        hold_min=st.sampled_from([2, 100]),
        eviction=st.sampled_from(["lru", "lfu", "priority"]),
        quotas=st.sampled_from(QUOTAS),
    )
    def begin(
        self,
        total_pages: int,
        page_size: int,
        kind: str,
        policy: str,
        max_passed_over: int,
        queue_timeout_s: float,
        chunk: int,
        decode_room: int | None,
        hold_min: int,
        eviction: str,
        quotas: dict[str, Quota],
    ) -> None:
        self.may_lack_room = kind == "radix" and any(quota.floor_pages for quota in quotas.values())
        options = RadixOptions(policy=eviction, quotas=quotas, block_size=BLOCK_SIZE)  # type: ignore[arg-type]
        self.bench = Bench(
            total_pages=total_pages,
            page_size=page_size,
            kind=kind,  # type: ignore[arg-type]
            policy=policy,  # type: ignore[arg-type]
            chunk=chunk,
            max_passed_over=max_passed_over,
            queue_timeout_s=queue_timeout_s,
            decode_room=decode_room,
            max_running=4,
            max_queued=6,
            context_length=18,
            hold_min=hold_min,
            options=options if kind == "radix" else DEFAULT_OPTIONS,
        )
        self.engine = EngineCore(info=ENGINE_INFO, scheduler=self.bench.scheduler, runner=self.bench.model)
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.namespaces: dict[str, bytes] = {}
        self.idle_steps = 0
        self.may_time_out = queue_timeout_s > 0
        self.due: set[str] = set()
        self.aborted: set[str] = set()
        self.failed: set[str] = set()

    @rule(burst=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(
        self, burst: list[tuple[int, list[int], int, bytes, tuple[int, ...], str, int, float]]
    ) -> None:
        """Several at once, mostly with much of their prompts in common."""
        for common, tail, max_tokens, namespace, stop, owner, priority, time_left_s in burst:
            prompt = [0] * common + tail
            request_id = f"r{len(self.prompts)}"
            output = expected_output(prompt, max_tokens)
            ends = [index for index, token in enumerate(output) if token in stop]
            self.prompts[request_id] = (output[: ends[0]] if ends else output, len(prompt))
            self.namespaces[request_id] = namespace
            self.bench.submit(
                request_id,
                prompt,
                max_tokens,
                namespace=namespace,
                stop_token_ids=stop,
                owner=owner,
                priority=priority,
                time_left_s=time_left_s,
            )
            if time_left_s < math.inf:
                self.due.add(request_id)

    @rule(common=st.integers(1, 8), branches=st.integers(2, 4), max_tokens=st.integers(1, 8))
    def branch(self, common: int, branches: int, max_tokens: int) -> None:
        """One prompt several times at once, as the branches of a call are."""
        self.submit([(common, [], max_tokens, NAMESPACE_A, (), "a", 0, math.inf)] * branches)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        decoding = [r.request_id for r in self.bench.scheduler.running if r.phase.value == "decoding"]
        step = self.bench.step()
        self.idle_steps = 0 if step is not None else self.idle_steps + 1
        if step is not None:
            visited = [part.request.request_id for part in step.parts]
            assert len(visited) == len(set(visited)), "a request is visited twice in one step (F57)"
            preempted = [r for r in decoding if r not in visited]
            assert step.decoding == len(decoding) - len(preempted)
        elif self.bench.scheduler.has_work:
            assert self.may_lack_room, "there is work and the scheduler does nothing"
            assert decoding, "only a preemption that leaves nobody running may leave a step empty"
            assert self.idle_steps == 1, "there is work and the scheduler does nothing any more"

    @rule(common=st.integers(3, 8), namespace=st.sampled_from([NAMESPACE_A, NAMESPACE_B]), data=st.data())
    def fill(self, common: int, namespace: bytes, data: st.DataObject) -> None:
        """All that runs ends, and a prompt stays cached on somebody's account."""
        owner, tail = data.draw(st.sampled_from(["a", "b"])), data.draw(st.integers(0, 1))
        self.submit([(common, [tail], 0, namespace, (), owner, 0, math.inf)])
        self._run_to_the_end()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Of any request, in any state, also twice or after its end."""
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        self.aborted.add(request_id)
        self.bench.abort(request_id)

    @rule()
    def flush(self) -> None:
        self.bench.scheduler.flush()
        self.bench.scheduler.check_invariants()

    @rule()
    def fail_a_step(self) -> None:
        """A step that raises ends its own requests and no other."""
        step = self.bench.scheduler.next_step(self.bench.now)
        if step is not None:
            self.failed |= {part.request.request_id for part in step.parts}
            self.bench.scheduler.fail(step, "planted", self.bench.now)
        self.bench.events += self.bench.scheduler.take_events()
        self.bench.scheduler.check_invariants()

    @invariant()
    def answers_are_true_prefixes(self) -> None:
        if not hasattr(self, "bench"):
            return
        for request_id, (expected, _) in self.prompts.items():
            answer = self.bench.output(request_id)
            assert answer == expected[: len(answer)], "an answer depends on what happened to others"

    @invariant()
    def who_was_admitted_is_counted_once(self) -> None:
        """Preempted and resumed, put back and tried again: once, with what it found the first time."""
        if not hasattr(self, "bench"):
            return
        ledger = self.bench.scheduler.ledger
        admitted = [event for event in self.bench.events if isinstance(event, Admitted)]
        for namespace in (NAMESPACE_A, NAMESPACE_B):
            mine = [event for event in admitted if self.namespaces[event.request_id] == namespace]
            row = ledger.row(Namespace(namespace))
            assert (row is None) == (not mine)
            if row is not None:
                assert row.requests == len(mine)
                assert row.prompt_tokens == sum(self.prompts[event.request_id][1] for event in mine)
                assert sum(row.hit_tokens) == sum(event.cached_tokens for event in mine)
        totals = ledger.totals()
        assert totals.requests == len(admitted)
        assert totals.miss_tokens.tail >= len(admitted), "the last token of a prompt is always computed"
        assert self.engine.stats().cache == totals
        assert ledger.ignored_records == 0

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self._run_to_the_end()
        kv = self.bench.scheduler.kv
        assert (kv.receipts_out, kv.double_releases) == (0, 0)
        assert kv.free_pages + kv.evictable_pages + kv.protected_pages == kv.total_pages
        assert self.may_lack_room or kv.protected_pages == 0
        for request_id, (expected, prompt_tokens) in self.prompts.items():
            self._check_end(request_id, expected, prompt_tokens)

    def _run_to_the_end(self) -> None:
        for _ in range(MAX_STEPS_TO_END):
            if not self.bench.scheduler.has_work:
                return
            self._step()
        raise AssertionError("some request never ends")

    def _check_end(self, request_id: str, expected: list[int], prompt_tokens: int) -> None:
        events = [e for e in self.bench.events if getattr(e, "request_id", None) == request_id]
        last = events[-1]
        assert isinstance(last, Ended | Refused)
        assert sum(isinstance(e, Ended | Refused) for e in events) == 1, "a request ends exactly once"
        if isinstance(last, Refused):
            assert len(events) == 1
            return
        if last.reason in ("stop", "length"):
            assert self.bench.output(request_id) == expected
            assert isinstance(events[0], Admitted)
            assert events[0].cached_tokens < prompt_tokens
        elif last.reason == "queue_timeout":
            assert self.may_time_out
            assert events == [last], "whoever was admitted in time is served"
        elif last.reason == "too_late":
            assert request_id in self.due
            assert events == [last], "whoever was admitted is computed until its caller leaves"
        elif last.reason == "no_room":
            assert self.may_lack_room
        else:
            assert request_id in (self.aborted if last.reason == "aborted" else self.failed)
        tokens = [token for e in events if isinstance(e, TokensOut) for token in e.token_ids]
        assert last.completion_tokens == len(tokens)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.deep
@pytest.mark.timeout(0)
def test_the_scheduler_machine_for_long() -> None:
    """The same with thousands of histories. A time limit would raise within one of them, which Hypothesis takes for a failure of that
    history; when it is replayed and goes on, Hypothesis calls the strategies flaky."""
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(TestSchedulerMachine.settings, max_examples=5000)
    )
