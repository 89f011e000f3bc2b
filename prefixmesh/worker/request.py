"""One request inside the engine: its tokens, its pages, its phase and its times. A record; the scheduler moves it.

Who owns what, as half-open ranges. Tokens::

    ids:    |<---- prompt ---->|<-- answer so far -->|  room up to max_tokens  |
            0            prompt_tokens             length                 len(ids)
    KV:     |<-------- computed -------->|.|
            0                        computed

While decoding ``computed == length - 1``: the last token was sampled, and its KV is written by the next step. Pages::

    page_table: |<-- shared_pages -->|<-- loading_pages -->|<---- private ---->|
                0                shared_pages              ^ own_from        pages
    owner:      | the prefix cache,  | the copy that       | this request      |
                | held by `receipt`  | `load` is           |                   |
    freed by:   | the cache, after   | the copy's end      | KvManager.release |
                | the receipt's end  |                     |                   |

``KvManager.commit`` hands complete private pages to the cache and so moves ``shared_pages`` to the right; nothing moves it to
the left but a release, after which the request owns nothing. While KV comes back from the host, ``computed`` counts it already; when it
has come, ``KvManager.loaded`` makes its pages shared ones, and until then nothing is committed.
"""

import enum
import math
from dataclasses import dataclass

import numpy as np

from prefixmesh import tokens
from prefixmesh.cache.base import LockReceipt, PageIndices, RadixKey
from prefixmesh.cache.ledger import CacheLedger, CacheQuery, Lookup
from prefixmesh.ids import Namespace
from prefixmesh.worker.answer_grammar import AnswerGrammar
from prefixmesh.worker.batch_plan import IntArray
from prefixmesh.worker.messages import Admitted, Ended, EndReason, EngineSampling, Submit
from prefixmesh.worker.tiers.disk_fetches import NOTHING_FETCHED, FetchedRange
from prefixmesh.worker.tiers.load_backs import Load
from prefixmesh.worker.token_tally import TokenTally

_MS_PER_S = 1000.0


