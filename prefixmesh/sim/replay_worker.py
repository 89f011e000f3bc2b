"""A worker in a replay: prompts are computed in turn, several to a step where they are short, and answers decode beside them.

    queue -> prefill, by chunks -> first token -> decoding, a token a step -> end
                                      |                                         |
    cache <-- the prompt's blocks ----+ <-- the answer's blocks ----------------+

A step takes what ``TimingModel`` says for the prompts' tokens in it, at most a chunk of them, and for all who decode. Steps in which nothing
begins or ends are passed over at once: between two such moments they are equally long but for the KV that grows, which is counted anew at
each. A request begins when those before it have and its KV has room, that of its whole answer too: how long answers will be is known
here, so nothing is ever preempted.

This is not the engine that serves (``worker.scheduler``): prompts are never computed out of turn, and answers are never guessed too short.
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
        "locked",
        "names",
        "number",
        "private_blocks",
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

        self.locked: Sequence[Fingerprint] = ()
        """Blocks that it uses and shares, and the number of those that only it has, while it runs."""

        self.private_blocks = 0

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


class _Prefill:
    """One prompt that is being computed."""

    __slots__ = ("a_step", "job", "left", "load_ms")

    def __init__(self, job: Job, load_ms: float) -> None:
        self.job = job
        self.left = job.uncached_tokens
        """Tokens still to be computed after the steps that were made."""

        self.a_step = 0
        """Tokens in each step that is being made."""

        self.load_ms = load_ms
        """Of what comes from the host: in the first step."""


class _Decoding(NamedTuple):
    last_step: int
    number: int
    job: Job
    first_step: int


class ReplayWorker:
    """See the module. ``at_once``: see ``ReplaySpec.at_once``; requests that run take no room then. ``max_running``: 0 is any number."""

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
        max_running: int = 0,
        at_once: bool = False,
    ) -> None:
        self.place = place
        self.cache = cache
        self.timing = timing
        self._sim = sim
        self._listener = listener
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running or math.inf
        self._at_once = at_once
        self._queue: deque[Job] = deque()
        self._coming: Counter[Fingerprint] = Counter()
        self._prefills: list[_Prefill] = []
        self._decoding: list[_Decoding] = []
        # Steps that have been made until ``_since``; then so many more begin, each so long.
        self._step = 0
        self._since = sim.now
        self._steps = 0
        self._step_ms = 0.0
        self._timer: Timer | None = None
        # Of all who wait, and of all who prefill.
        self._queued_tokens = 0
        self._queued_squares: float = 0
        self._prompt_tokens_in_prefill = 0
        # Of all who decode, prompt tokens less the step at which each began: with the steps made, the tokens of their KV.
        self._kv_base = 0
        self.work_ms = 0.0
        """Prefill, load-back and the decoding's own arithmetic, of all that was sent here."""

        self.prompt_tokens = 0
        """Of all that was sent here."""

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._queue) + len(self._prefills) + len(self._decoding)

    @property
    def queued(self) -> int:
        """Those whose prefill has not begun."""
        return len(self._queue)

    @property
    def decode_tokens(self) -> float:
        """Tokens of KV of those who decode, now."""
        return self._kv_base + len(self._decoding) * (self._step + self._part_made() * self._steps)

    @property
    def running_tokens(self) -> float:
        """Tokens of KV of those who decode or prefill, now."""
        return self.decode_tokens + self._prompt_tokens_in_prefill

    @property
    def waiting_tokens(self) -> float:
        """Of prompts that are still to be computed: as expected, and what is left of those that are."""
        made = self._part_made()
        return self._queued_tokens + sum(self._left(one, made) for one in self._prefills)

    @property
    def waiting_squares(self) -> float:
        """The sum of ``b**2 - a**2`` over them, ``a`` to ``b`` being what is to be computed of each."""
        made = self._part_made()
        return self._queued_squares + sum(
            _squares(one.job.request.input_length, self._left(one, made)) for one in self._prefills
        )

    @property
    def step_ms(self) -> float:
        """How long a step without prefill is now."""
        return self.timing.decode_step_ms(len(self._decoding), int(self.decode_tokens))

    def held(self, names: Sequence[Fingerprint]) -> Held:
        """What will be cached of a prompt when its turn comes, as far as can be told: what is, and what those before it will leave."""
        return self.cache.held(names, self._coming)

    def take(self, job: Job) -> None:
        """A request is sent here, now. It begins with the next step that has room for it."""
        request = job.request
        self.prompt_tokens += request.input_length
        if self._at_once:
            self._count(job, self.cache.held(job.names))
            self._tell(self.cache.use(job.names))
        else:
            held = self.held(job.names)
            job.uncached_tokens = request.input_length - self._tokens(held.total, request)
            self._coming.update(job.names)
        self._queue.append(job)
        self._queued_tokens += job.uncached_tokens
        self._queued_squares += _squares(request.input_length, job.uncached_tokens)
        if not self._steps:
            self._make_steps()
        elif not self._prefills and len(self._queue) == 1:
            self._stop_soon()

    # Steps.

    def _make_steps(self) -> None:
        """What comes next: as many equal steps as there are until something begins or ends; none where there is nothing to do."""
        self._since = self._sim.now
        self._plan_prefill()
        prefills, decoding = self._prefills, self._decoding
        steps = decoding[0].last_step - self._step if decoding else math.inf
        prefill_ms = 0.0
        if prefills:
            steps = min(steps, self._equal_chunks())
            prefill_ms = sum(self._prefill_ms(one, int(steps)) for one in prefills) / steps
        elif not decoding:
            self._steps, self._kv_base = 0, 0
            return
        self._steps = int(steps)
        # Steps are as long as the one in the middle: KV grows by a token each.
        tokens = self._kv_base + len(decoding) * self._step
        tokens += (len(decoding) * (self._steps - 1)) // 2
        self._step_ms = self.timing.decode_step_ms(len(decoding), tokens) + prefill_ms
        self._call_after(self._steps)

    def _plan_prefill(self) -> None:
        """Share the next step's chunk out: to the prompt that is under way, then to those whose turn it is, as far as they have room."""
        room = self._chunk_tokens
        for one in self._prefills:
            one.a_step = min(room, one.left)
            room -= one.a_step
        while room and self._queue:
            begun = self._begin_next()
            if begun is None:
                return
            begun.a_step = min(room, begun.left)
            room -= begun.a_step

    def _equal_chunks(self) -> int:
        """Steps that are a chunk of one prompt each and not its last; otherwise one."""
        if len(self._prefills) > 1:
            return 1
        (one,) = self._prefills
        return max(1, -(-one.left // self._chunk_tokens) - 1)

    def _prefill_ms(self, one: _Prefill, steps: int) -> float:
        tokens = one.a_step * steps
        before = one.job.request.input_length - one.left
        load_ms, one.load_ms = one.load_ms, 0.0
        return load_ms + self.timing.prefill_ms(tokens, before)

    def _on_steps(self) -> None:
        """The steps are over, and what ended with them is told in the order of its beginning."""
        self._timer = None
        made, self._steps = self._steps, 0
        self._step += made
        self._since = self._sim.now
        over = []
        for one in self._prefills:
            one.left -= one.a_step * made
            one.a_step = 0
            if not one.left:
                over.append(one)
        if over:
            self._prefills = [one for one in self._prefills if one.left]
        for one in over:
            self._end_prefill(one.job)
        while self._decoding and self._decoding[0].last_step <= self._step:
            decoding = heapq.heappop(self._decoding)
            self._kv_base -= decoding.job.request.input_length - decoding.first_step
            self._end(decoding.job)
        self._make_steps()

    def _stop_soon(self) -> None:
        """Somebody has come who can begin with the next step: the one that is being made is the last of these."""
        made = math.floor(self._part_made() * self._steps) + 1
        if made < self._steps:
            self._steps = made
            self._call_after(made)

    def _call_after(self, steps: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._sim.call_at(self._since + steps * self._step_ms / _MS_PER_S, self._on_steps)

    def _part_made(self) -> float:
        """Of the steps that are being made, the share that is over."""
        if not self._steps or not self._step_ms:
            return 0.0
        return min(1.0, _MS_PER_S * (self._sim.now - self._since) / (self._step_ms * self._steps))

    def _left(self, one: _Prefill, made: float) -> float:
        # Who is done at this very moment has nothing left, and not the billionth of a token that sums of floats leave.
        return round(one.left - one.a_step * self._steps * made, 6)

    # Requests.

    def _begin_next(self) -> _Prefill | None:
        """The first who waits begins; None where its KV, or one more beside those who run, has no room."""
        job = self._queue[0]
        if len(self._prefills) + len(self._decoding) >= self._max_running:
            return None
        expected = job.uncached_tokens
        if not self._at_once and not self._take_room(job):
            return None
        self._queue.popleft()
        self._queued_tokens -= expected
        self._queued_squares -= _squares(job.request.input_length, expected)
        self._prompt_tokens_in_prefill += job.request.input_length
        load_ms = job.host_tokens * self.timing.load_back_ms_per_token
        begun = _Prefill(job, load_ms)
        self._prefills.append(begun)
        self.work_ms += load_ms + self.timing.prefill_ms(job.uncached_tokens, job.cached_tokens)
        self.work_ms += job.request.output_length * self.timing.decode_ms_per_sequence
        self._listener.begun(job)
        return begun

    def _take_room(self, job: Job) -> bool:
        held = self.cache.held(job.names)
        locked, request = job.names[: held.device], job.request
        # The last token of an answer is sampled, and nobody computes its KV.
        blocks = -(-(request.input_length + max(0, request.output_length - 1)) // self._block_size)
        changes = self.cache.begin(locked, blocks - len(locked))
        if changes is None:
            return False
        job.locked, job.private_blocks = locked, blocks - len(locked)
        self._count(job, held)
        self._tell(changes)
        return True

    def _count(self, job: Job, held: Held) -> None:
        """What is cached counts; what is on the host only where bringing it back is quicker than computing it."""
        request, timing = job.request, self.timing
        device, total = (self._tokens(blocks, request) for blocks in held)
        computing_ms = timing.prefill_ms(total - device, device)
        if timing.load_back_ms_per_token * (total - device) >= computing_ms:
            total = device
        job.device_tokens, job.host_tokens = device, total - device
        job.uncached_tokens = request.input_length - total

    def _end_prefill(self, job: Job) -> None:
        self._prompt_tokens_in_prefill -= job.request.input_length
        if not self._at_once:
            self._has_come(job.names)
            self._leave(job, job.names, len(job.locked))
        job.first_token_at = self._sim.now
        self._listener.first_token(job)
        # The first token came with the last of the prompt.
        last_step = self._step + job.request.output_length - 1
        if last_step <= self._step:
            self._end(job)
            return
        heapq.heappush(self._decoding, _Decoding(last_step, job.number, job, self._step))
        self._kv_base += job.request.input_length - self._step

    def _has_come(self, names: Sequence[Fingerprint]) -> None:
        coming = self._coming
        for name in names:
            count = coming[name] - 1
            if count:
                coming[name] = count
            else:
                del coming[name]

    def _end(self, job: Job) -> None:
        if self._at_once:
            self._tell(self.cache.use(job.left_names))
        else:
            # A rest of the prompt that has a name of its own is not where the answer goes on.
            whole = job.request.input_length // self._block_size
            self._leave(job, job.left_names, min(whole, len(job.locked)))
            self.cache.end(job.locked, job.private_blocks)
            job.locked = ()
        job.ended_at = self._sim.now
        self._listener.ended(job)

    def _leave(self, job: Job, names: Sequence[Fingerprint], locked: int) -> None:
        """A chain of which it has locked so many already is there for all."""
        if len(names) <= locked:
            return
        now, changes = self.cache.leave(names, locked)
        job.locked = [*job.locked, *names[locked:now]]
        job.private_blocks -= now - locked
        self._tell(changes)

    def _tell(self, changes: Sequence[Change]) -> None:
        if changes:
            self._listener.changed(self.place, changes)

    def _tokens(self, blocks: int, request: WorkloadRequest) -> int:
        """Of so many leading blocks; but for the last token, which is always computed so that there is something to sample from."""
        return min(blocks * self._block_size, request.input_length - (not self._at_once))


def _squares(end: int, tokens: float) -> float:
    """``end**2 - begin**2`` of the last ``tokens`` before ``end``. Whole numbers give a whole one: sums of those do not drift."""
    return tokens * (2 * end - tokens)
