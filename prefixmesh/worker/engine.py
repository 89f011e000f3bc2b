"""The engine's core: one scheduler, one model runner, and what ties a step of them together.

It runs on whatever thread drives it, and is never called from two. An error in computing or sampling a step is the step's: its
requests end as ``failed``, everything they held is released, and the engine goes on. An error of the scheduler itself is a bug
after which no count can be trusted: it ends the engine, and every stream learns so.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

import torch

from prefixmesh.errors import DeviceLostError, InternalError, InvalidRequestError, LoadBackError
from prefixmesh.worker.adapter_desk import NO_SHOP, AdapterDesk
from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.batch_plan import BatchPlan
from prefixmesh.worker.cache_recorder import CacheRecorder
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.engine_stats import TierCounts
from prefixmesh.worker.entrance import Entrance
from prefixmesh.worker.kv_desk import KvDesk
from prefixmesh.worker.logit_rules import RuledRow, apply_rules
from prefixmesh.worker.logprobs import model_logprobs, read_logprobs
from prefixmesh.worker.messages import (
    Abort,
    CacheChanges,
    EngineCommand,
    EngineInfo,
    Event,
    Flush,
    GetStats,
    ListAdapters,
    LoadAdapter,
    Stats,
    Submit,
    UnloadAdapter,
)
from prefixmesh.worker.prefix_desk import PrefixDesk
from prefixmesh.worker.prefix_messages import ReadKv, WriteKv
from prefixmesh.worker.sampling import sample
from prefixmesh.worker.scheduler import NO_LOGPROBS, Scheduler, Step
from prefixmesh.worker.tiers.keeper import Keeper

logger = logging.getLogger(__name__)

_NO_TIERS: Final = TierCounts()

READY_WAIT_S: Final = 0.005
"""With nothing else to do, a step waits so long for a grammar, an adapter, or KV that is being copied: commands that come meanwhile wait as
long."""

SETTLE_WAIT_S: Final = 0.25
"""A step that has read KV while it came waits so long at most to be told that all has come well: it has by then, but for the telling."""


class Runner(Protocol):
    """What computes a plan: ``worker.model.runner.ModelRunner``, or a fake."""

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """Write the new tokens' KV and return logits [R, vocab] float32 of the plan's ``logit_rows``."""
        ...


class EngineCore:
    """Submit, abort, step: everything a worker's engine does, without a thread or a socket."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        rates: EngineRates | None = None,
        compile_grammar: Callable[[Submit], AnswerGrammar] | None = None,
        adapters: AdapterDesk | None = None,
        queue_timeout_s: float = 0.0,
        recorder: CacheRecorder | None = None,
        prefixes: PrefixDesk | None = None,
        copies: KvDesk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._rates = rates or EngineRates()
        self._clock = clock
        self._adapters = AdapterDesk(NO_SHOP) if adapters is None else adapters
        self._entrance = Entrance(scheduler, compile_grammar or _no_grammars, self._adapters, queue_timeout_s)
        self._recorder = CacheRecorder() if recorder is None else recorder
        self._prefixes = PrefixDesk() if prefixes is None else prefixes
        self._copies = copies
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, a copy between the tiers is to be acknowledged or begun, or KV is to be read or written
        for another worker."""
        if self._scheduler.has_work or self._entrance.has_work:
            return True
        if self._copies is not None and self._copies.has_work:
            return True
        keeper = self._scheduler.keeper
        return keeper is not None and keeper.has_work()

    def handle(self, command: EngineCommand, now: float) -> list[Event]:
        """Take one command as it came from a front."""
        self._prefixes.expire(now)
        return self._with_changes(self._handle(command, now))

    def _handle(self, command: EngineCommand, now: float) -> list[Event]:
        match command:
            case Submit():
                self._prefixes.note(command)
                return self.submit(command, now)
            case Abort(request_id=request_id):
                return self.abort(request_id, now)
            case Flush():
                self.flush()
                return []
            case GetStats():
                return [self.stats()]
            case LoadAdapter() | UnloadAdapter() | ListAdapters():
                return self._entrance.handle(command)
            case ReadKv() | WriteKv() if self._copies is not None:
                answer = self._copies.take(command, now)
                return [] if answer is None else [answer]
            case _:
                return [self._prefixes.handle(command, now)]

    def submit(self, command: Submit, now: float) -> list[Event]:
        """Queue a request; the events say at once when it is refused. One that needs a grammar, or an adapter that is not in memory,
        waits beside the queue until it has it."""
        return self._entrance.submit(command, now)

    def abort(self, request_id: str, now: float) -> list[Event]:
        """End a request in whatever state it is; unknown ids are ignored."""
        return self._entrance.abort(request_id, now)

    def flush(self) -> None:
        """Empty the prefix cache; running requests go on."""
        self._scheduler.flush()

    def step(self, now: float) -> list[Event]:
        """Compute one step, if there is anything to compute, read or write at most one part of KV, and return what happened."""
        self._prefixes.expire(now)
        wait_s = 0.0 if self._scheduler.has_work else READY_WAIT_S
        events = self._entrance.collect(now, wait_s) if self._entrance.has_work else []
        step = self._scheduler.next_step(now)
        if step is not None:
            self._steps += 1
            self._compute(step)
        if self._copies is not None and self._copies.has_work:
            events.append(self._copies.turn(self._clock()))
        if self._scheduler.keeper is not None:
            self._see_to_copies(self._scheduler.keeper, is_idle=step is None)
        return self._with_changes(events + self._entrance.take_events())

    def stats(self) -> Stats:
        """The engine's state now. O(1)."""
        scheduler, kv, keeper = self._scheduler, self._scheduler.kv, self._scheduler.keeper
        return Stats(
            running=len(scheduler.running),
            queued=scheduler.queued + len(self._entrance),
            total_pages=kv.total_pages,
            free_pages=kv.free_pages,
            evictable_pages=kv.evictable_pages,
            protected_pages=kv.protected_pages,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step_ms=self._rates.decode_step_ms,
            prefill_ms_per_token=self._rates.prefill_ms_per_token,
            prefill_ms_per_token2=self._rates.prefill_ms_per_token2,
            rated_prefills=self._rates.rated_prefills,
            cache=scheduler.ledger.totals(),
            double_releases=kv.double_releases,
            steps=self._steps,
            preemptions=scheduler.preemptions,
            evicted_pages=kv.evicted_pages,
            uncached_tokens=scheduler.uncached_tokens,
            uncached_squares=scheduler.uncached_squares,
            answer_tokens=round(scheduler.estimate.mean_tokens),
            token_interval_ms=self._rates.token_interval_ms,
            resident_adapters=self._adapters.table.resident,
            adapter_load_ms=self._adapters.load_ms,
            adapters=self._adapters.table.counts(),
            load_back_ms_per_token=0.0 if keeper is None else keeper.rates.load_back_ms_per_token,
            tiers=_NO_TIERS if keeper is None else keeper.counts(),
            pins=self._prefixes.counts(),
        )

    def close(self) -> None:
        """Nothing is computed or copied any more."""
        if self._scheduler.keeper is not None:
            self._scheduler.keeper.close()

    def check_invariants(self) -> None:
        """The scheduler's, the cache's, the pins' and the adapters'; O(pool)."""
        self._scheduler.check_invariants()
        self._prefixes.check_invariants()
        self._adapters.table.check_invariants()

    def _with_changes(self, events: list[Event]) -> list[Event]:
        """``events``, after what happened to the cache meanwhile."""
        changes = self._recorder.take()
        return [CacheChanges(changes=changes), *events] if changes else events

    def _see_to_copies(self, keeper: Keeper, *, is_idle: bool) -> None:
        """Acknowledge what was copied meanwhile, and begin what was inserted. Where there is nothing to compute until something has been
        copied, wait for that, a little at a time."""
        if is_idle and self._scheduler.has_work and keeper.is_copying:
            keeper.wait(READY_WAIT_S)
        self._scheduler.collect(self._clock())

    def _settle(self, keeper: Keeper, step: Step) -> None:
        """See that all that a step has read while it came did come, and have the tree know. Raises LoadBackError when it is not told in time."""
        wait_until = self._clock() + SETTLE_WAIT_S
        self._scheduler.collect(self._clock())
        while not all(load.has_ended for load in step.loads):
            left_s = wait_until - self._clock()
            if left_s <= 0.0:
                raise LoadBackError("a load-back was not told to have ended")
            keeper.wait(left_s)
            self._scheduler.collect(self._clock())

    def _compute(self, step: Step) -> None:
        started, keeper = self._clock(), self._scheduler.keeper
        try:
            if keeper is not None:
                keeper.expect(step.loads)
            requests = [part.request.request_id for part in step.parts] if self._adapters.in_use else []
            logits = self._runner.forward(self._adapters.complete(step.plan, requests))
            wanted = {
                row: request.sampling.logprobs
                for row, request in enumerate(step.sampled)
                if request.sampling.logprobs is not None
            }
            table = model_logprobs(logits, wanted) if wanted else None
            broken = _apply_rules(logits, step)
            sampled = sample(
                logits,
                [request.sampling for request in step.sampled],
                [request.output_tokens for request in step.sampled],
            )
            if keeper is not None and step.loads:
                self._settle(keeper, step)
            ended = self._clock()
            logprobs = NO_LOGPROBS if table is None else read_logprobs(table, wanted, sampled.token_ids)
            self._scheduler.complete(step, sampled.token_ids, ended, sampled.failures | broken, logprobs)
        except LoadBackError as error:
            logger.warning(
                "engine.step_void requests=%d load_backs=%d: %s", len(step.parts), len(step.loads), error
            )
            self._scheduler.void(step, self._clock())
            return
        except DeviceLostError:
            raise  # no step can be computed any more: the process ends, and a new one may find the GPU well
        except Exception as error:  # a step's error is the step's: whatever it was, others must go on
            logger.exception("engine.step_failed requests=%d", len(step.parts))
            shown = str(error) if isinstance(error, InternalError) else type(error).__name__
            self._scheduler.fail(step, f"the step could not be computed: {shown}", self._clock())
            return
        if step.loads:
            return  # it may have waited for them, which is no measure of computing
        self._rates.record(
            prefill_tokens=step.prefill_tokens,
            prefill_squares=step.prefill_squares,
            decoding=step.decoding,
            elapsed_s=ended - started,
            now=ended,
        )


def _apply_rules(logits: torch.Tensor, step: Step) -> dict[int, str]:
    """Change the logits of the requests that ask for it, in place; by row, what went wrong."""
    ruled = []
    for row, request in enumerate(step.sampled):
        if request.changes_logits:
            if request.tally is not None:
                request.tally.catch_up(request.length)
            ruled.append(
                RuledRow(row, request.sampling, request.output_tokens, request.tally, request.grammar)
            )
    return apply_rules(logits, ruled) if ruled else {}


def _no_grammars(command: Submit) -> AnswerGrammar:
    field = "sampling.json_schema" if command.sampling.json_schema else "sampling.regex"
    raise InvalidRequestError(field, "this engine knows no grammars")
