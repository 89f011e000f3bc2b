"""The scheduler against a world in which anything may happen in any order, over a pool so small that everything runs out.

After every rule the invariants are recomputed. The fake model checks that every slot that is read holds the reading request's own
tokens, in its own namespace; and every answer must equal the undisturbed one, whoever was preempted, aborted or flushed meanwhile.
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

from prefixmesh.worker.messages import Admitted, Ended, Refused, TokensOut
from tests.support.fake_model import expected_output
from tests.support.scheduling import NAMESPACE_A, NAMESPACE_B, Bench

MAX_STEPS_TO_END = 2000

REQUESTS = st.tuples(
    st.integers(0, 7),
    st.lists(st.integers(0, 1), max_size=3),
    st.sampled_from([0, 1, 4, 8, 8]),
    st.sampled_from([NAMESPACE_A, NAMESPACE_A, NAMESPACE_B]),
    st.sampled_from([(), (), (7, 21, 38)]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Random submits, aborts, steps, failures and flushes."""

    @initialize(
        total_pages=st.sampled_from([10, 20]),
        page_size=st.sampled_from([1, 2]),
        kind=st.sampled_from(["radix", "radix", "hash", "off"]),
        policy=st.sampled_from(["lpm", "fcfs"]),
        chunk=st.sampled_from([0, 1, 3, 64]),
        decode_room=st.sampled_from([0, 0, 4]),
        hold_min=st.sampled_from([2, 100]),
    )
    def begin(
        self,
        total_pages: int,
        page_size: int,
        kind: str,
        policy: str,
        chunk: int,
        decode_room: int,
        hold_min: int,
    ) -> None:
        self.bench = Bench(
            total_pages=total_pages,
            page_size=page_size,
            kind=kind,  # type: ignore[arg-type]
            policy=policy,  # type: ignore[arg-type]
            chunk=chunk,
            decode_room=decode_room,
            max_running=4,
            max_queued=6,
            context_length=18,
            hold_min=hold_min,
        )
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()
        self.failed: set[str] = set()

    @rule(burst=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, burst: list[tuple[int, list[int], int, bytes, tuple[int, ...]]]) -> None:
        """Several at once, mostly with much of their prompts in common."""
        for common, tail, max_tokens, namespace, stop in burst:
            prompt = [0] * common + tail
            request_id = f"r{len(self.prompts)}"
            output = expected_output(prompt, max_tokens)
            ends = [index for index, token in enumerate(output) if token in stop]
            self.prompts[request_id] = (output[: ends[0]] if ends else output, len(prompt))
            self.bench.submit(request_id, prompt, max_tokens, namespace=namespace, stop_token_ids=stop)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        decoding = [r.request_id for r in self.bench.scheduler.running if r.phase.value == "decoding"]
        step = self.bench.step()
        if step is not None:
            visited = [part.request.request_id for part in step.parts]
            assert len(visited) == len(set(visited)), "a request is visited twice in one step (F57)"
            preempted = [r for r in decoding if r not in visited]
            assert step.decoding == len(decoding) - len(preempted)
        else:
            assert not self.bench.scheduler.has_work, "there is work and the scheduler does nothing"

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

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(MAX_STEPS_TO_END):
            if not self.bench.scheduler.has_work:
                break
            self._step()
        assert not self.bench.scheduler.has_work, "some request never ends"
        kv = self.bench.scheduler.kv
        assert (kv.protected_pages, kv.double_releases) == (0, 0)
        assert kv.free_pages + kv.evictable_pages == kv.total_pages
        for request_id, (expected, prompt_tokens) in self.prompts.items():
            self._check_end(request_id, expected, prompt_tokens)

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
        else:
            assert request_id in (self.aborted if last.reason == "aborted" else self.failed)
        tokens = [token for e in events if isinstance(e, TokensOut) for token in e.token_ids]
        assert last.completion_tokens == len(tokens)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.deep
def test_the_scheduler_machine_for_long() -> None:
    """The same with thousands of histories."""
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(TestSchedulerMachine.settings, max_examples=5000)
    )