class Phase(enum.Enum):
    """``WAITING -> PREFILLING -> DECODING -> ENDED``; a running request may go to ``PREEMPTED`` and prefill again."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The mutable state of one request; see the module's drawing for the ranges."""

    request_id: str
    namespace: Namespace
    """The caller's own, by which it is counted, wherever its KV lives."""

    root: Namespace
    boundary_tokens: int
    tail: Namespace
    """Where its KV lives, as in a ``RadixKey``. It never changes once the request is queued: pages that it has shared are in the tree under
    this key, and who waits is sorted by it."""

    owner: str
    """Who pays for what it adds to the cache."""

    adapter: str
    """Digest of the LoRA adapter that answers; empty is the base model."""

    priority: int
    query: CacheQuery
    """Its right to be counted in the ledger, used up by its first admission."""

    sampling: EngineSampling
    stop_ids: frozenset[int]
    changes_logits: bool
    """Whether its sampling has rules that change logits."""

    tally: TokenTally | None
    """Of its tokens, where its sampling has penalties."""

    prompt_tokens: int
    ids: IntArray
    """Prompt and answer; as long as both together may become."""

    length: int
    """Tokens of ``ids`` that are known: the prompt and what was generated."""

    is_over: bool
    """Whether what it brought along as generated has ended the answer already."""

    grammar: AnswerGrammar | None
    """What the answer must follow; it has taken the tokens of the answer so far."""

    arrived_at: float
    queue_deadline: float
    """When it ends if it was never admitted by then; infinity without a limit."""

    due_at: float
    """Its caller's deadline; infinity without one."""

    latest_begin: float = math.inf
    """When its deadline cannot be met any more; given by the queue."""

    may_give_way: bool = True
    """Whether it may leave the queue for somebody of a higher priority: it is not part of an answer that has begun."""

    number: int = 0
    """Its place in the order of arrival, given by the queue."""

    phase: Phase = Phase.WAITING
    computed: int = 0
    """Tokens whose KV is complete."""

    page_table: PageIndices
    pages: int = 0
    shared_pages: int = 0
    loading_pages: int = 0
    load: Load | None = None
    """What brings the KV of ``loading_pages``; None when nothing is loading."""

    loaded_tokens: int = 0
    """Of ``matched_tokens``, what came back from the host."""

    fetched: FetchedRange = NOTHING_FETCHED
    """What came from the disk for it, before its admission."""

    may_load: bool = True
    """False once a load-back has failed it: it computes instead."""

    rescue_until: float | None = None
    """While it waits for its admission: until when it lets what would go for it be saved first; None before it has come to that."""

    lookup: Lookup | None = None
    """What its first admission found, to be counted once what is loading has come."""

    receipt: LockReceipt | None = None
    admitted_after_flushes: int = 0
    """How many flushes the cache had had at its last admission: after another one, its KV may be of forgotten weights."""

    matched_tokens: int = 0
    """Tokens found in the cache at the last admission, on all tiers; what is loading only once it has come."""

    promised_pages: int = 0
    """Pages that a running request is expected to have at its end: what an admission of others leaves room for."""

    admitted_at: float | None = None
    """First admission; a resumption does not change it."""

    is_announced: bool = False
    """Whether its caller was told of its admission: once what was loading has come, or will not."""

    first_token_at: float | None = None
    last_token_at: float | None = None

    @classmethod
    def from_submit(
        cls,
        command: Submit,
        *,
        page_size: int,
        ledger: CacheLedger,
        now: float,
        grammar: AnswerGrammar | None = None,
        queue_deadline: float = math.inf,
    ) -> "Request":
        """A waiting request; resumed, it looks as a preempted one. The arrays are as long as it may become, and untouched memory costs nothing."""
        namespace = Namespace(command.namespace)
        prompt = tokens.unpack(command.tokens)
        total = len(prompt) + command.sampling.max_tokens
        ids = np.empty(total, dtype=np.int32)
        ids[: len(prompt)] = prompt
        resumed = tokens.unpack(command.resumed)
        query = ledger.open_query(namespace)
        if command.is_warming:
            query.leave_uncounted()
        length = len(prompt) + len(resumed)
        ids[len(prompt) : length] = resumed
        stop_ids = frozenset(command.sampling.stop_token_ids)
        return cls(
            request_id=command.request_id,
            namespace=namespace,
            root=namespace,
            boundary_tokens=command.boundary_tokens,
            tail=Namespace(command.tail),
            owner=command.owner,
            adapter=command.adapter,
            priority=command.priority,
            query=query,
            sampling=command.sampling,
            stop_ids=stop_ids,
            changes_logits=command.sampling.changes_logits,
            tally=TokenTally(ids, len(prompt)) if command.sampling.has_penalties else None,
            prompt_tokens=len(prompt),
            ids=ids,
            length=length,
            is_over=not stop_ids.isdisjoint(resumed[command.sampling.min_tokens :].tolist())
            or (grammar is not None and grammar.is_finished),
            grammar=grammar,
            arrived_at=now,
            queue_deadline=queue_deadline,
            due_at=now + command.time_left_s,
            may_give_way=not (command.is_follower or command.resumed),
            page_table=np.zeros(-(-total // page_size), dtype=np.int32),
        )

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer so far; also the index of the next one, which its randomness depends on."""
        return self.length - self.prompt_tokens

    @property
    def max_tokens(self) -> int:
        """How long the answer may become."""
        return len(self.ids) - self.prompt_tokens

    @property
    def wants_token(self) -> bool:
        """Whether a token is to be sampled once everything known is computed."""
        return self.length < len(self.ids) and not self.is_over

    @property
    def own_from(self) -> int:
        """Where its private pages begin in the page table."""
        return self.shared_pages + self.loading_pages

    @property
    def private_pages(self) -> int:
        """Pages that this request alone owns."""
        return self.pages - self.own_from

    def live_under(self, key: RadixKey) -> None:
        """Its KV is to live where this key's does. To be called before it is queued, or never. O(1)."""
        self.root, self.boundary_tokens, self.tail = key.namespace, key.boundary_tokens, key.tail

    def key(self, size_tokens: int) -> RadixKey:
        """The first ``size_tokens`` tokens as the cache's key. O(size_tokens)."""
        return RadixKey(self.root, self.ids[:size_tokens].tobytes(), self.boundary_tokens, self.tail)

    def match_key(self, page_size: int) -> RadixKey:
        """What may be matched: whole pages, and never the last token, since one must be computed for its logits."""
        return self.key((self.length - 1) // page_size * page_size)

    def append(self, token_id: int, now: float) -> None:
        """Add one generated token. O(1)."""
        self.ids[self.length] = token_id
        self.length += 1
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now

    def admitted_event(self, load_back_ms: float) -> Admitted:
        """What its caller is told once it is admitted, and what was loading has come."""
        assert self.admitted_at is not None
        cached_tokens = min(self.matched_tokens, self.prompt_tokens)
        on_device = self.matched_tokens - self.loaded_tokens
        return Admitted(
            request_id=self.request_id,
            cached_tokens=cached_tokens,
            queued_ms=(self.admitted_at - self.arrived_at) * _MS_PER_S,
            host_tokens=max(0, cached_tokens - on_device),
            disk_tokens=min(cached_tokens, self.fetched.within(on_device)),
            load_back_ms=load_back_ms,
        )

    def ended_event(self, reason: EndReason, now: float, error: str = "") -> Ended:
        """The last event. Spans that never began are 0."""
        first, last, admitted = self.first_token_at, self.last_token_at, self.admitted_at
        prefilled_at = now if first is None else first
        return Ended(
            request_id=self.request_id,
            reason=reason,
            completion_tokens=self.output_tokens,
            prefill_ms=0.0 if admitted is None else (prefilled_at - admitted) * _MS_PER_S,
            first_token_ms=0.0 if first is None else (first - self.arrived_at) * _MS_PER_S,
            decode_ms=0.0 if first is None or last is None else (last - first) * _MS_PER_S,
            error=error,
        )

    def __repr__(self) -> str:
        loading = f" + {self.loading_pages} loading" if self.load is not None else ""
        return (
            f"<Request {self.request_id} {self.phase.value}: {self.computed}/{self.length} tokens computed, "
            f"{self.shared_pages} shared{loading} + {self.private_pages} private pages>"
        )
