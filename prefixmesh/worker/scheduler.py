"""The scheduler: which requests compute what in the next step. A pure core; one loop owns it.

Life of a step: ``next_step`` gives decoding requests the page they need (evicting, then preempting), goes on with prompts in
chunks under a token budget, and admits who waits. The shell runs the step's plan, samples, and calls ``complete`` (or ``fail``).
What callers must be told gathers, in order, until ``take_events``.

Cached prefixes are matched and locked in one step; KV is offered to the cache only when it is complete, after each chunk, so
that others share a long prompt while it is still being computed.

With a host tier, a request whose prefix comes back from there is admitted at once and joins the steps when enough has come: what that
needs is ``load_back_desk``'s. Without one there is no keeper, and nothing of it.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from prefixmesh.cache.base import PrefixCache
from prefixmesh.cache.ledger import CacheLedger
from prefixmesh.cache.pages import PageAllocator
from prefixmesh.errors import InvariantError
from prefixmesh.worker.admission import AdmissionQueue
from prefixmesh.worker.admitter import Admitter
from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.decode_growth import grow_decoders
from prefixmesh.worker.engine_rates import EngineRates
from prefixmesh.worker.kv_manager import KvManager
from prefixmesh.worker.load_back_desk import LoadBackDesk
from prefixmesh.worker.messages import EndReason, Event, Refused, Submit, TokenLogprobs, TokensOut
from prefixmesh.worker.output_estimate import OutputEstimate
from prefixmesh.worker.plan_builder import Step as Step
from prefixmesh.worker.plan_builder import StepPart, build_step
from prefixmesh.worker.queue_deadlines import queue_deadline
from prefixmesh.worker.refusals import find_refusal
from prefixmesh.worker.request import Phase, Request
from prefixmesh.worker.running_batch import RunningBatch
from prefixmesh.worker.scheduler_config import SchedulerConfig as SchedulerConfig
from prefixmesh.worker.scheduler_invariants import broken_rules
from prefixmesh.worker.tiers.keeper import Keeper

NO_ROOM: Final = "the KV pool has no room for this request: what is left of it is kept for others"

IN_USE: Final = "a request with this id is being served"
NO_LOGPROBS: Final[Mapping[int, TokenLogprobs]] = MappingProxyType({})

_MS_PER_S = 1000.0


class Scheduler:
    """Continuous batching with chunked prefill over one KV pool."""

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        cache: PrefixCache,
        rates: EngineRates | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """``rates`` tell how long a request will take; without them only what is past its deadline is too late. ``keeper`` is the host
        tier's of ``cache``."""
        self._config = config
        self._rates = EngineRates() if rates is None else rates
        self.keeper = keeper
        """None without a host tier."""

        self.kv = KvManager(allocator, cache, keeper)
        self.ledger = CacheLedger()
        """What the prompts of all requests found in the cache, each counted at its first admission."""

        self._queue = AdmissionQueue(
            config.schedule_policy,
            max_queued=config.max_queued_requests,
            max_passed_over=config.max_passed_over,
            page_size=self.kv.page_size,
            peek=self.kv.peek,
            expect_s=self._least_s,
        )
        self._batch = RunningBatch()
        self.estimate = OutputEstimate(config.decode_room_tokens)
        """How long answers become."""

        self.preemptions = 0
        """How often a running request gave way, since the start."""

        fetches = None if keeper is None or keeper.disk is None else keeper.disk.fetches
        self._admitter = Admitter(config, self.kv, self._batch, self._queue, self.estimate, fetches)
        self._load_backs: LoadBackDesk | None = None
        if keeper is not None:
            self._load_backs = LoadBackDesk(
                keeper, self.kv, self._batch, self._queue.order, self._put_back, self._announce
            )
        self._requests: dict[str, Request] = {}
        self._events: list[Event] = []

    @property
    def token_limit(self) -> int:
        """Most tokens of prompt and answer together: the model's context, or the whole pool where that is less."""
        return min(self._config.context_length, self.kv.total_pages * self.kv.page_size)

    @property
    def has_work(self) -> bool:
        """Whether ``next_step`` has anything to do."""
        return bool(self._requests)

    @property
    def running(self) -> Sequence[Request]:
        """Admitted requests, in order of admission. O(running)."""
        return list(self._batch)

    @property
    def queued(self) -> int:
        """Requests that wait for their first admission, or to resume."""
        return len(self._queue)

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute before the answers of those who prefill and wait go on; O(prefilling + waiting), the latter at numpy's speed."""
        prefilling = sum(request.length - request.computed for request in self._batch.uncomputed())
        return prefilling + self._queue.uncached_tokens

    @property
    def uncached_squares(self) -> int:
        """Of the same tokens, the sum of ``b**2 - a**2`` over those who have the ones from ``a`` to ``b`` to compute. O as above."""
        prefilling = sum(request.length**2 - request.computed**2 for request in self._batch.uncomputed())
        return prefilling + self._queue.uncached_squares

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def submit(self, command: Submit, now: float, grammar: AnswerGrammar | None = None) -> None:
        """Queue a request, or refuse it at once: what can never fit, and one more than the queue holds. Of a full queue somebody of lower
        priority is refused in its place.

        A prompt of exactly ``token_limit`` tokens is served with ``max_tokens`` 0. O(prompt).
        """
        refusal = self._refusal(command, now)
        if refusal is not None:
            self._events.append(refusal)
            return
        request = Request.from_submit(
            command,
            page_size=self.kv.page_size,
            ledger=self.ledger,
            now=now,
            grammar=grammar,
            queue_deadline=queue_deadline(now, command.queue_timeout_s, self._config.queue_timeout_s),
        )
        if command.public:
            self.kv.place(request, command.public)
        self._requests[request.request_id] = request
        self._queue.add(request)
        self._admitter.may_fit_now()  # it may need fewer pages than whoever was asked last

    def abort(self, request_id: str, now: float) -> None:
        """End a request in whatever phase it is; unknown and ended ones are ignored. What it computed stays cached."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "aborted", now)

    def next_step(self, now: float) -> Step | None:
        """Decide the next step; None when there is nothing to compute. Every running request is in it at most once, and a decoding one
        always, unless it waits for a page that a backup is about to give back. Cost O(running), and what ``Admitter.admit`` says while
        there is room."""
        if self._load_backs is not None:
            self.collect(now)
            self._load_backs.join(self._rates, self._config.step_tokens, now)
        for request in self._queue.take_expired(now):
            by_timeout = request.queue_deadline <= request.latest_begin
            self._end(request, "queue_timeout" if by_timeout else "too_late", now)
        waiting = self._grow(now)
        parts = [StepPart(request, 1, True) for request in self._batch.decoding]
        if waiting:
            parts = [part for part in parts if part.request not in waiting]
        decoding = len(parts)
        for request, size in self._admitter.deal_out():
            is_last = request.computed + size == request.length
            parts.append(StepPart(request, size, is_last and request.wants_token))
        if not parts:
            return None
        return build_step(parts, decoding, self.kv.page_size)

    def complete(
        self,
        step: Step,
        next_tokens: Sequence[int],
        now: float,
        failures: Mapping[int, str] | None = None,
        logprobs: Mapping[int, TokenLogprobs] = NO_LOGPROBS,
    ) -> None:
        """Account for a computed step. ``next_tokens[i]`` is for ``step.sampled[i]``; ``failures`` maps such an ``i`` to what went
        wrong with that one request, ``logprobs`` to what it wants to know of its token. O(parts), and O(prompt) for each finished chunk."""
        row = 0
        for request, new_tokens, samples in step.parts:
            index = row
            row += samples
            if request.phase is not Phase.DECODING and request.phase is not Phase.PREFILLING:
                continue  # it has ended, or went back to the queue because what it was loading did not come
            if samples and failures and index in failures:
                self._end(request, "failed", now, failures[index])
                continue
            request.computed += new_tokens
            if request.phase is Phase.PREFILLING:
                self._commit(request, now)
                if request.computed == request.length:
                    self._queue.remove(request)
                    self._batch.start_decoding(request)
            if samples:
                self._take_token(request, next_tokens[index], now, logprobs.get(index))
            elif request.phase is Phase.DECODING:
                # Nothing more was wanted: max_tokens 0, or what was resumed is the whole answer.
                self._end(request, "stop" if request.is_over else "length", now)

    def fail(self, step: Step, error: str, now: float) -> None:
        """End every request of a step that could not be computed; nothing of the step enters the cache."""
        for part in step.parts:
            if part.request.phase in (Phase.PREFILLING, Phase.DECODING):
                self._end(part.request, "failed", now, error)

    def collect(self, now: float) -> None:
        """Acknowledge the copies that have ended, let go on whom they were for, and begin others. O(what has ended)."""
        if self._load_backs is not None and self._load_backs.collect(now):
            self._admitter.may_fit_now()  # what copies locked may be had again

    def void(self, step: Step, now: float) -> None:
        """A step has read KV that did not come: nothing of it counts. Whoever still waits for a load-back computes instead, and begins
        anew before all others; the rest of the step is decided again."""
        self.collect(now)
        if self._load_backs is not None:
            self._load_backs.void(step, now)

    def flush(self) -> None:
        """Empty the prefix cache; running requests go on."""
        self.kv.flush()
        self._queue.order.forget_cached()
        self._admitter.may_fit_now()

    def _refusal(self, command: Submit, now: float) -> Refused | None:
        if command.request_id in self._requests:
            return Refused(request_id=command.request_id, field="request_id", problem=IN_USE)
        refusal = find_refusal(command, token_limit=self.token_limit, vocab_size=self._config.vocab_size)
        if refusal is not None or not self._queue.full:
            return refusal
        giving_way = self._queue.gives_way_to(command.priority)
        if giving_way is None:
            problem = f"{self._config.max_queued_requests} requests are waiting already"
            return self._full(command.request_id, problem, now)
        self._queue.remove(giving_way)
        self._admitter.forget(giving_way)
        giving_way.phase = Phase.ENDED
        del self._requests[giving_way.request_id]
        problem = "its place in a full queue went to a request of higher priority"
        self._events.append(self._full(giving_way.request_id, problem, now))
        return None

    def _full(self, request_id: str, problem: str, now: float) -> Refused:
        after_s = self._queue.retry_after_s(now)
        return Refused(request_id=request_id, field="", problem=problem, retry_after_s=after_s)

    def _least_s(self, request: Request, cached_tokens: int) -> float:
        """Seconds that a request takes from its admission to its end, if its answer is half as long as answers have been lately. O(1)."""
        rates, length = self._rates, request.length
        prefill_ms = rates.prefill_ms(cached_tokens, length)
        most = request.max_tokens - request.output_tokens
        steps = max(0.0, min(most, self.estimate.mean_tokens / 2) - 1.0)
        return (prefill_ms + steps * rates.decode_step_ms) / _MS_PER_S

    def _put_back(self, request: Request, now: float) -> None:
        """It begins anew, before all that were never admitted."""
        self._release(request, keep=False, now=now)
        self._queue.put_back(request)

    def _grow(self, now: float) -> Collection[Request]:
        """Room for the decoding requests' next tokens, and admissions if there is more than that; returns who waits for room."""
        before = len(self._batch)
        by_priority = self._config.schedule_policy == "priority"
        growth = grow_decoders(
            self._batch, self.kv, lambda victim: self._preempt(victim, now), now, by_priority=by_priority
        )
        for request in growth.grown:
            if request.pages > request.promised_pages:
                request.promised_pages = self._admitter.expected_pages(request)
        if len(self._batch) == before and not growth.waiting:
            # Right after a preemption nobody is admitted: the pages just freed are for those who were short.
            self._admit(now)
        return growth.waiting

    def _preempt(self, request: Request, now: float) -> None:
        self._commit(request, now)
        self.kv.save(request, now)
        self._release(request, keep=True, now=now)
        self._queue.put_back(request)
        self.estimate.preempted()
        self.preemptions += 1

    def _admit(self, now: float) -> None:
        while (admissions := self._admitter.admit(now)).roomless is not None:
            # What the others' floors keep, nobody will give back.
            self._end(admissions.roomless, "no_room", now, NO_ROOM)
        self._queue.moved_on(len(admissions.started), now)
        for request in admissions.started:
            if request.admitted_at is None:
                request.admitted_at = now
            if request.load is None and not request.is_announced:
                self._announce(request, 0.0)

    def _announce(self, request: Request, load_back_ms: float) -> None:
        request.is_announced = True
        self._events.append(request.admitted_event(load_back_ms))

    def _commit(self, request: Request, now: float) -> None:
        """Offer to others what is complete, and tell the queue, where some may wait for it."""
        page_size, before = self.kv.page_size, request.shared_pages
        self.kv.commit(request, now)
        if request.shared_pages > before:
            self._queue.order.offered(request, before * page_size, request.shared_pages * page_size)

    def _release(self, request: Request, *, keep: bool, now: float) -> None:
        """Take a running request out of the batch; with ``keep`` all that it computed stays cached."""
        if keep:
            self._commit(request, now)
        self.kv.release(request, keep=keep, now=now)
        self._batch.remove(request)
        self._admitter.may_fit_now()

    def _take_token(
        self, request: Request, token_id: int, now: float, logprobs: TokenLogprobs | None
    ) -> None:
        if token_id in request.stop_ids:
            self._end(request, "stop", now)
            return
        position = request.output_tokens
        request.append(token_id, now)
        self._events.append(
            TokensOut(
                request_id=request.request_id,
                position=position,
                token_ids=(token_id,),
                logprobs=() if logprobs is None else (logprobs,),
            )
        )
        grammar = request.grammar
        if grammar is not None:
            grammar.accept(token_id)
            if grammar.error:
                self._end(request, "failed", now, f"the grammar cannot go on: {grammar.error}")
                return
            if grammar.is_finished:
                self._end(request, "stop", now)
                return
        if request.length == len(request.ids):
            self._end(request, "length", now)

    def _end(self, request: Request, reason: EndReason, now: float, error: str = "") -> None:
        if request.phase in (Phase.PREFILLING, Phase.DECODING):
            # What failed may be wrong: only what was complete before is kept then.
            self._release(request, keep=reason != "failed", now=now)
        self._queue.remove(request)
        self._admitter.forget(request)
        if request.admitted_at is not None and request.max_tokens:
            # An abort counts as an end like any other: a stop string is one, and so is a caller who has read enough.
            self.estimate.ended(request.output_tokens, by_itself=reason in ("stop", "aborted"))
        request.phase = Phase.ENDED
        del self._requests[request.request_id]
        self._admitter.may_fit_now()
        self._events.append(request.ended_event(reason, now, error))

    def check_invariants(self) -> None:
        """Recompute the page sums and every request's ranges; raises InvariantError with the state printed. O(pool)."""
        self.ledger.check_invariants()
        if self.keeper is not None:
            self.keeper.check_invariants()
        broken = broken_rules(
            self.kv,
            self._batch,
            self._queue,
            known=len(self._requests),
            max_running=self._config.max_running_requests,
        )
        if broken:
            raise InvariantError(f"broken: {'; '.join(broken)}; state: {self!r} {list(self._batch)!r}")

    def __repr__(self) -> str:
        kv = self.kv
        return (
            f"<Scheduler {len(self._batch)} running, {len(self._queue)} queued | {kv.free_pages} free, "
            f"{kv.evictable_pages} evictable, {kv.protected_pages} protected of {kv.total_pages} pages>"
        )
