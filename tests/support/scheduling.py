"""A scheduler with a real cache over a fake model, driven step by step by tests."""

import math
from collections.abc import Sequence
from typing import Any

from prefixmesh import tokens
from prefixmesh.cache.base import PrefixCache
from prefixmesh.cache.factory import make_prefix_cache
from prefixmesh.cache.ledger import CacheLedger
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.public import PublicPrefix
from prefixmesh.cache.radix_cache import DEFAULT_OPTIONS, RadixOptions
from prefixmesh.config import PrefixCacheKind, SchedulePolicy
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.messages import (
    Admitted,
    Ended,
    EngineInfo,
    EngineSampling,
    Event,
    Refused,
    Submit,
    TokensOut,
)
from prefixmesh.worker.prefill_savings import PrefillShape
from prefixmesh.worker.request import Request
from prefixmesh.worker.scheduler import Scheduler, SchedulerConfig, Step
from tests.support.fake_model import FAKE_VOCAB, FakeModel

NAMESPACE_A = b"a" * 16
NAMESPACE_B = b"b" * 16

ENGINE_INFO = EngineInfo(
    model="fake",
    model_revision="0",
    vocab_size=FAKE_VOCAB,
    context_length=64,
    page_size=1,
    total_pages=64,
    max_total_tokens=64,
    max_running_requests=8,
    prefix_cache="radix",
    device="cpu",
    dtype="float32",
    eos_token_ids=(),
    memory_sums="none",
    prefill_shape=PrefillShape(linear_flops_per_token=1000, attention_flops_per_pair=2),
)


def greedy(max_tokens: int, *, stop_token_ids: tuple[int, ...] = ()) -> EngineSampling:
    return EngineSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
    )


def submit_command(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    namespace: bytes = NAMESPACE_A,
    stop_token_ids: tuple[int, ...] = (),
    owner: str = "",
    priority: int = 0,
    queue_timeout_s: float = 0.0,
    time_left_s: float = math.inf,
    is_follower: bool = False,
    resumed: Sequence[int] = (),
    public: Sequence[PublicPrefix] = (),
    boundary_tokens: int = 0,
    tail: bytes = b"",
) -> Submit:
    return Submit(
        request_id=request_id,
        namespace=namespace,
        tokens=tokens.pack(prompt),
        sampling=greedy(max_tokens, stop_token_ids=stop_token_ids),
        owner=owner,
        priority=priority,
        queue_timeout_s=queue_timeout_s,
        time_left_s=time_left_s,
        is_follower=is_follower,
        resumed=tokens.pack(resumed),
        public=tuple(public),
        boundary_tokens=boundary_tokens,
        tail=tail,
    )


class Bench:
    """Scheduler, cache, pages and fake model, with a clock that ticks once a call; invariants are checked after each
    unless ``check_each`` is False."""

    def __init__(
        self,
        *,
        total_pages: int = 64,
        page_size: int = 1,
        kind: PrefixCacheKind = "radix",
        policy: SchedulePolicy = "lpm",
        chunk: int = 512,
        max_running: int = 8,
        max_queued: int = 100,
        context_length: int = 1000,
        decode_room: int | None = 4,
        hold_min: int = 32,
        max_passed_over: int = 32,
        queue_timeout_s: float = 0.0,
        options: RadixOptions = DEFAULT_OPTIONS,
        check_each: bool = True,
        rates: EngineRates | None = None,
    ) -> None:
        self._check_each = check_each
        self.allocator = PageAllocator(total_pages)
        self.cache: PrefixCache = make_prefix_cache(kind, self.allocator, page_size, options)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running_requests=max_running,
                max_queued_requests=max_queued,
                chunked_prefill_size=chunk,
                schedule_policy=policy,
                context_length=context_length,
                vocab_size=FAKE_VOCAB,
                shares_prefixes=kind != "off",
                decode_room_tokens=decode_room,
                hold_min_tokens=hold_min,
                max_passed_over=max_passed_over,
                queue_timeout_s=queue_timeout_s,
            ),
            self.allocator,
            self.cache,
            rates,
        )
        self.model = FakeModel(total_pages, page_size)
        self.now = 0.0
        self.events: list[Event] = []

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        namespace: bytes = NAMESPACE_A,
        stop_token_ids: tuple[int, ...] = (),
        owner: str = "",
        priority: int = 0,
        queue_timeout_s: float = 0.0,
        time_left_s: float = math.inf,
        is_follower: bool = False,
        resumed: Sequence[int] = (),
        public: Sequence[PublicPrefix] = (),
        boundary_tokens: int = 0,
        tail: bytes = b"",
    ) -> None:
        command = submit_command(
            request_id,
            prompt,
            max_tokens,
            namespace=namespace,
            stop_token_ids=stop_token_ids,
            owner=owner,
            priority=priority,
            queue_timeout_s=queue_timeout_s,
            time_left_s=time_left_s,
            is_follower=is_follower,
            resumed=resumed,
            public=public,
            boundary_tokens=boundary_tokens,
            tail=tail,
        )
        self.scheduler.submit(command, self._tick())
        self._after()

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id, self._tick())
        self._after()

    def step(self) -> Step | None:
        step = self.scheduler.next_step(self._tick())
        if step is not None:
            self.scheduler.complete(step, self.model.run(step), self._tick())
        self._after()
        return step

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler!r}")

    def output(self, request_id: str) -> list[int]:
        """The answer so far; asserts that no token was lost or repeated."""
        answer: list[int] = []
        for event in self.events:
            if isinstance(event, TokensOut) and event.request_id == request_id:
                assert event.position == len(answer), "a token was lost or repeated"
                answer += event.token_ids
        return answer

    def admitted(self) -> list[str]:
        """Who was admitted, in order; each once, however often it was preempted."""
        return [event.request_id for event in self.events if isinstance(event, Admitted)]

    def computed_tokens(self) -> int:
        """Tokens computed in all steps."""
        return sum(len(plan.token_ids) for plan in self.model.plans)

    def cached(self, request_id: str) -> int:
        [admitted] = [e for e in self.events if isinstance(e, Admitted) and e.request_id == request_id]
        return admitted.cached_tokens

    def ended(self, request_id: str) -> Ended:
        [ended] = [e for e in self.events if isinstance(e, Ended) and e.request_id == request_id]
        return ended

    def refused(self, request_id: str) -> Refused:
        [refused] = [e for e in self.events if isinstance(e, Refused) and e.request_id == request_id]
        return refused

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def _after(self) -> None:
        self.events += self.scheduler.take_events()
        if self._check_each:
            self.scheduler.check_invariants()


def make_request(prompt: Sequence[int], *, number: int = 0, page_size: int = 1, **fields: Any) -> Request:
    """A request outside any scheduler; ``fields`` are ``submit_command``'s."""
    request = Request.from_submit(
        submit_command(f"r{number}", prompt, **fields), page_size=page_size, ledger=CacheLedger(), now=0.0
    )
    request.number = number
    return request
