"""The scheduler with a host tier against a world in which copies begin, come and fail in any order, over pools so small that everything
runs out. After every rule the invariants are recomputed; the fake model checks every slot that is read against the very request that
reads it, and every answer must equal the undisturbed one.

``test_scheduler_machine`` is the same without a host tier; ``test_tiers_traffic`` the same in time, with copies that last.
"""

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

from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.messages import Admitted, Ended, Refused
from tests.support.fake_model import expected_output
from tests.support.scheduling import NAMESPACE_A, NAMESPACE_B
from tests.support.tier_bench import TierBench

MAX_STEPS_TO_END = 3000

REQUESTS = st.tuples(
    st.integers(0, 7),
    st.lists(st.integers(0, 1), max_size=3),
    st.sampled_from([0, 1, 4, 8, 8]),
    st.sampled_from([NAMESPACE_A, NAMESPACE_A, NAMESPACE_B]),
)


class SchedulerTiersMachine(RuleBasedStateMachine):
    """Random submits, aborts, steps and flushes, and what copies do meanwhile."""

    @initialize(
        device_pages=st.sampled_from([12, 20]),
        host_pages=st.sampled_from([6, 16, 64]),
        page_size=st.sampled_from([1, 2]),
        policy=st.sampled_from(["lpm", "fcfs", "priority"]),
        writes=st.sampled_from(["write_through", "write_through", "write_through_selective"]),
        chunk=st.sampled_from([0, 1, 3, 64]),
        hold_min=st.sampled_from([2, 100]),
        prefill_tokens_per_s=st.sampled_from([0.0, 0.0, 10.0, 1e9]),
        max_queued_backups=st.sampled_from([1, 100]),
    )
    def begin(
        self,
        device_pages: int,
        host_pages: int,
        page_size: int,
        policy: str,
        writes: str,
        chunk: int,
        hold_min: int,
        prefill_tokens_per_s: float,
        max_queued_backups: int,
    ) -> None:
        self.bench = TierBench(
            device_pages=device_pages,
            host_pages=host_pages,
            page_size=page_size,
            chunk=chunk,
            write_policy=writes,  # type: ignore[arg-type]
            rates=EngineRates(prefill_tokens_per_s=prefill_tokens_per_s),
            keeper={"max_queued_backups": max_queued_backups},
            schedule_policy=policy,
            hold_min_tokens=hold_min,
            max_running_requests=4,
            max_queued_requests=6,
            context_length=12,
        )
        self.aborted: set[str] = set()
        self.may_lack_room = False

    @rule(burst=st.lists(REQUESTS, min_size=1, max_size=3))
    def submit(self, burst: list[tuple[int, list[int], int, bytes]]) -> None:
        """Several at once, mostly with much of their prompts in common."""
        for common, tail, max_tokens, namespace in burst:
            name = f"r{len(self.bench.prompts)}"
            self.bench.submit(name, [0] * common + tail, max_tokens, namespace=namespace)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule()
    def run_to_the_end(self) -> None:
        self._run()

    @precondition(lambda self: self.bench.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Of any request, in any state, also twice or after its end."""
        name = data.draw(st.sampled_from(sorted(self.bench.prompts)))
        self.aborted.add(name)
        self.bench.abort(name)

    @rule()
    def flush(self) -> None:
        self.bench.flush()

    @rule(pages=st.integers(1, 20))
    def evict(self, pages: int) -> None:
        """As others' prompts would."""
        self.bench.cache.evict(pages)

    @rule(pages=st.integers(1, 8))
    def evict_from_the_host(self, pages: int) -> None:
        self.bench.cache.evict_host(pages)

    @rule(kinds=st.sampled_from([set(), {"offload"}, {"restore"}, {"offload", "restore"}]))
    def hold(self, kinds: set[str]) -> None:
        """Which copies take their time from now on."""
        self.bench.mover.holds = kinds  # type: ignore[assignment]

    @precondition(lambda self: self.bench.mover.jobs)
    @rule(data=st.data(), what=st.sampled_from(["finish", "fail", "arrive", "arrive", "never", "begin"]))
    def move(self, data: st.DataObject, what: str) -> None:
        """Something becomes of one of the copies under way, whichever."""
        mover = self.bench.mover
        number = data.draw(st.sampled_from(sorted(mover.jobs)))
        if what == "finish":
            mover.finish(number)
        elif what == "fail":
            mover.fail(number)
        elif what == "begin":
            mover.begun.add(number)
        else:
            mover.arrive(number)
            if what == "never":
                mover.never_comes.add(number)

    @rule(error=st.sampled_from(["", "", "broken at the end"]))
    def tell(self, error: str) -> None:
        """How those end that a step asks for."""
        self.bench.mover.told = error

    @rule(seconds=st.sampled_from([0.1, 0.3, 2.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.bench.now += seconds

    @invariant()
    def answers_are_true_prefixes(self) -> None:
        for name, (prompt, max_tokens) in self.bench.prompts.items() if hasattr(self, "bench") else ():
            answer = self.bench.output(name)
            assert answer == expected_output(prompt, max_tokens)[: len(answer)]

    @invariant()
    def who_was_announced_is_counted_once_and_with_what_it_was_told(self) -> None:
        if not hasattr(self, "bench"):
            return
        told = [event for event in self.bench.events if isinstance(event, Admitted)]
        totals = self.bench.scheduler.ledger.totals()
        assert totals.requests == len({event.request_id for event in told}) == len(told)
        assert sum(totals.hit_tokens) == sum(event.cached_tokens for event in told)
        assert totals.hit_tokens.host == sum(event.host_tokens for event in told)
        assert self.bench.scheduler.ledger.ignored_records == 0

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.mover.holds = set()
        self.bench.mover.finish()
        self._run()
        self.bench.check_at_rest()
        for name, (prompt, max_tokens) in self.bench.prompts.items():
            ends = [e for e in self.bench.events if isinstance(e, Ended | Refused) and e.request_id == name]
            assert len(ends) == 1, "a request ends exactly once"
            if isinstance(ends[0], Refused):
                continue
            if ends[0].reason == "aborted":
                assert name in self.aborted
                continue
            if ends[0].reason == "no_room":
                assert self.may_lack_room, "a copy that is under way keeps nobody from being served"
                continue
            assert ends[0].reason == "length", ends[0]
            assert self.bench.output(name) == expected_output(prompt, max_tokens)

    def _step(self) -> None:
        bench = self.bench
        if bench.keeper.is_copying and not bench.keeper.may_free_pages(bench.now + 0.1):
            self.may_lack_room = True  # all of them are taken for stuck
        self.bench.step()
        step = self.bench.model.step
        if step is not None:
            visited = [part.request.request_id for part in step.parts]
            assert len(visited) == len(set(visited)), "a request is visited twice in one step (F57)"

    def _run(self) -> None:
        for _ in range(MAX_STEPS_TO_END):
            if not self.bench.core.has_work:
                return
            self._step()
            if self.bench.model.step is None:
                self.bench.now += 0.1
        raise AssertionError(f"some request never ends: {self.bench.scheduler!r} {self.bench.keeper!r}")


TestSchedulerTiersMachine = SchedulerTiersMachine.TestCase
TestSchedulerTiersMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.deep
@pytest.mark.timeout(0)
def test_the_scheduler_machine_with_a_host_tier_for_long() -> None:
    """The same with thousands of histories."""
    run_state_machine_as_test(
        SchedulerTiersMachine, settings=settings(TestSchedulerTiersMachine.settings, max_examples=3000)
    )
