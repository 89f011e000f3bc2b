"""A worker in a replay: prompts are computed in turn, several to a step where they are short, and answers decode beside them.

    (its adapter) -> queue -> prefill, by chunks -> first token -> decoding, a token a step -> end
                                                        |                                         |
                      cache <-- the prompt's blocks ----+ <-- the answer's blocks ----------------+

Who waits, who begins when, and what that does to the cache; who is in a step and how long steps are is told by ``replay_batch``. A request
begins when those before it have and its KV has room, that of its whole answer too: how long answers will be is known here, so nothing is
ever preempted. One whose LoRA adapter is not in memory waits beside the queue until it is (``replay_adapters``).

This is not the engine that serves (``worker.scheduler``): prompts are never computed out of turn, and answers are never guessed too short.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from prefixmesh.ids import Fingerprint
from prefixmesh.sim.kernel import Simulation, Timer
from prefixmesh.sim.replay_adapters import ReplayAdapters
from prefixmesh.sim.replay_batch import ReplayBatch, squares
from prefixmesh.sim.replay_cache import BlockCache, Change, Held
from prefixmesh.sim.replay_cascade import SharedReads
from prefixmesh.sim.replay_job import Job, Listener
from prefixmesh.sim.timing import TimingModel
from prefixmesh.sim.workload import WorkloadRequest

_MS_PER_S: Final = 1e3


class ReplayWorker:
    """See the module. ``at_once``: see ``ReplaySpec.at_once``; requests that run take no room then. ``max_running``: 0 is any number.
    ``shared``: see ``ReplayBatch``. ``max_adapters``: so many in memory; 0: all that are asked for, from the beginning."""

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
        shared: SharedReads | None = None,
        max_adapters: int = 0,
    ) -> None:
        self.place = place
        self.cache = cache
        self.timing = timing
        self._sim = sim
        self._listener = listener
        self._block_size = block_size
        self._max_running = max_running or math.inf
        self._at_once = at_once
        self._queue: deque[Job] = deque()
        self._coming: Counter[Fingerprint] = Counter()
        self._batch = ReplayBatch(timing, chunk_tokens, shared)
        self.adapters = (
            ReplayAdapters(sim, max_adapters, timing.adapter_load_ms, self._join_queue)
            if max_adapters
            else None
        )
        # When the steps that are being made began, and what comes when they are over.
        self._since = sim.now
        self._timer: Timer | None = None
        self._is_between_steps = False
        # Of all who wait.
        self._queued_tokens = self._queued_prompt_tokens = 0
        self._queued_squares: float = 0
        self.work_ms = 0.0
        """Prefill, load-back and the decoding's own arithmetic, of all that was sent here."""

        self.prompt_tokens = 0
        """Of all that was sent here."""

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self.queued + len(self._batch)

    @property
    def queued(self) -> int:
        """Those whose prefill has not begun."""
        return len(self._queue) + (0 if self.adapters is None else len(self.adapters))

    @property
    def running_tokens(self) -> float:
        """Tokens of KV of those who decode or prefill, now."""
        return self._batch.running_tokens(self._part_made())

    @property
    def active_tokens(self) -> float:
        """The same of all who have not ended: whoever waits will have a whole prompt of it."""
        return self._queued_prompt_tokens + self.running_tokens

    @property
    def kv_use(self) -> float:
        """Share of the device that is in use, as its pool has it: what several share is there once. Where nothing takes room, as it would be."""
        cache = self.cache
        if self._at_once:
            return min(1.0, self.running_tokens / (cache.total_blocks * self._block_size))
        return cache.used_blocks / cache.total_blocks

    @property
    def waiting_tokens(self) -> float:
        """Of prompts that are still to be computed: as expected, and what is left of those that are."""
        return self._queued_tokens + self._batch.waiting_tokens(self._part_made())

    @property
    def waiting_squares(self) -> float:
        """The sum of ``b**2 - a**2`` over them, ``a`` to ``b`` being what is to be computed of each."""
        return self._queued_squares + self._batch.waiting_squares(self._part_made())

    @property
    def step_ms(self) -> float:
        """How long a step without prefill is now."""
        return self._batch.decode_step_ms(self._part_made())

    def held(self, names: Sequence[Fingerprint]) -> Held:
        """What will be cached of a prompt when its turn comes, as far as can be told: what is, and what those before it will leave."""
        return self.cache.held(names, self._coming)

    def pin(self, names: Sequence[Fingerprint]) -> None:
        """Blocks are there from now on and never go."""
        self._tell(self.cache.pin(names))

    def take(self, job: Job) -> None:
        """A request is sent here, now. It begins with the next step that has room for it."""
        request = job.request
        self.prompt_tokens += request.input_length
        if self._at_once:
            self._count(job, self.cache.held(job.names))
            self._tell(self.cache.use(job.names))
            job.locked = self.cache.whole(job.names)
        else:
            held = self.held(job.names)
            job.uncached_tokens = request.input_length - self._tokens(held.total, request)
            self._coming.update(job.names)
        self._queued_prompt_tokens += request.input_length
        self._queued_tokens += job.uncached_tokens
        self._queued_squares += squares(request.input_length, job.uncached_tokens)
        if self.adapters is not None and request.adapter:
            self.adapters.take(job)
        else:
            self._join_queue(job)

    def _join_queue(self, job: Job) -> None:
        self._queue.append(job)
        if self._is_between_steps:
            return
        if not self._batch.steps:
            self._make_steps()
        elif not self._batch.prefills and len(self._queue) == 1:
            self._stop_soon()

    # Steps.

    def _make_steps(self) -> None:
        """The next step's chunk goes to the prompts that are under way, then to those whose turn it is, as far as they have room."""
        batch, queue = self._batch, self._queue
        self._since = self._sim.now
        room = batch.share_out()
        while room and queue and self._begins(queue[0]):
            room = self._begin(queue.popleft(), room)
        batch.plan()
        if batch.steps:
            self._call_after(batch.steps)

    def _on_steps(self) -> None:
        """The steps are over, and what ended with them is told in the order of its beginning."""
        self._timer = None
        self._is_between_steps = True
        over = self._batch.made()
        self._since = self._sim.now
        for job in over:
            self._end_prefill(job)
        while (job_ended := self._batch.take_ended()) is not None:
            self._end(job_ended)
        self._is_between_steps = False
        self._make_steps()

    def _stop_soon(self) -> None:
        """Somebody has come who can begin with the next step: the one that is being made is the last of these."""
        made = math.floor(self._part_made() * self._batch.steps) + 1
        if made < self._batch.steps:
            self._batch.steps = made
            self._call_after(made)

    def _call_after(self, steps: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._sim.call_at(self._since + steps * self._batch.step_ms / _MS_PER_S, self._on_steps)

    def _part_made(self) -> float:
        """Of the steps that are being made, the share that is over."""
        batch = self._batch
        if not batch.steps or not batch.step_ms:
            return 0.0
        return min(1.0, _MS_PER_S * (self._sim.now - self._since) / (batch.step_ms * batch.steps))

    # Requests.

    def _begins(self, job: Job) -> bool:
        """Whether the first who waits has room, for its KV and beside those who run; its KV has it then."""
        if len(self._batch) >= self._max_running:
            return False
        expected = job.uncached_tokens
        if not self._at_once and not self._take_room(job):
            return False
        self._queued_prompt_tokens -= job.request.input_length
        self._queued_tokens -= expected
        self._queued_squares -= squares(job.request.input_length, expected)
        return True

    def _begin(self, job: Job, room: int) -> int:
        """It is computed from the next step on; what it leaves of the step's chunk."""
        load_ms = job.host_tokens * self.timing.load_back_ms_per_token
        left = self._batch.begin(job, load_ms, room)
        self.work_ms += load_ms + self.timing.prefill_ms(job.uncached_tokens, job.cached_tokens)
        # The first token of an answer comes with its prompt's last.
        self.work_ms += max(0, job.request.output_length - 1) * self.timing.decode_ms_per_sequence
        self._listener.begun(job)
        return left

    def _take_room(self, job: Job) -> bool:
        held = self.cache.held(job.names)
        locked, request = job.names[: held.device], job.request
        # The last token of an answer is sampled, and nobody computes its KV.
        blocks = -(-(request.input_length + max(0, request.output_length - 1)) // self._block_size)
        # A rest of the prompt that has a name stays beside the block that the answer fills up from it.
        blocks += len(job.left_names) > request.input_length // self._block_size < len(job.names)
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
        if not self._at_once:
            self._has_come(job.names)
            self._leave(job, job.names, len(job.locked))
        job.first_token_at = self._sim.now
        self._listener.first_token(job)
        if not self._batch.decode(job):
            self._end(job)

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
        if self.adapters is not None:
            self.adapters.release(job)
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
