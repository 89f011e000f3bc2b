"""Who is computed on a worker of a replay, and how long its steps are: prompts by chunks, and beside them all who decode. Pure.

A step takes what ``TimingModel`` says for the prompts' tokens in it, at most a chunk of them, and for all who decode: for all of their KV, or
what several share of it once, where the worker has a cascade (``replay_cascade``). Steps in which nothing
begins or ends are passed over at once: between two such moments they are equally long but for the KV that grows, which is counted anew at
each::

    share_out, begin ...  ->  plan: so many equal steps, each so long  ->  made: whose prompt is over, take_ended: who has an answer

When that is, and what it changes in the cache, is the worker's business (``replay_worker``).
"""

import heapq
import math
from typing import NamedTuple

from prefixmesh.sim.replay_cascade import SharedReads
from prefixmesh.sim.replay_job import Job
from prefixmesh.sim.timing import TimingModel


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


class ReplayBatch:
    """See the module. ``part`` is always the share that is over of the steps that are being made."""

    def __init__(self, timing: TimingModel, chunk_tokens: int, shared: SharedReads | None = None) -> None:
        """``shared``: None reads everybody's KV for itself."""
        self._timing = timing
        self._shared = shared
        self._chunk_tokens = chunk_tokens
        self._prefills: list[_Prefill] = []
        self._decoding: list[_Decoding] = []
        self._prompt_tokens_in_prefill = 0
        # Steps that have been made, in all.
        self._step = 0
        # Of all who decode, prompt tokens less the step at which each began: with the steps made, the tokens of their KV.
        self._kv_base = 0
        self.steps = 0
        """So many are being made; 0: there is nothing to do."""

        self.step_ms = 0.0
        """How long each of them is."""

    def __len__(self) -> int:
        """Requests in it."""
        return len(self._prefills) + len(self._decoding)

    @property
    def prefills(self) -> int:
        """Prompts that are being computed."""
        return len(self._prefills)

    def decode_tokens(self, part: float) -> float:
        """Tokens of KV of those who decode."""
        return self._kv_base + len(self._decoding) * (self._step + part * self.steps)

    def running_tokens(self, part: float) -> float:
        """Tokens of KV of those who decode or prefill."""
        return self.decode_tokens(part) + self._prompt_tokens_in_prefill

    def waiting_tokens(self, part: float) -> float:
        """Of prompts in it that are still to be computed."""
        return sum(self._left(one, part) for one in self._prefills)

    def waiting_squares(self, part: float) -> float:
        """The sum of ``b**2 - a**2`` over them, ``a`` to ``b`` being what is to be computed of each."""
        return sum(squares(one.job.request.input_length, self._left(one, part)) for one in self._prefills)

    def decode_step_ms(self, part: float) -> float:
        """How long a step without prefill is now."""
        read = int(self.decode_tokens(part)) - self._read_once
        return self._timing.decode_step_ms(len(self._decoding), read)

    # What the next steps are.

    def share_out(self) -> int:
        """Share the next step's chunk out to the prompts that are under way; what is left of it is for those that ``begin``."""
        room = self._chunk_tokens
        for one in self._prefills:
            one.a_step = min(room, one.left)
            room -= one.a_step
        return room

    def begin(self, job: Job, load_ms: float, room: int) -> int:
        """A prompt begins in what is left of a chunk. What is left then."""
        self._prompt_tokens_in_prefill += job.request.input_length
        begun = _Prefill(job, load_ms)
        begun.a_step = min(room, begun.left)
        self._prefills.append(begun)
        return room - begun.a_step

    def plan(self) -> None:
        """What comes next: as many equal steps as there are until something begins or ends; none where there is nothing to do."""
        prefills, decoding = self._prefills, self._decoding
        steps = decoding[0].last_step - self._step if decoding else math.inf
        prefill_ms = 0.0
        if prefills:
            steps = min(steps, self._equal_chunks())
            prefill_ms = sum(self._prefill_ms(one, int(steps)) for one in prefills) / steps
        elif not decoding:
            self.steps, self._kv_base = 0, 0
            return
        self.steps = int(steps)
        # Steps are as long as the one in the middle: KV grows by a token each.
        tokens = self._kv_base + len(decoding) * self._step
        tokens += (len(decoding) * (self.steps - 1)) // 2 - self._read_once
        self.step_ms = self._timing.decode_step_ms(len(decoding), tokens) + prefill_ms

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
        return load_ms + self._timing.prefill_ms(tokens, before)

    # What they have brought.

    def made(self) -> list[Job]:
        """The steps are over: whose prompts are, in the order in which they began."""
        made, self.steps = self.steps, 0
        self._step += made
        over: list[_Prefill] = []
        under_way: list[_Prefill] = []
        for one in self._prefills:
            one.left -= one.a_step * made
            one.a_step = 0
            (under_way if one.left else over).append(one)
        self._prefills = under_way
        return [one.job for one in over]

    def decode(self, job: Job) -> bool:
        """A prompt is over, and its first token came with its last. False where that is all that was asked for: it does not decode."""
        request = job.request
        self._prompt_tokens_in_prefill -= request.input_length
        last_step = self._step + request.output_length - 1
        if last_step <= self._step:
            return False
        heapq.heappush(self._decoding, _Decoding(last_step, job.number, job, self._step))
        self._kv_base += request.input_length - self._step
        if self._shared is not None:
            self._shared.add(job)
        return True

    def take_ended(self) -> Job | None:
        """The next who has its answer by now; None when there is nobody."""
        if not self._decoding or self._decoding[0].last_step > self._step:
            return None
        decoding = heapq.heappop(self._decoding)
        self._kv_base -= decoding.job.request.input_length - decoding.first_step
        if self._shared is not None:
            self._shared.remove(decoding.job)
        return decoding.job

    @property
    def _read_once(self) -> int:
        """Tokens of KV of those who decode that are read with another's."""
        return 0 if self._shared is None else self._shared.saved_tokens

    def _left(self, one: _Prefill, part: float) -> float:
        # Who is done at this very moment has nothing left, and not the billionth of a token that sums of floats leave.
        return round(one.left - one.a_step * self.steps * part, 6)


def squares(end: int, tokens: float) -> float:
    """``end**2 - begin**2`` of the last ``tokens`` before ``end``. Whole numbers give a whole one: sums of those do not drift."""
    return tokens * (2 * end - tokens)
