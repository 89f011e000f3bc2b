"""A worker in a replay: prompts are computed one after the other, answers decode beside them, and time goes by a timing model.

    queue -> prefill, a chunk a step -> first token -> decoding, a token a step -> end
                                          |                                         |
    cache <-- the prompt's blocks --------+ <-- the answer's blocks ----------------+

A step takes what ``TimingModel`` says for its chunk of prefill and for all who decode. Steps in which nothing begins or ends are passed over
at once: between two such moments they are equally long but for the KV that grows, which is counted anew at each.

This is not the engine that serves (``worker.scheduler``): prompts are never computed together nor out of turn, nothing is preempted, the KV
of what runs takes no room from what is cached, and any number decodes at a time.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from prefixmesh.ids import Fingerprint
from prefixmesh.sim.kernel import Simulation, Timer
from prefixmesh.sim.replay_cache import BlockCache, Change, Held
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import WorkloadRequest

_MS_PER_S: Final = 1e3


class Job:
    """One request on its way, and what has become of it. Times are seconds of the simulation."""

    __slots__ = (
        "arrived_at",
        "device_tokens",
        "ended_at",
        "first_token_at",
        "host_tokens",
        "left_names",
        "names",
        "number",
        "request",
        "uncached_tokens",
        "worker",
    )

    def __init__(
        self,
        number: int,
        request: WorkloadRequest,
        names: Sequence[Fingerprint],
        left_names: Sequence[Fingerprint],
    ) -> None:
        self.number = number
        self.request = request
        self.names = names
        self.left_names = left_names
        """Of the whole blocks that prompt and answer fill together; none where the answer leaves nothing."""

        self.worker = 0
        self.arrived_at = self.first_token_at = self.ended_at = 0.0
        self.device_tokens = self.host_tokens = 0
        """Tokens of the prompt that were found, and brought back from the host."""

        self.uncached_tokens = request.input_length
        """To be computed: expected until it begins."""

    @property
    def cached_tokens(self) -> int:
        """Found on either tier and used."""
        return self.device_tokens + self.host_tokens


class Listener(Protocol):
    """Who hears of what happens to requests at a worker."""

    def begun(self, job: Job) -> None:
        """Its prefill begins: what it found is known."""
        ...

    def first_token(self, job: Job) -> None:
        """Its prefill is over."""
        ...

    def ended(self, job: Job) -> None:
        """It has its answer."""
        ...

    def changed(self, worker: int, changes: Sequence[Change]) -> None:
        """Blocks came to a worker's cache, and others went."""
        ...


class _Prefill(NamedTuple):
    job: Job
    steps: int
    last_step: int | float
    ms_a_step: float


class _Decoding(NamedTuple):
    last_step: float
    number: int
    job: Job
    first_step: float


