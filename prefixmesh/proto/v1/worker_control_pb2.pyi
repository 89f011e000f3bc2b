from prefixmesh.proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
TIER_DEVICE: Tier
TIER_HOST: Tier

class Prefix(_message.Message):
    __slots__ = ("namespace", "token_ids", "boundary_tokens", "tail_namespace", "adapter_digest")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAIL_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    token_ids: bytes
    boundary_tokens: int
    tail_namespace: bytes
    adapter_digest: str
    def __init__(self, namespace: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., boundary_tokens: _Optional[int] = ..., tail_namespace: _Optional[bytes] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("address", "incarnation", "tokens", "boundary_tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    tokens: int
    boundary_tokens: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ..., tokens: _Optional[int] = ..., boundary_tokens: _Optional[int] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("prefix", "pin", "sources", "copy_only")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_ONLY_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    pin: WorkerPin
    sources: _containers.RepeatedCompositeFieldContainer[KvSource]
    copy_only: bool
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., pin: _Optional[_Union[WorkerPin, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[KvSource, _Mapping]]] = ..., copy_only: _Optional[bool] = ...) -> None: ...

class WorkerPin(_message.Message):
    __slots__ = ("pin_id", "owner", "tier", "ttl_ms")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    owner: str
    tier: Tier
    ttl_ms: int
    def __init__(self, pin_id: _Optional[str] = ..., owner: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("held_tokens", "found_tokens", "copied_tokens", "computed_tokens", "elapsed_ms", "copy_problem")
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    COPY_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    found_tokens: int
    copied_tokens: int
    computed_tokens: int
    elapsed_ms: float
    copy_problem: str
    def __init__(self, held_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ..., copied_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., elapsed_ms: _Optional[float] = ..., copy_problem: _Optional[str] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    def __init__(self, pin_id: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: _Optional[bool] = ...) -> None: ...

class WorkerPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerPinsResponse(_message.Message):
    __slots__ = ("pins", "charged_pages", "budget_pages", "owner_budget_pages", "version", "host_budget_pages", "host_owner_budget_pages")
    PINS_FIELD_NUMBER: _ClassVar[int]
    CHARGED_PAGES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    OWNER_BUDGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_BUDGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_OWNER_BUDGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[WorkerPinState]
    charged_pages: int
    budget_pages: int
    owner_budget_pages: int
    version: int
    host_budget_pages: int
    host_owner_budget_pages: int
    def __init__(self, pins: _Optional[_Iterable[_Union[WorkerPinState, _Mapping]]] = ..., charged_pages: _Optional[int] = ..., budget_pages: _Optional[int] = ..., owner_budget_pages: _Optional[int] = ..., version: _Optional[int] = ..., host_budget_pages: _Optional[int] = ..., host_owner_budget_pages: _Optional[int] = ...) -> None: ...

class WorkerPinState(_message.Message):
    __slots__ = ("pin_id", "owner", "tier", "pages", "held_tokens", "missing_tokens", "expires_in_ms")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    owner: str
    tier: Tier
    pages: int
    held_tokens: int
    missing_tokens: int
    expires_in_ms: int
    def __init__(self, pin_id: _Optional[str] = ..., owner: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., pages: _Optional[int] = ..., held_tokens: _Optional[int] = ..., missing_tokens: _Optional[int] = ..., expires_in_ms: _Optional[int] = ...) -> None: ...

class HotPrefixesRequest(_message.Message):
    __slots__ = ("max_prefixes", "max_tokens")
    MAX_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_prefixes: int
    max_tokens: int
    def __init__(self, max_prefixes: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class HotPrefixesResponse(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[HotPrefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[HotPrefix, _Mapping]]] = ...) -> None: ...

class HotPrefix(_message.Message):
    __slots__ = ("prefix", "hits", "owner")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    hits: int
    owner: str
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., hits: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class ReadPrefixRequest(_message.Message):
    __slots__ = ("prefix", "start_tokens", "model_revision", "layout_digest", "incarnation")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    START_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    start_tokens: int
    model_revision: str
    layout_digest: str
    incarnation: int
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., start_tokens: _Optional[int] = ..., model_revision: _Optional[str] = ..., layout_digest: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("digest", "dtype", "layers", "kv_heads", "head_dim", "page_size", "tensor_parallel_rank", "tensor_parallel_size", "page_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    tensor_parallel_rank: int
    tensor_parallel_size: int
    page_bytes: int
    def __init__(self, digest: _Optional[str] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., page_size: _Optional[int] = ..., tensor_parallel_rank: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class ReadPrefixResponse(_message.Message):
    __slots__ = ("header", "part")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    header: KvHeader
    part: KvPart
    def __init__(self, header: _Optional[_Union[KvHeader, _Mapping]] = ..., part: _Optional[_Union[KvPart, _Mapping]] = ...) -> None: ...

class KvHeader(_message.Message):
    __slots__ = ("model_revision", "layout", "incarnation", "held_tokens")
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model_revision: str
    layout: KvLayout
    incarnation: int
    held_tokens: int
    def __init__(self, model_revision: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., incarnation: _Optional[int] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class KvPart(_message.Message):
    __slots__ = ("start_tokens", "tokens", "kv", "checksum")
    START_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    start_tokens: int
    tokens: int
    kv: bytes
    checksum: int
    def __init__(self, start_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., kv: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_ms", "undo")
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    undo: bool
    def __init__(self, grace_ms: _Optional[int] = ..., undo: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_requests",)
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    def __init__(self, running_requests: _Optional[int] = ...) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ("resume_from", "report_interval_ms", "router_id", "reports_only")
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REPORTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    resume_from: CachePlace
    report_interval_ms: int
    router_id: str
    reports_only: bool
    def __init__(self, resume_from: _Optional[_Union[CachePlace, _Mapping]] = ..., report_interval_ms: _Optional[int] = ..., router_id: _Optional[str] = ..., reports_only: _Optional[bool] = ...) -> None: ...

class CachePlace(_message.Message):
    __slots__ = ("epoch", "sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class WatchCacheResponse(_message.Message):
    __slots__ = ("part", "events", "report")
    PART_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    part: SnapshotPart
    events: CacheEvents
    report: WorkerReport
    def __init__(self, part: _Optional[_Union[SnapshotPart, _Mapping]] = ..., events: _Optional[_Union[CacheEvents, _Mapping]] = ..., report: _Optional[_Union[WorkerReport, _Mapping]] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("place", "tier", "fingerprints", "last")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    place: CachePlace
    tier: Tier
    fingerprints: bytes
    last: bool
    def __init__(self, place: _Optional[_Union[CachePlace, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., fingerprints: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("epoch", "first_sequence", "events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_sequence: int
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    def __init__(self, epoch: _Optional[int] = ..., first_sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: CacheCleared
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("tier", "parent", "fingerprints")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    parent: int
    fingerprints: bytes
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., parent: _Optional[int] = ..., fingerprints: _Optional[bytes] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("tier", "fingerprints")
    TIER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    fingerprints: bytes
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., fingerprints: _Optional[bytes] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("place", "tiers", "running_requests", "queued_requests", "uncached_tokens", "prefill", "decode_step_ms", "accepted", "prefilled", "ended", "own_requests", "resident_adapters", "adapter_load_ms", "draining", "load_back_ms_per_token", "unix_ms", "uncached_squares", "answer_tokens", "token_interval_ms", "copy_ms_per_token", "pins_version", "rated_prefills")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    OWN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_BACK_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_SQUARES_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    COPY_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PINS_VERSION_FIELD_NUMBER: _ClassVar[int]
    RATED_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    place: CachePlace
    tiers: _containers.RepeatedCompositeFieldContainer[TierReport]
    running_requests: int
    queued_requests: int
    uncached_tokens: int
    prefill: PrefillRate
    decode_step_ms: float
    accepted: _containers.RepeatedScalarFieldContainer[str]
    prefilled: _containers.RepeatedScalarFieldContainer[str]
    ended: _containers.RepeatedScalarFieldContainer[str]
    own_requests: int
    resident_adapters: _containers.RepeatedScalarFieldContainer[str]
    adapter_load_ms: float
    draining: bool
    load_back_ms_per_token: float
    unix_ms: int
    uncached_squares: int
    answer_tokens: int
    token_interval_ms: float
    copy_ms_per_token: float
    pins_version: int
    rated_prefills: int
    def __init__(self, place: _Optional[_Union[CachePlace, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TierReport, _Mapping]]] = ..., running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., prefill: _Optional[_Union[PrefillRate, _Mapping]] = ..., decode_step_ms: _Optional[float] = ..., accepted: _Optional[_Iterable[str]] = ..., prefilled: _Optional[_Iterable[str]] = ..., ended: _Optional[_Iterable[str]] = ..., own_requests: _Optional[int] = ..., resident_adapters: _Optional[_Iterable[str]] = ..., adapter_load_ms: _Optional[float] = ..., draining: _Optional[bool] = ..., load_back_ms_per_token: _Optional[float] = ..., unix_ms: _Optional[int] = ..., uncached_squares: _Optional[int] = ..., answer_tokens: _Optional[int] = ..., token_interval_ms: _Optional[float] = ..., copy_ms_per_token: _Optional[float] = ..., pins_version: _Optional[int] = ..., rated_prefills: _Optional[int] = ...) -> None: ...

class TierReport(_message.Message):
    __slots__ = ("blocks", "digest", "pool")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    digest: int
    pool: PoolState
    def __init__(self, blocks: _Optional[int] = ..., digest: _Optional[int] = ..., pool: _Optional[_Union[PoolState, _Mapping]] = ...) -> None: ...

class PrefillRate(_message.Message):
    __slots__ = ("linear_ms_per_token", "quadratic_ms_per_token2")
    LINEAR_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUADRATIC_MS_PER_TOKEN2_FIELD_NUMBER: _ClassVar[int]
    linear_ms_per_token: float
    quadratic_ms_per_token2: float
    def __init__(self, linear_ms_per_token: _Optional[float] = ..., quadratic_ms_per_token2: _Optional[float] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "rank", "size_bytes", "resident", "pinned", "running_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    size_bytes: int
    resident: bool
    pinned: bool
    running_requests: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., size_bytes: _Optional[int] = ..., resident: _Optional[bool] = ..., pinned: _Optional[bool] = ..., running_requests: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "model", "model_revision", "context_length", "page_size", "prefix_cache", "max_total_tokens", "max_running_requests", "protocol_version", "fingerprint_version", "rates", "pool", "running_requests", "queued_requests", "tokenizer_digest", "cache", "adapters", "block_size", "template_digest", "draining", "unix_ms", "host_pool", "tiers", "kv_layout", "copies")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_POOL_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    model: str
    model_revision: str
    context_length: int
    page_size: int
    prefix_cache: str
    max_total_tokens: int
    max_running_requests: int
    protocol_version: int
    fingerprint_version: int
    rates: Rates
    pool: PoolState
    running_requests: int
    queued_requests: int
    tokenizer_digest: str
    cache: CacheCounts
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    block_size: int
    template_digest: str
    draining: bool
    unix_ms: int
    host_pool: PoolState
    tiers: TierCounts
    kv_layout: str
    copies: CopyCounts
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., context_length: _Optional[int] = ..., page_size: _Optional[int] = ..., prefix_cache: _Optional[str] = ..., max_total_tokens: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., protocol_version: _Optional[int] = ..., fingerprint_version: _Optional[int] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., pool: _Optional[_Union[PoolState, _Mapping]] = ..., running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., cache: _Optional[_Union[CacheCounts, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., block_size: _Optional[int] = ..., template_digest: _Optional[str] = ..., draining: _Optional[bool] = ..., unix_ms: _Optional[int] = ..., host_pool: _Optional[_Union[PoolState, _Mapping]] = ..., tiers: _Optional[_Union[TierCounts, _Mapping]] = ..., kv_layout: _Optional[str] = ..., copies: _Optional[_Union[CopyCounts, _Mapping]] = ...) -> None: ...

class CopyCounts(_message.Message):
    __slots__ = ("copied_tokens", "copied_bytes", "given_tokens", "given_bytes", "failed_copies", "copying")
    COPIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_COPIES_FIELD_NUMBER: _ClassVar[int]
    COPYING_FIELD_NUMBER: _ClassVar[int]
    copied_tokens: int
    copied_bytes: int
    given_tokens: int
    given_bytes: int
    failed_copies: int
    copying: int
    def __init__(self, copied_tokens: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., given_tokens: _Optional[int] = ..., given_bytes: _Optional[int] = ..., failed_copies: _Optional[int] = ..., copying: _Optional[int] = ...) -> None: ...

class TierCounts(_message.Message):
    __slots__ = ("backed_up_tokens", "dropped_tokens", "loaded_back_tokens", "fetched_tokens", "recomputed_tokens", "failed_copies", "copies_in_flight", "disk_tokens", "disk_bytes", "disk_written_tokens", "disk_bad_files", "disk_dropped_tokens")
    BACKED_UP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BACK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_COPIES_FIELD_NUMBER: _ClassVar[int]
    COPIES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITTEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_BAD_FILES_FIELD_NUMBER: _ClassVar[int]
    DISK_DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    backed_up_tokens: int
    dropped_tokens: int
    loaded_back_tokens: int
    fetched_tokens: int
    recomputed_tokens: int
    failed_copies: int
    copies_in_flight: int
    disk_tokens: int
    disk_bytes: int
    disk_written_tokens: int
    disk_bad_files: int
    disk_dropped_tokens: int
    def __init__(self, backed_up_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., loaded_back_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., failed_copies: _Optional[int] = ..., copies_in_flight: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_written_tokens: _Optional[int] = ..., disk_bad_files: _Optional[int] = ..., disk_dropped_tokens: _Optional[int] = ...) -> None: ...

class CacheCounts(_message.Message):
    __slots__ = ("requests", "prompt_tokens", "hit_tokens", "miss_tokens")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prompt_tokens: int
    hit_tokens: _inference_pb2.CachedTokens
    miss_tokens: MissTokens
    def __init__(self, requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., hit_tokens: _Optional[_Union[_inference_pb2.CachedTokens, _Mapping]] = ..., miss_tokens: _Optional[_Union[MissTokens, _Mapping]] = ...) -> None: ...

class MissTokens(_message.Message):
    __slots__ = ("never_seen", "evicted", "other_namespace", "tail")
    NEVER_SEEN_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    OTHER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    never_seen: int
    evicted: int
    other_namespace: int
    tail: int
    def __init__(self, never_seen: _Optional[int] = ..., evicted: _Optional[int] = ..., other_namespace: _Optional[int] = ..., tail: _Optional[int] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("prefill_tokens_per_s", "decode_step_ms", "prefill", "adapter_load_ms", "load_back_ms_per_token")
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BACK_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens_per_s: float
    decode_step_ms: float
    prefill: PrefillRate
    adapter_load_ms: float
    load_back_ms_per_token: float
    def __init__(self, prefill_tokens_per_s: _Optional[float] = ..., decode_step_ms: _Optional[float] = ..., prefill: _Optional[_Union[PrefillRate, _Mapping]] = ..., adapter_load_ms: _Optional[float] = ..., load_back_ms_per_token: _Optional[float] = ...) -> None: ...

class PoolState(_message.Message):
    __slots__ = ("total_pages", "free_pages", "evictable_pages", "protected_pages")
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    total_pages: int
    free_pages: int
    evictable_pages: int
    protected_pages: int
    def __init__(self, total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., evictable_pages: _Optional[int] = ..., protected_pages: _Optional[int] = ...) -> None: ...
