"""A model runner that computes no model: the next token is a function of the namespace and of all tokens before it, and a step takes
the time that a ``TimingModel`` says.

Its KV is one number a token, which stands for the whole prefix up to it. A step begins from the number in the slot before its first
token, as a real model attends to what lies there; so a wrong page, a page written over too soon, or KV of another namespace gives another
answer, and any two workers answer alike however they batch, chunk, share, preempt or resume. ``expected_answer`` says beforehand what.

Behind a public prefix the number goes on as if all had been in the request's own namespace: where KV lives changes no answer.

What the engine's core asks of a runner is ``forward``; whose tokens a plan has it does not tell, so ``NotedScheduler`` does.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from prefixmesh.sim.timing import TimingModel
from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.request import Request
from prefixmesh.worker.scheduler import Scheduler, Step

Chains = npt.NDArray[np.uint64]

CHOSEN_LOGIT: Final = 1e4
"""Of the one token that is the answer, where all others have 0: no temperature, penalty or bias within their limits makes up for it."""

LAYERS: Final = 4
"""Of the fake model, where it is told which layer's KV has come: a token's number is so many pieces of 16 bits."""

_BASE: Final = 0x9E3779B97F4A7C15
"""Of the polynomial that a prefix's number is. Odd, so that it can be divided by, modulo 2**64, and order counts."""

_INVERSE: Final = pow(_BASE, -1, 1 << 64)
_MASK: Final = (1 << 64) - 1


class EngineTime(Protocol):
    """The clock that a fake engine's steps take their time from."""

    def now(self) -> float:
        """Seconds."""
        ...

    def pass_until(self, when: float) -> None:
        """Return when it is ``when``, at once if that is past."""
        ...


class Arrivals(Protocol):
    """What brings KV while a step computes: ``FakeMover``."""

    @property
    def expects(self) -> bool:
        """Whether this step reads what is being brought."""
        ...

    def catch_up(self) -> None:
        """Copy what was due by now."""
        ...

    def await_layer(self, layer: int) -> None:
        """See ``Mover.await_layer``."""
        ...


class NotedScheduler(Scheduler):
    """The real scheduler, which notes the step that it gave out last."""

    step: Step | None = None

    def next_step(self, now: float) -> Step | None:
        """See ``Scheduler.next_step``."""
        self.step = super().next_step(now)
        return self.step


