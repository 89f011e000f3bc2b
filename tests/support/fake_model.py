"""A model runner that computes nothing and believes nothing: it remembers what was written in every slot of its "KV pool", and
asserts at every read that the slot holds what the reading sequence wrote there, or may share.

Its next token is a pure function of the tokens before it, so the output of any request is known beforehand, however it was
batched, chunked, shared or preempted.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.request import Request
from prefixmesh.worker.scheduler import Step

if TYPE_CHECKING:
    import torch

FAKE_VOCAB = 50


class Slot(NamedTuple):
    """What one slot of the pool holds; ``chain`` is a digest of all tokens up to this one."""

    position: int
    token: int
    chain: int


def next_token(chain: int, vocab_size: int = FAKE_VOCAB) -> int:
    """The token that follows the tokens with this chain."""
    return (chain >> 7) % vocab_size


def chain_of(tokens: Iterable[int]) -> int:
    """Digest of a token sequence; a wrong token, order or length gives another."""
    chain = 0
    for token in tokens:
        chain = _extend(chain, int(token))
    return chain


def expected_output(prompt: Sequence[int], count: int, vocab_size: int = FAKE_VOCAB) -> list[int]:
    """The first ``count`` tokens that the fake model answers to ``prompt``."""
    chain = chain_of(prompt)
    output = []
    for _ in range(count):
        output.append(next_token(chain, vocab_size))
        chain = _extend(chain, output[-1])
    return output


class FakeModel:
    """``ModelRunner.forward`` over slots that remember. Every read of a slot is checked."""

    def __init__(self, total_pages: int, page_size: int, vocab_size: int = FAKE_VOCAB) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._slots: list[Slot | None] = [None] * (total_pages * page_size)
        self._namespaces: list[bytes | None] = [None] * (total_pages * page_size)
        self.plans: list[BatchPlan] = []
        self.fail_next: Exception | None = None

    def run(self, step: Step) -> list[int]:
        """Compute a scheduler's step: next tokens of ``step.sampled``. Knows whose step it is, so that every slot is checked
        against the very tokens and the namespace of the request that reads it."""
        self._check_against_requests(step)
        return self.next_tokens(step.plan)

    def forward(self, plan: BatchPlan) -> "torch.Tensor":
        """Logits [R, vocab] whose largest is the next token."""
        import torch

        chosen = self.next_tokens(plan)
        logits = torch.zeros((len(chosen), self._vocab_size), dtype=torch.float32)
        for row, token in enumerate(chosen):
            logits[row, token] = 10.0
        return logits

    def next_tokens(self, plan: BatchPlan) -> list[int]:
        """Write the step's tokens, read every slot that attention would read, and give the next token of each logit row."""
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.plans.append(plan)
        chain_of_row: dict[int, int] = {}
        for b in range(len(plan.last_page_len)):
            begin, end = int(plan.qo_indptr[b]), int(plan.qo_indptr[b + 1])
            slots = self._slots_of(plan, b)
            computed = len(slots) - (end - begin)
            chain = 0
            for position, slot in enumerate(slots[:computed]):
                held = self._slots[slot]
                assert held is not None, f"slot {slot} is read before it was written"
                chain = _extend(chain, held.token)
                assert held == Slot(position, held.token, chain), (
                    f"slot {slot} holds another sequence: {held}"
                )
            for row in range(begin, end):
                token, position = int(plan.token_ids[row]), int(plan.positions[row])
                slot = int(plan.out_slots[row])
                assert position == computed + row - begin
                assert slot == slots[position], (
                    "a token is written outside the pages that it will be read from"
                )
                chain = _extend(chain, token)
                self._slots[slot] = Slot(position, token, chain)
                chain_of_row[row] = chain
        return [next_token(chain_of_row[row], self._vocab_size) for row in plan.logit_rows.tolist()]

    def _slots_of(self, plan: BatchPlan, b: int) -> list[int]:
        pages: IntArray = plan.kv_indices[plan.kv_indptr[b] : plan.kv_indptr[b + 1]]
        kv_len = (len(pages) - 1) * self._page_size + int(plan.last_page_len[b])
        offsets = np.arange(kv_len)
        slots: list[int] = (
            pages[offsets // self._page_size] * self._page_size + offsets % self._page_size
        ).tolist()
        return slots

    def _check_against_requests(self, step: Step) -> None:
        for b, part in enumerate(step.parts):
            request = part.request
            slots = self._slots_of(step.plan, b)
            for position, slot in enumerate(slots[: request.computed]):
                held = self._slots[slot]
                assert held is not None
                assert held.token == int(request.ids[position]), f"{request} reads another request's token"
                assert self._namespaces[slot] == _namespace_at(request, position), (
                    f"{request} reads another namespace's KV"
                )
            for position, slot in enumerate(slots[request.computed :], request.computed):
                self._namespaces[slot] = _namespace_at(request, position)


def _namespace_at(request: Request, position: int) -> bytes:
    is_root = not request.boundary_tokens or position < request.boundary_tokens
    return request.root if is_root else request.tail


def _extend(chain: int, token: int) -> int:
    return (chain * 1_000_003 + token + 1) % (2**61 - 1)
