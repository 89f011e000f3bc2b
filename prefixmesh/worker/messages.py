"""What the gRPC front and the engine say to each other.

Plain msgspec structs, so that the two may be threads or processes: ``engine_client`` carries them either way. Events of one
step travel together in one ``StepEvents`` frame.
"""

import math
from typing import Literal

import msgspec

from prefixmesh.cache.public import PublicPrefix
from prefixmesh.model_files.linear_sizes import NO_LINEARS, LinearSizes
from prefixmesh.worker.engine_stats import Stats as Stats
from prefixmesh.worker.kv_copies.layout import CopyLayout
from prefixmesh.worker.prefill_savings import PrefillShape
from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand

EndReason = Literal["stop", "length", "aborted", "failed", "no_room", "queue_timeout", "too_late"]
"""``no_room``: the KV pool has too few pages that this request may have, and nobody runs who would give some back.
``queue_timeout``: it has waited for its first admission as long as it may. ``too_late``: it has waited so long that it could not be answered
before its caller's deadline any more."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One name under which a LoRA adapter is known to the engine, and the state of its weights."""

    name: str
    digest: str
    """BLAKE2b of its content, in hexadecimal: what ``Submit.adapter`` names, and what enters the namespace."""

    rank: int
    """The largest of any of its modules."""

    size_bytes: int
    """Of its weights, when resident."""

    resident: bool
    """Whether its weights are in the device's memory now."""

    pinned: bool
    running_requests: int
    """Requests of its content that are running or wait, under whichever name they came."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine tells once, when it is ready."""

    model: str
    model_revision: str
    vocab_size: int
    context_length: int
    """Most tokens of prompt and answer together: the model's own limit, or the pool's where that is less."""

    page_size: int
    total_pages: int
    max_total_tokens: int
    max_running_requests: int
    prefix_cache: str
    device: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    memory_sums: str
    """The sums that sized the pool, for one log line."""

    prefill_shape: PrefillShape
    """What a token of a prompt costs the model, so that the front can tell what a hit saves."""

    linear_sizes: LinearSizes = NO_LINEARS
    """What adapters may change: with it the front refuses at once what does not fit."""

    adapters: tuple[AdapterInfo, ...] = ()
    """Those that the settings name, loaded already."""

    kv_layout: CopyLayout | None = None
    """How its KV lies when it is copied to other workers and from them; None where that cannot be."""


class EngineSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling as the engine needs it; stop strings are the front's business."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    """Already resolved against the context; 0 computes the prompt only."""

    stop_token_ids: tuple[int, ...]
    """The caller's and, unless ``ignore_eos``, the model's. Ending ids are never part of the answer."""

    min_tokens: int = 0
    """Ending ids are not chosen before so many tokens."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    """Added to the logits of ``bias_ids``, in that order."""

    logprobs: int | None = None
    """Tell each token's log-probability, and so many of the likeliest; None tells nothing."""

    json_schema: str = ""
    regex: str = ""
    """What the answer must be; at most one of the two, empty is none."""

    @property
    def has_grammar(self) -> bool:
        """Whether the answer must follow a grammar."""
        return bool(self.json_schema or self.regex)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens so far change the logits of the next."""
        return bool(self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether any rule of ``logit_rules`` applies; a request without one costs nothing there."""
        return bool(self.min_tokens or self.has_penalties or self.bias_ids or self.has_grammar)


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: a new request."""

    request_id: str
    namespace: bytes
    tokens: bytes
    """Packed prompt."""

    sampling: EngineSampling
    resumed: bytes = b""
    """Packed ids that were generated already: the answer's beginning."""

    owner: str = ""
    """Who pays for what the request adds to the cache: the caller's tenant; empty for nobody."""

    priority: int = 0
    """Higher goes first under the policy ``priority``, and its prefix stays longer under an eviction by priority."""

    queue_timeout_s: float = 0.0
    """Seconds until it gives up its first admission; 0 is the engine's own limit, infinity none, not the engine's either."""
    time_left_s: float = math.inf
    """Seconds until the caller's deadline. What cannot be answered by then is not begun with."""

    is_follower: bool = False
    """Of several branches of a call, not the first: what it waits for is the first one's business, and it gives way with that alone."""

    adapter: str = ""
    """Digest of the LoRA adapter to answer with (``AdapterInfo.digest``); empty is the base model. ``namespace`` must be
    derived from the same digest, or KV of different weights would be shared."""

    public: tuple[PublicPrefix, ...] = ()
    """Public prefixes that the prompt may live behind: the engine takes the one under which most of it is cached, or none
    (``cache.public.choose_key``)."""

    is_warming: bool = False
    """Nobody has asked for it: it makes a prefix warm, and counts nowhere as a request. Without tokens, its adapter alone is wanted."""

    boundary_tokens: int = 0
    tail: bytes = b""
    """Of a request of the worker's own, whose ``namespace`` is a public one: where that ends, and the namespace behind it, as of a
    ``PrefixName``."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: stop a request in whatever state it is, within one step. Unknown ids are ignored."""

    request_id: str


class GetStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: send a ``Stats``."""


class Flush(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: empty the prefix cache."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: make an adapter known under a name. Known already with other content: the name means the new one from
    then on, and requests of the old one run to their end."""

    question: int
    """Number of the ``AdapterAnswer``."""

    name: str
    path: str
    """Of its folder, relative to the adapter root."""

    pinned: bool = False
    """Its weights stay resident, never replaced by those of others."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: forget a name; the answer comes when the requests that had its content by then have ended."""

    question: int
    name: str


class ListAdapters(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: send all names."""

    question: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to engine: end now."""


AdapterCommand = LoadAdapter | UnloadAdapter | ListAdapters
"""What is answered by an ``AdapterAnswer``."""

EngineCommand = Submit | Abort | GetStats | Flush | AdapterCommand | PrefixCommand
"""What the engine's core takes."""

Command = EngineCommand | Shutdown


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request entered a batch for the first time, and what it could have of the cache has come."""

    request_id: str
    cached_tokens: int
    """Of its prompt, on all tiers together."""

    queued_ms: float
    host_tokens: int = 0
    """Of those, what came back from the host."""

    disk_tokens: int = 0
    """Of those, what came from the disk."""

    load_back_ms: float = 0.0
    """From admission until the host's had come; the disk's came before it."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities by the model alone, at one token of an answer."""

    logprob: float
    top_ids: tuple[int, ...]
    """The likeliest tokens, the likeliest first."""

    top_logprobs: tuple[float, ...]


class TokensOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New tokens of one request, starting at ``position`` of its answer."""

    request_id: str
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where the request asked for it."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request's last event. Its pages are released or cached already."""

    request_id: str
    reason: EndReason
    completion_tokens: int
    prefill_ms: float
    first_token_ms: float
    decode_ms: float
    error: str = ""
    """For ``failed`` and ``no_room``: what went wrong, safe to show."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request was never admitted. ``field`` is set when it is the caller's error, empty when the engine is full."""

    request_id: str
    field: str
    problem: str
    retry_after_s: float | None = None
    """Where the engine is full: after so many seconds a place is expected; None where that is not known."""

    adapter_left: bool = False
    """No name means the adapter's content any more: it was loaded anew or unloaded since the request was prepared."""


AdapterProblem = Literal["invalid", "not_found", "over_budget", "overloaded"]


class AdapterAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to one ``AdapterCommand``: the adapter that was loaded, all of them for a list, none after an unload."""

    question: int
    adapters: tuple[AdapterInfo, ...] = ()
    error: AdapterProblem | None = None
    """Set when it was refused; ``field`` and ``problem`` say why."""

    field: str = ""
    problem: str = ""


class CacheChange(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to whole blocks of the prefix cache."""

    kind: Literal["stored", "removed", "cleared"]
    tier: int = 0
    """A ``Tier``; of no meaning for ``cleared``, which is of all tiers."""

    parent: int | None = None
    """The block before the first that was stored; None where that begins its namespace."""

    fingerprints: bytes = b""
    """Packed (``cache.packed_names``)."""


class CacheChanges(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What happened to the cache since the last time, in order. It goes before what the same step or command tells of its requests:
    whoever learns that a request has ended has been told which blocks it left."""

    changes: list[CacheChange]


Event = Admitted | TokensOut | Ended | Refused | Stats | AdapterAnswer | PrefixAnswer | CacheChanges


class StepEvents(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything that one step of the engine has to tell."""

    events: list[Event]