class FakeRunner:
    """``Runner`` over numbers in slots, one KV pool's worth of them."""

    def __init__(
        self,
        scheduler: NotedScheduler,
        timing: TimingModel,
        time: EngineTime,
        kv: Chains,
        *,
        vocab_size: int,
        never: Sequence[int] = (),
    ) -> None:
        """``kv`` is the pool's memory (``kv_slots``). ``never`` are ids that are not answered: those that would end an answer before its length."""
        self._scheduler = scheduler
        self._timing = timing
        self._time = time
        self._vocab_size = vocab_size
        self._never = frozenset(never)
        self._page_size = scheduler.kv.page_size
        self._kv = kv
        self._powers, self._inverses = _powers(_BASE, 1), _powers(_INVERSE, 1)
        self.delay_ms: Callable[[], float] = _no_delay
        """Asked before every step what to add to it: a fault."""

        self.arrivals: Arrivals | None = None
        """None where nothing brings KV."""

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """Write the new tokens' KV, let the step's time pass, and return logits [R, vocab] float32. Raises LoadBackError, with nothing
        written, when KV that it was to read did not come."""
        began, step_s = (
            self._time.now(),
            (self._timing.plan_ms(plan, self._page_size) + self.delay_ms()) / 1e3,
        )
        if self._is_to_wait():
            began, step_s = self._up_to_the_last_layer(step_s), step_s / LAYERS
        chosen = self._answers(plan)
        logits = np.zeros((len(chosen), self._vocab_size), dtype=np.float32)
        logits[np.arange(len(chosen)), chosen] = CHOSEN_LOGIT
        self._time.pass_until(began + step_s)
        return torch.from_numpy(logits)

    def _is_to_wait(self) -> bool:
        if self.arrivals is None:
            return False
        self.arrivals.catch_up()  # what was copied before this step lies there before it writes
        return self.arrivals.expects

    def _up_to_the_last_layer(self, step_s: float) -> float:
        """Compute all layers but the last, each once its KV has come; returns when the last layer's has come. A number is of all layers, so
        it can be read then, and not before."""
        assert self.arrivals is not None
        for layer in range(LAYERS):
            self.arrivals.await_layer(layer)
            if layer < LAYERS - 1:
                self._time.pass_until(self._time.now() + step_s / LAYERS)
        return self._time.now()

    def _answers(self, plan: BatchPlan) -> list[int]:
        step = self._scheduler.step
        assert step is not None
        assert step.plan is plan, "a plan that nobody has noted"
        starts = plan.positions[plan.qo_indptr[:-1]]
        before = self._before(plan, starts)
        for b in np.flatnonzero(starts == 0).tolist():
            before[b] = chain_start(step.parts[b].request.root)
        tokens = plan.token_ids.astype(np.uint64) + np.uint64(1)
        first = plan.qo_indptr[:-1]
        behind = {b: part.request for b, part in enumerate(step.parts) if part.request.boundary_tokens}
        for b, request in behind.items():
            if starts[b] == request.boundary_tokens:
                before[b] = _as_own(request, before[b], request.boundary_tokens)
        chains = np.empty(len(tokens), dtype=np.uint64)
        # Decoders all at once, prompts one by one.
        chains[first] = (before + tokens[first] * np.uint64(_INVERSE)) * np.uint64(_BASE)
        for b in np.flatnonzero(np.diff(plan.qo_indptr) > 1).tolist():
            begin, end = int(plan.qo_indptr[b]), int(plan.qo_indptr[b + 1])
            chains[begin:end] = self._extend(before[b], tokens[begin:end])
            if b in behind and 0 < (public := behind[b].boundary_tokens - int(starts[b])) < end - begin:
                tail = _as_own(behind[b], chains[begin + public - 1], behind[b].boundary_tokens)
                chains[begin + public : end] = self._extend(tail, tokens[begin + public : end])
        self._kv[plan.out_slots] = chains
        for (
            b,
            request,
        ) in behind.items():  # a prompt that ends at the boundary is answered by its own namespace, too
            end = int(plan.qo_indptr[b + 1])
            if (known := int(plan.positions[end - 1]) + 1) <= request.boundary_tokens:
                chains[end - 1] = _as_own(request, chains[end - 1], known)
        return [
            next_token(int(chain), self._vocab_size, self._never)
            for chain in chains[plan.logit_rows].tolist()
        ]

    def _before(self, plan: BatchPlan, starts: IntArray) -> Chains:
        """What the KV says of everything before each sequence's first new token; of no meaning where there is nothing."""
        last = np.maximum(starts - 1, 0)
        pages = plan.kv_indices[plan.kv_indptr[:-1] + last // self._page_size]
        held: Chains = self._kv[pages.astype(np.int64) * self._page_size + last % self._page_size]
        return held

    def _extend(self, chain: np.uint64, tokens: Chains) -> Chains:
        """The numbers of a prefix continued by each of ``tokens``, which are ids plus 1. O(tokens), at numpy's speed."""
        count = len(tokens)
        if count > len(self._powers):
            self._powers, self._inverses = _powers(_BASE, count), _powers(_INVERSE, count)
        # chain * B^n + t1 * B^(n-1) + ... + tn, for every n at once: what stands in brackets is a running sum.
        sums = chain + np.cumsum(tokens * self._inverses[:count], dtype=np.uint64)
        extended: Chains = sums * self._powers[:count]
        return extended


def _as_own(request: Request, chain: np.uint64, size_tokens: int) -> np.uint64:
    """What the number of so many tokens in a request's root is in its own namespace."""
    apart = chain_start(request.namespace) - chain_start(request.root)
    return np.uint64((int(chain) + apart * pow(_BASE, size_tokens, 1 << 64)) & _MASK)


def kv_slots(count: int) -> Chains:
    """Memory for the KV of so many tokens. Untouched memory costs nothing: a pool of millions of tokens is as large as what was ever used."""
    return np.zeros(count, dtype=np.uint64)


def chain_start(namespace: bytes) -> int:
    """The number of the empty prefix in a namespace."""
    return xxhash.xxh3_64_intdigest(namespace)


def next_token(chain: int, vocab_size: int, never: frozenset[int] = frozenset()) -> int:
    """The token that follows a prefix with this number."""
    mixed = ((chain ^ (chain >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    token = (mixed ^ (mixed >> 31)) % vocab_size
    while token in never:
        token = (token + 1) % vocab_size
    return token


def expected_answer(
    namespace: bytes, prompt: Sequence[int], count: int, vocab_size: int, never: Sequence[int] = ()
) -> list[int]:
    """The first ``count`` tokens that every fake worker answers to ``prompt``; written plainly, to be compared with. O(prompt + count)."""
    chain, excluded = chain_start(namespace), frozenset(never)
    for token in prompt:
        chain = (chain * _BASE + int(token) + 1) & _MASK
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token(chain, vocab_size, excluded))
        chain = (chain * _BASE + answer[-1] + 1) & _MASK
    return answer


def _powers(base: int, count: int) -> Chains:
    """``base ** 1`` to ``base ** count``, modulo 2**64."""
    return np.cumprod(np.full(count, base, dtype=np.uint64), dtype=np.uint64)


def _no_delay() -> float:
    return 0.0