class ReplayWorker:
    """See the module. ``at_once``: see ``ReplaySpec.at_once``."""

    def __init__(
        self,
        sim: Simulation,
        place: int,
        cache: BlockCache,
        timing: TimingModel,
        listener: Listener,
        *,
        block_size: int,
        chunk_tokens: int,
        at_once: bool = False,
    ) -> None:
        self.place = place
        self.cache = cache
        self.timing = timing
        self._sim = sim
        self._listener = listener
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._at_once = at_once
        self._queue: deque[Job] = deque()
        self._coming: Counter[Fingerprint] = Counter()
        self._prefill: _Prefill | None = None
        self._decoding: list[_Decoding] = []
        # Steps that have been made, since when they are as long as now, and how long that is.
        self._step = 0.0
        self._since = sim.now
        self._step_ms = 0.0
        self._timer: Timer | None = None
        self._queued_tokens = 0
        self._queued_squares: float = 0
        # Of all who decode, prompt tokens less the step at which each began: with the steps made, the tokens of their KV.
        self._kv_base = 0.0
        self.work_ms = 0.0
        """Prefill, load-back and the decoding's own arithmetic, of all that was sent here."""

        self.prompt_tokens = 0
        """Of all that was sent here."""

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._queue) + (self._prefill is not None) + len(self._decoding)

    @property
    def queued(self) -> int:
        """Those whose prefill has not begun."""
        return len(self._queue)

    @property
    def decode_tokens(self) -> float:
        """Tokens of KV of those who decode, now."""
        return self._kv_base + len(self._decoding) * self._steps_now()

    @property
    def running_tokens(self) -> float:
        """Tokens of KV of those who decode or prefill, now."""
        prefill = self._prefill
        return self.decode_tokens + (0 if prefill is None else prefill.job.request.input_length)

    @property
    def waiting_tokens(self) -> float:
        """Of prompts that are still to be computed: as expected, and what is left of the one that is."""
        return self._queued_tokens + self._left_tokens()

    @property
    def waiting_squares(self) -> float:
        """The sum of ``b**2 - a**2`` over them, ``a`` to ``b`` being what is to be computed of each."""
        prefill = self._prefill
        return self._queued_squares + (
            0.0 if prefill is None else _squares(prefill.job.request.input_length, self._left_tokens())
        )

    @property
    def step_ms(self) -> float:
        """How long a step without prefill is now."""
        return self.timing.decode_step_ms(len(self._decoding), int(self.decode_tokens))

    def held(self, names: Sequence[Fingerprint]) -> Held:
        """What will be cached of a prompt when its turn comes, as far as can be told: what is, and what those before it will leave."""
        return self.cache.held(names, self._coming)

    def take(self, job: Job) -> None:
        """A request is sent here, now."""
        request = job.request
        self.prompt_tokens += request.input_length
        if self._at_once:
            self._find(job)
            self._use(job.names)
        else:
            held = self.held(job.names)
            job.uncached_tokens = request.input_length - self._tokens(held.total, request)
        self._coming.update(job.names)
        self._queue.append(job)
        self._queued_tokens += job.uncached_tokens
        self._queued_squares += _squares(request.input_length, job.uncached_tokens)
        if self._prefill is None:
            self._pass_time()
            self._begin_next()
            self._set_timer()

    # How it goes.

    def _begin_next(self) -> None:
        if not self._queue:
            return
        job = self._queue.popleft()
        self._queued_tokens -= job.uncached_tokens
        self._queued_squares -= _squares(job.request.input_length, job.uncached_tokens)
        if not self._at_once:
            self._find(job)
        load_ms = job.host_tokens * self.timing.load_back_ms_per_token
        prefill_ms = self.timing.prefill_ms(job.uncached_tokens, job.cached_tokens)
        steps = max(1, math.ceil(job.uncached_tokens / self._chunk_tokens))
        self._prefill = _Prefill(job, steps, self._step + steps, (load_ms + prefill_ms) / steps)
        decode_ms = job.request.output_length * self.timing.decode_ms_per_sequence
        self.work_ms += load_ms + prefill_ms + decode_ms
        self._listener.begun(job)

    def _find(self, job: Job) -> None:
        """What is cached counts; what is on the host only where bringing it back is quicker than computing it."""
        request, timing = job.request, self.timing
        held = self.cache.held(job.names)
        device, total = (self._tokens(blocks, request) for blocks in held)
        computing_ms = timing.prefill_ms(total - device, device)
        if timing.load_back_ms_per_token * (total - device) >= computing_ms:
            total = device
        job.device_tokens, job.host_tokens = device, total - device
        job.uncached_tokens = request.input_length - total

    def _use(self, names: Sequence[Fingerprint]) -> None:
        changes = self.cache.use(names)
        if changes:
            self._listener.changed(self.place, changes)

    def _on_step(self) -> None:
        """A step is over at whose end something ends."""
        self._pass_time()
        # Sums of floats drift: whoever was to be reached is.
        self._step = max(self._step, self._next_step())
        if self._prefill is not None and self._prefill.last_step <= self._step:
            self._end_prefill(self._prefill.job)
        while self._decoding and self._decoding[0].last_step <= self._step:
            self._end_decoding(heapq.heappop(self._decoding))
        if self._prefill is None:
            self._begin_next()
        self._set_timer()

    def _end_prefill(self, job: Job) -> None:
        self._prefill = None
        self._coming.subtract(job.names)
        for name in job.names:
            if not self._coming[name]:
                del self._coming[name]
        if not self._at_once:
            self._use(job.names)
        job.first_token_at = self._sim.now
        self._listener.first_token(job)
        # The first token came with the last of the prompt.
        last_step = self._step + job.request.output_length - 1
        if last_step <= self._step:
            self._end(job)
            return
        heapq.heappush(self._decoding, _Decoding(last_step, job.number, job, self._step))
        self._kv_base += job.request.input_length - self._step

    def _end_decoding(self, decoding: _Decoding) -> None:
        job = decoding.job
        self._kv_base -= job.request.input_length - decoding.first_step
        if not self._decoding:
            self._kv_base = 0.0  # sums of floats drift
        self._end(job)

    def _end(self, job: Job) -> None:
        if job.left_names:
            self._use(job.left_names)
        job.ended_at = self._sim.now
        self._listener.ended(job)

    # Time and steps.

    def _steps_now(self) -> float:
        if not self._step_ms:
            return self._step
        return self._step + _MS_PER_S * (self._sim.now - self._since) / self._step_ms

    def _pass_time(self) -> None:
        self._step, self._since = self._steps_now(), self._sim.now

    def _next_step(self) -> float:
        ends = [self._decoding[0].last_step] if self._decoding else []
        if self._prefill is not None:
            ends.append(self._prefill.last_step)
        return min(ends, default=math.inf)

    def _set_timer(self) -> None:
        """Steps are of another length from now on: call when the next is over at whose end something ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends_at = self._next_step()
        if ends_at == math.inf:
            self._step_ms = 0.0
            return
        prefill = self._prefill
        self._step_ms = 0.0  # time has passed already
        step_ms = self.step_ms + (0.0 if prefill is None else prefill.ms_a_step)
        self._step_ms = step_ms
        self._since = self._sim.now
        delay_s = max(0.0, ends_at - self._step) * step_ms / _MS_PER_S
        self._timer = self._sim.call_later(delay_s, self._on_step)

    def _left_tokens(self) -> float:
        prefill = self._prefill
        if prefill is None:
            return 0.0
        left = max(0.0, prefill.last_step - self._steps_now()) / prefill.steps
        return prefill.job.uncached_tokens * left

    def _tokens(self, blocks: int, request: WorkloadRequest) -> int:
        """Of so many leading blocks; but for the last token, which is always computed so that there is something to sample from."""
        return min(blocks * self._block_size, request.input_length - (not self._at_once))


def _squares(end: int, tokens: float) -> float:
    """``end**2 - begin**2`` of the last ``tokens`` before ``end``. Whole numbers give a whole one: sums of those do not drift."""
    return tokens * (2 * end - tokens)
