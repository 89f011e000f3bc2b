"""An engine's core with a host tier over the fake model, driven step by step; invariants are checked after each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from prefixmesh.cache.pages import PageAllocator
from prefixmesh.cache.radix_cache import RadixCache, RadixOptions
from prefixmesh.config import HostWritePolicy
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cache_recorder import CacheRecorder
from prefixmesh.worker.engine import EngineCore
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.messages import Admitted, Ended, Event, TokensOut
from prefixmesh.worker.prefix_desk import PrefixDesk
from prefixmesh.worker.request import Request
from prefixmesh.worker.scheduler import Scheduler, SchedulerConfig, Step
from prefixmesh.worker.tiers.disk_jobs import Disk
from prefixmesh.worker.tiers.keeper import Keeper, KeeperConfig
from tests.support.fake_model import FAKE_VOCAB, FakeModel, expected_output
from tests.support.scheduling import ENGINE_INFO, NAMESPACE_A, submit_command
from tests.support.scripted_mover import ScriptedMover


class CheckedModel(FakeModel):
    """Asks for each layer, and checks each slot against the very request that reads it."""

    mover: ScriptedMover
    step: Step | None = None

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        self.mover.await_layer(0)
        assert self.step is not None
        assert self.step.plan is plan
        self._check_against_requests(self.step)
        return super().forward(plan)


class NotedSteps(Scheduler):
    """Tells the model whose step it computes."""

    model: CheckedModel

    def next_step(self, now: float) -> Step | None:
        self.model.step = super().next_step(now)
        return self.model.step


class TierBench:
    """See the module. The clock ticks by a millisecond a call."""

    def __init__(
        self,
        *,
        device_pages: int = 16,
        host_pages: int = 64,
        page_size: int = 1,
        chunk: int = 512,
        write_policy: HostWritePolicy = "write_through",
        rates: EngineRates | None = None,
        options: dict[str, Any] | None = None,
        keeper: dict[str, Any] | None = None,
        disk: Callable[[ScriptedMover], Disk] | None = None,
        **config: Any,
    ) -> None:
        """``rates`` are never measured anew: without any, all load-backs are worth it. ``keeper`` are further fields of ``KeeperConfig``, ``disk`` makes
        what stands behind the host."""
        rates = rates or EngineRates()
        self.allocator, self.host = PageAllocator(device_pages), PageAllocator(host_pages)
        recorder = CacheRecorder()
        tree: dict[str, Any] = {"host": self.host, "events": recorder, "block_size": 2}
        self.cache = RadixCache(self.allocator, page_size, RadixOptions(**tree | (options or {})))
        self.model = CheckedModel(device_pages, page_size)
        self.model.mover = self.mover = ScriptedMover(self.model, page_size, host_pages)
        self.mover.on_wait = self._pass
        self.keeper = Keeper(
            self.cache,
            self.mover,
            rates,
            KeeperConfig(device_pages=device_pages, write_policy=write_policy, **(keeper or {})),
            None if disk is None else disk(self.mover),
        )
        defaults: dict[str, Any] = {
            "max_running_requests": 8,
            "max_queued_requests": 100,
            "schedule_policy": "lpm",
            "context_length": 1000,
            "decode_room_tokens": 0,
        }
        settings = SchedulerConfig(chunked_prefill_size=chunk, vocab_size=FAKE_VOCAB, **defaults | config)
        self.scheduler = NotedSteps(settings, self.allocator, self.cache, rates, self.keeper)
        self.scheduler.model = self.model
        self.now = 0.0
        self.core = EngineCore(
            info=ENGINE_INFO,
            scheduler=self.scheduler,
            runner=self.model,
            recorder=recorder,
            prefixes=PrefixDesk(self.cache),
            clock=lambda: self.now,
        )
        self.events: list[Event] = []
        self.prompts: dict[str, tuple[list[int], int]] = {}

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **fields: Any) -> None:
        self.prompts[name] = list(prompt), max_tokens
        self.events += self.core.submit(submit_command(name, prompt, max_tokens, **fields), self._tick())
        self._check()

    def abort(self, name: str) -> None:
        self.events += self.core.abort(name, self._tick())
        self._check()

    def flush(self) -> None:
        self.core.flush()
        self._check()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.events += self.core.step(self._tick())
            self._check()

    def until(self, condition: Callable[[], object], pause_s: float = 0.0, limit: int = 2000) -> None:
        """Step until something holds; the clock goes on by ``pause_s`` more before each step."""
        for _ in range(limit):
            if condition():
                return
            self.now += pause_s
            self.step()
        raise AssertionError(f"it does not come to that in {limit} steps: {self.scheduler!r} {self.keeper!r}")

    def run(self, limit: int = 2000) -> None:
        """Until there is nothing left to do: copies that are held are, if nobody waits for them."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler!r} {self.keeper!r}")

    def serve(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **fields: Any) -> Admitted:
        """One request alone, from its beginning to its end; checks the answer."""
        self.submit(name, prompt, max_tokens, **fields)
        self.run()
        assert self.output(name) == expected_output(list(prompt), max_tokens)
        return self.admitted(name)

    def evict(self) -> None:
        """Take all from the device that nothing locks."""
        self.cache.evict(self.allocator.total_pages)
        self._check()

    def loading(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running if request.load is not None]

    def running(self, name: str) -> Request:
        [request] = [request for request in self.scheduler.running if request.request_id == name]
        return request

    def output(self, name: str) -> list[int]:
        answer: list[int] = []
        for event in self.events:
            if isinstance(event, TokensOut) and event.request_id == name:
                assert event.position == len(answer), "a token was lost or repeated"
                answer += event.token_ids
        return answer

    def admitted(self, name: str) -> Admitted:
        [event] = [e for e in self.events if isinstance(e, Admitted) and e.request_id == name]
        return event

    def is_announced(self, name: str) -> bool:
        return any(isinstance(e, Admitted) and e.request_id == name for e in self.events)

    def ended(self, name: str) -> Ended:
        [event] = [e for e in self.events if isinstance(e, Ended) and e.request_id == name]
        return event

    def check_at_rest(self) -> None:
        """Nobody holds anything any more."""
        kv = self.scheduler.kv
        assert not self.core.has_work
        assert not self.keeper.is_copying
        assert (kv.receipts_out, kv.double_releases, kv.protected_pages, kv.copying_pages) == (0, 0, 0, 0)
        assert self.cache.host_protected_pages == 0
        assert kv.free_pages + kv.evictable_pages == kv.total_pages
        assert self.host.free_pages + self.cache.host_pages == self.host.total_pages
        for name, (prompt, max_tokens) in self.prompts.items():
            answer = self.output(name)
            assert answer == expected_output(prompt, max_tokens)[: len(answer)]

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def _tick(self) -> float:
        self.now += 0.001
        return self.now

    def _check(self) -> None:
        self.core.check_invariants()


__all__ = ["NAMESPACE_A", "TierBench"]
