"""A scheduler's model over a canary pool: what attention reads and writes.

The model knows each request's tokens by itself (from the prompt that was submitted and from its own answers), so that a plan
that computes other tokens, at other positions, or into other pages than it reads back, is found as well as wrong KV.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from prefixmesh.worker.batch_plan import BatchPlan, IntArray
from prefixmesh.worker.messages import Submit
from prefixmesh.worker.request import Request
from prefixmesh.worker.scheduler import Step
from tests.support.canary_pool import CanaryError, CanaryPool, Chain, Rows, mix
from tests.support.fake_model import FAKE_VOCAB


class CanaryModel:
    """Runs plans against the pool: writes every new token's KV, then reads all of each sequence, as attention does."""

    def __init__(self, pool: CanaryPool, max_running: int, context_length: int) -> None:
        self._pool = pool
        self._chains: dict[str, Chain] = {}
        self._writers: dict[str, int] = {}
        self._places: dict[str, tuple[bytes, int, bytes]] = {}
        self.shared_places = 0
        """Requests that lived behind a public prefix."""

        self._submitted = 0
        # One row per running request: the pages it read last, and which generation they were.
        width = -(-context_length // pool.page_size)
        self._seen_pages = np.full((max_running, width), -1, dtype=np.int64)
        self._seen_generations = np.zeros((max_running, width), dtype=np.int64)
        self._rows: dict[str, int] = {}
        self._spare_rows = list(range(max_running))

    def submitted(self, command: Submit) -> None:
        """A request will come with these tokens."""
        prompt = np.frombuffer(command.tokens, dtype=np.uint32)
        capacity = len(prompt) + command.sampling.max_tokens + 1
        self._chains[command.request_id] = Chain(command.namespace, prompt, capacity=capacity)
        self._writers[command.request_id] = self._submitted
        self._submitted += 1

    def ended(self, request_id: str) -> Chain:
        """It will not come any more; all its tokens, as the model knows them."""
        del self._writers[request_id]
        self._places.pop(request_id, None)
        return self._chains.pop(request_id)

    def still_running(self, request_ids: Iterable[str]) -> None:
        """Requests that hold pages; whoever else did has given them back, and will read others if it resumes."""
        for request_id in self._rows.keys() - set(request_ids):
            row = self._rows.pop(request_id)
            self._seen_pages[row] = -1
            self._spare_rows.append(row)

    def run(self, step: Step) -> list[int]:
        """Compute a step: next tokens of ``step.sampled``. Raises CanaryError at the first slot that is not as it should be."""
        plan, pool = step.plan, self._pool
        ids = [part.request.request_id for part in step.parts]
        chains = [self._chain_of(part.request) for part in step.parts]
        writers = np.array([self._writers[request_id] for request_id in ids])
        new = np.diff(plan.qo_indptr)
        ends = (np.diff(plan.kv_indptr) - 1) * pool.page_size + plan.last_page_len
        self._check_generations(plan, ids)
        pool.write(plan.out_slots, self._computed(plan, chains, ends - new, ends), np.repeat(writers, new))
        slots, written = _slots_of(plan, ends, new, pool.page_size)
        if not np.array_equal(written, plan.out_slots):
            raise CanaryError("a step writes tokens to other slots than those it will read them from")
        pool.read(slots, _whole(chains, ends), np.repeat(writers, ends))
        return self._sample(step, ends)

    def _chain_of(self, request: Request) -> Chain:
        """A request's tokens where its KV lives, which its scheduler has chosen before its first step, and never changes."""
        chain = self._chains[request.request_id]
        place = request.root, request.boundary_tokens, request.tail
        if self._places.setdefault(request.request_id, place) != place:
            raise CanaryError(f"{request} lives elsewhere than it did")
        if request.boundary_tokens and not chain.boundary:
            prompt, capacity = chain.tokens[: chain.length], len(chain.tokens)
            chain = Chain(
                request.root, prompt, capacity=capacity, boundary=request.boundary_tokens, tail=request.tail
            )
            self._chains[request.request_id] = chain
            self.shared_places += 1
        return chain

    def _computed(self, plan: BatchPlan, chains: list[Chain], starts: IntArray, ends: IntArray) -> Rows:
        spans = list(zip(chains, starts.tolist(), ends.tolist(), strict=True))
        if any(not 0 <= start < end <= chain.length for chain, start, end in spans):
            raise CanaryError(f"a step computes tokens that nobody knows: {spans}")
        rows = Rows(
            np.concatenate([chain.namespaces(start, end) for chain, start, end in spans]),
            np.concatenate([np.arange(start, end) for _, start, end in spans]),
            np.concatenate([chain.tokens[start:end] for chain, start, end in spans]),
            np.concatenate([chain.digests[start:end] for chain, start, end in spans]),
        )
        if not np.array_equal(plan.positions, rows.positions):
            raise CanaryError("a step computes tokens at other positions than their own")
        if not np.array_equal(plan.token_ids, rows.tokens):
            raise CanaryError("a step computes other tokens than the requests have")
        return rows

    def _check_generations(self, plan: BatchPlan, ids: list[str]) -> None:
        """A page that a request had before must be the same page: not freed and given out again meanwhile, whatever it holds."""
        for request_id in ids:
            if request_id not in self._rows:
                self._rows[request_id] = self._spare_rows.pop()
        pages, counts = plan.kv_indices, np.diff(plan.kv_indptr)
        rows = np.repeat([self._rows[request_id] for request_id in ids], counts)
        columns = np.arange(len(pages)) - np.repeat(plan.kv_indptr[:-1], counts)
        generations = self._pool.generations[pages]
        reused = (self._seen_pages[rows, columns] == pages) & (
            self._seen_generations[rows, columns] != generations
        )
        if reused.any():
            page = int(pages[int(np.argmax(reused))])
            raise CanaryError(
                f"a running request's page was freed: {self._pool.describe(page * self._pool.page_size)}"
            )
        self._seen_pages[rows, columns] = pages
        self._seen_generations[rows, columns] = generations

    def _sample(self, step: Step, ends: IntArray) -> list[int]:
        """Each next token is a function of the whole text before it, so that answers do not depend on batching."""
        sampling = [b for b, part in enumerate(step.parts) if part.samples]
        chains = [self._chains[step.parts[b].request.request_id] for b in sampling]
        if any(chain.length != ends[b] for chain, b in zip(chains, sampling, strict=True)):
            raise CanaryError("a request samples before all its tokens are computed")
        before = np.array([chain.digests[chain.length - 1] for chain in chains], dtype=np.uint64)
        tokens = (before >> np.uint64(7)) % np.uint64(FAKE_VOCAB)
        after = before + mix(ends[sampling], tokens)
        for place, chain in enumerate(chains):
            if chain.length == chain.boundary:  # the answer is in the tail
                after[place : place + 1] += chain.namespaces(chain.boundary, chain.boundary + 1)
                after[place : place + 1] -= chain.namespaces(0, 1)
        answer: list[int] = tokens.tolist()
        for chain, token, digest in zip(chains, answer, after, strict=True):
            chain.append(token, digest)
        return answer


def _slots_of(
    plan: BatchPlan, ends: IntArray, new: IntArray, page_size: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Through the page tables: the slots of all tokens of each sequence, and those among them of the new ones."""
    total = int(ends.sum())
    past = np.cumsum(ends)
    offsets = np.arange(total) - np.repeat(past - ends, ends)
    pages = plan.kv_indices[np.repeat(plan.kv_indptr[:-1], ends) + offsets // page_size]
    slots = pages.astype(np.int64) * page_size + offsets % page_size
    return slots, slots[offsets >= np.repeat(ends - new, ends)]


def _whole(chains: list[Chain], ends: IntArray) -> Rows:
    """All of each chain, as far as it is computed."""
    spans = list(zip(chains, ends.tolist(), strict=True))
    return Rows(
        np.concatenate([chain.namespaces(0, end) for chain, end in spans]),
        np.concatenate([np.arange(end) for _, end in spans]),
        np.concatenate([chain.tokens[:end] for chain, end in spans]),
        np.concatenate([chain.digests[:end] for chain, end in spans]),
    )
