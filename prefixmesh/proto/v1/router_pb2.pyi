from prefixmesh.proto.v1 import inference_pb2 as _inference_pb2
from prefixmesh.proto.v1 import worker_control_pb2 as _worker_control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdapterSpec(_message.Message):
    __slots__ = ("name", "path", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class FleetAdapter(_message.Message):
    __slots__ = ("spec", "digest", "generation", "removed", "wanted", "held", "workers", "kept", "kept_generation")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    KEPT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    spec: AdapterSpec
    digest: str
    generation: int
    removed: bool
    wanted: int
    held: int
    workers: _containers.RepeatedCompositeFieldContainer[AdapterAtWorker]
    kept: AdapterSpec
    kept_generation: int
    def __init__(self, spec: _Optional[_Union[AdapterSpec, _Mapping]] = ..., digest: _Optional[str] = ..., generation: _Optional[int] = ..., removed: _Optional[bool] = ..., wanted: _Optional[int] = ..., held: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[AdapterAtWorker, _Mapping]]] = ..., kept: _Optional[_Union[AdapterSpec, _Mapping]] = ..., kept_generation: _Optional[int] = ...) -> None: ...

class AdapterAtWorker(_message.Message):
    __slots__ = ("worker_id", "address", "state", "problem", "digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    state: str
    problem: str
    digest: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., problem: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class PutAdapterRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: AdapterSpec
    def __init__(self, spec: _Optional[_Union[AdapterSpec, _Mapping]] = ...) -> None: ...

class PutAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: FleetAdapter
    def __init__(self, adapter: _Optional[_Union[FleetAdapter, _Mapping]] = ...) -> None: ...

class ListFleetAdaptersRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListFleetAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "acting")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ACTING_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[FleetAdapter]
    acting: bool
    def __init__(self, adapters: _Optional[_Iterable[_Union[FleetAdapter, _Mapping]]] = ..., acting: _Optional[bool] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: _Optional[bool] = ...) -> None: ...

class PinSpec(_message.Message):
    __slots__ = ("name", "owner", "tenant", "adapter", "extra_key", "public", "text", "chat", "tokens", "replicas", "tier", "ttl_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    tenant: str
    adapter: str
    extra_key: str
    public: bool
    text: str
    chat: _inference_pb2.ChatPrompt
    tokens: _inference_pb2.TokenPrompt
    replicas: int
    tier: _worker_control_pb2.Tier
    ttl_ms: int
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., extra_key: _Optional[str] = ..., public: _Optional[bool] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[_inference_pb2.ChatPrompt, _Mapping]] = ..., tokens: _Optional[_Union[_inference_pb2.TokenPrompt, _Mapping]] = ..., replicas: _Optional[int] = ..., tier: _Optional[_Union[_worker_control_pb2.Tier, str]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinStatus(_message.Message):
    __slots__ = ("spec", "tokens", "wanted", "held", "missing", "why", "replicas", "expires_in_ms", "generation", "namespace_digest")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    spec: PinSpec
    tokens: int
    wanted: int
    held: int
    missing: int
    why: str
    replicas: _containers.RepeatedCompositeFieldContainer[PinReplica]
    expires_in_ms: int
    generation: int
    namespace_digest: str
    def __init__(self, spec: _Optional[_Union[PinSpec, _Mapping]] = ..., tokens: _Optional[int] = ..., wanted: _Optional[int] = ..., held: _Optional[int] = ..., missing: _Optional[int] = ..., why: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[PinReplica, _Mapping]]] = ..., expires_in_ms: _Optional[int] = ..., generation: _Optional[int] = ..., namespace_digest: _Optional[str] = ...) -> None: ...

class PinReplica(_message.Message):
    __slots__ = ("worker_id", "address", "held_tokens", "state", "problem", "generation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    held_tokens: int
    state: str
    problem: str
    generation: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., held_tokens: _Optional[int] = ..., state: _Optional[str] = ..., problem: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class PutPinRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: PinSpec
    def __init__(self, spec: _Optional[_Union[PinSpec, _Mapping]] = ...) -> None: ...

class PutPinResponse(_message.Message):
    __slots__ = ("pin", "changed")
    PIN_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    pin: PinStatus
    changed: bool
    def __init__(self, pin: _Optional[_Union[PinStatus, _Mapping]] = ..., changed: _Optional[bool] = ...) -> None: ...

class GetPinRequest(_message.Message):
    __slots__ = ("name", "owner")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class GetPinResponse(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: PinStatus
    def __init__(self, pin: _Optional[_Union[PinStatus, _Mapping]] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    def __init__(self, owner: _Optional[str] = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins", "acting", "budgets", "actions")
    class ActionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PINS_FIELD_NUMBER: _ClassVar[int]
    ACTING_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinStatus]
    acting: bool
    budgets: _containers.RepeatedCompositeFieldContainer[PinBudgetUse]
    actions: _containers.ScalarMap[str, int]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinStatus, _Mapping]]] = ..., acting: _Optional[bool] = ..., budgets: _Optional[_Iterable[_Union[PinBudgetUse, _Mapping]]] = ..., actions: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PinBudgetUse(_message.Message):
    __slots__ = ("owner", "charged_tokens", "budget_tokens")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CHARGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    charged_tokens: int
    budget_tokens: int
    def __init__(self, owner: _Optional[str] = ..., charged_tokens: _Optional[int] = ..., budget_tokens: _Optional[int] = ...) -> None: ...

class RemovePinRequest(_message.Message):
    __slots__ = ("name", "owner")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class RemovePinResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: _Optional[bool] = ...) -> None: ...

class ListHeatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListHeatResponse(_message.Message):
    __slots__ = ("enabled", "items", "max_replicas", "max_prefixes", "max_tokens", "acting")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTING_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    items: _containers.RepeatedCompositeFieldContainer[HotItem]
    max_replicas: int
    max_prefixes: int
    max_tokens: int
    acting: bool
    def __init__(self, enabled: _Optional[bool] = ..., items: _Optional[_Iterable[_Union[HotItem, _Mapping]]] = ..., max_replicas: _Optional[int] = ..., max_prefixes: _Optional[int] = ..., max_tokens: _Optional[int] = ..., acting: _Optional[bool] = ...) -> None: ...

class HotItem(_message.Message):
    __slots__ = ("id", "is_adapter", "tokens", "requests_per_s", "holders", "target", "namespace_digest")
    ID_FIELD_NUMBER: _ClassVar[int]
    IS_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    is_adapter: bool
    tokens: int
    requests_per_s: float
    holders: int
    target: int
    namespace_digest: str
    def __init__(self, id: _Optional[str] = ..., is_adapter: _Optional[bool] = ..., tokens: _Optional[int] = ..., requests_per_s: _Optional[float] = ..., holders: _Optional[int] = ..., target: _Optional[int] = ..., namespace_digest: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("worker_id", "address", "ready", "problem", "in_flight", "work_ms", "blocks", "routed", "prompt_tokens", "cached_tokens", "cache", "adapters", "trust", "resyncs", "running_requests", "queued_requests", "uncached_tokens", "cached_tokens_bias", "cached_tokens_error", "first_token_ms_bias", "first_token_ms_error", "draining", "trust_changes", "ejected", "failures", "host_pool", "tiers", "host_blocks", "page_size", "load_back_ms_per_token", "copies", "copy_ms_per_token")
    class ResyncsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TrustChangesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WORK_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_BIAS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_ERROR_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_BIAS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TRUST_CHANGES_FIELD_NUMBER: _ClassVar[int]
    EJECTED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    HOST_POOL_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOAD_BACK_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    COPY_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    ready: bool
    problem: str
    in_flight: int
    work_ms: float
    blocks: int
    routed: int
    prompt_tokens: int
    cached_tokens: int
    cache: _worker_control_pb2.CacheCounts
    adapters: _containers.RepeatedScalarFieldContainer[str]
    trust: str
    resyncs: _containers.ScalarMap[str, int]
    running_requests: int
    queued_requests: int
    uncached_tokens: int
    cached_tokens_bias: float
    cached_tokens_error: float
    first_token_ms_bias: float
    first_token_ms_error: float
    draining: bool
    trust_changes: _containers.ScalarMap[str, int]
    ejected: bool
    failures: int
    host_pool: _worker_control_pb2.PoolState
    tiers: _worker_control_pb2.TierCounts
    host_blocks: int
    page_size: int
    load_back_ms_per_token: float
    copies: _worker_control_pb2.CopyCounts
    copy_ms_per_token: float
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., ready: _Optional[bool] = ..., problem: _Optional[str] = ..., in_flight: _Optional[int] = ..., work_ms: _Optional[float] = ..., blocks: _Optional[int] = ..., routed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., cache: _Optional[_Union[_worker_control_pb2.CacheCounts, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ..., trust: _Optional[str] = ..., resyncs: _Optional[_Mapping[str, int]] = ..., running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., cached_tokens_bias: _Optional[float] = ..., cached_tokens_error: _Optional[float] = ..., first_token_ms_bias: _Optional[float] = ..., first_token_ms_error: _Optional[float] = ..., draining: _Optional[bool] = ..., trust_changes: _Optional[_Mapping[str, int]] = ..., ejected: _Optional[bool] = ..., failures: _Optional[int] = ..., host_pool: _Optional[_Union[_worker_control_pb2.PoolState, _Mapping]] = ..., tiers: _Optional[_Union[_worker_control_pb2.TierCounts, _Mapping]] = ..., host_blocks: _Optional[int] = ..., page_size: _Optional[int] = ..., load_back_ms_per_token: _Optional[float] = ..., copies: _Optional[_Union[_worker_control_pb2.CopyCounts, _Mapping]] = ..., copy_ms_per_token: _Optional[float] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("request", "exclude", "adapter_changed", "unused_request_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CHANGED_FIELD_NUMBER: _ClassVar[int]
    UNUSED_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    exclude: _containers.RepeatedScalarFieldContainer[str]
    adapter_changed: bool
    unused_request_id: str
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., exclude: _Optional[_Iterable[str]] = ..., adapter_changed: _Optional[bool] = ..., unused_request_id: _Optional[str] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("worker_id", "address", "ticket", "prompt_ids", "routing", "request_id", "valid_ms", "model", "retokenized_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALID_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RETOKENIZED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    ticket: bytes
    prompt_ids: bytes
    routing: _inference_pb2.Routing
    request_id: str
    valid_ms: int
    model: str
    retokenized_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., ticket: _Optional[bytes] = ..., prompt_ids: _Optional[bytes] = ..., routing: _Optional[_Union[_inference_pb2.Routing, _Mapping]] = ..., request_id: _Optional[str] = ..., valid_ms: _Optional[int] = ..., model: _Optional[str] = ..., retokenized_tokens: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request", "tenant")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    tenant: str
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("policy", "spill_weight", "prompt_tokens", "chosen", "candidates", "excluded")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SPILL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    policy: str
    spill_weight: float
    prompt_tokens: int
    chosen: str
    candidates: _containers.RepeatedCompositeFieldContainer[CandidateCost]
    excluded: _containers.RepeatedCompositeFieldContainer[ExcludedWorker]
    def __init__(self, policy: _Optional[str] = ..., spill_weight: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., chosen: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[CandidateCost, _Mapping]]] = ..., excluded: _Optional[_Iterable[_Union[ExcludedWorker, _Mapping]]] = ...) -> None: ...

class CandidateCost(_message.Message):
    __slots__ = ("worker_id", "address", "trust", "device_tokens", "host_tokens", "counted_tokens", "in_flight", "wait_ms", "prefill_ms", "load_back_ms", "adapter_load_ms", "recompute_ms", "eviction_ms", "crowding_ms", "affinity_ms", "total_ms", "copied_tokens", "copy_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BACK_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_MS_FIELD_NUMBER: _ClassVar[int]
    CROWDING_MS_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    COPIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPY_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    trust: str
    device_tokens: int
    host_tokens: int
    counted_tokens: int
    in_flight: int
    wait_ms: float
    prefill_ms: float
    load_back_ms: float
    adapter_load_ms: float
    recompute_ms: float
    eviction_ms: float
    crowding_ms: float
    affinity_ms: float
    total_ms: float
    copied_tokens: int
    copy_ms: float
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., trust: _Optional[str] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., counted_tokens: _Optional[int] = ..., in_flight: _Optional[int] = ..., wait_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., load_back_ms: _Optional[float] = ..., adapter_load_ms: _Optional[float] = ..., recompute_ms: _Optional[float] = ..., eviction_ms: _Optional[float] = ..., crowding_ms: _Optional[float] = ..., affinity_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., copied_tokens: _Optional[int] = ..., copy_ms: _Optional[float] = ...) -> None: ...

class ExcludedWorker(_message.Message):
    __slots__ = ("worker_id", "address", "why")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    why: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class AddWorkerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class AddWorkerResponse(_message.Message):
    __slots__ = ("added", "problem")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    added: bool
    problem: str
    def __init__(self, added: _Optional[bool] = ..., problem: _Optional[str] = ...) -> None: ...

class RemoveWorkerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class RemoveWorkerResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: _Optional[bool] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("address", "grace_ms", "undo", "hand_over_ms")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_MS_FIELD_NUMBER: _ClassVar[int]
    address: str
    grace_ms: int
    undo: bool
    hand_over_ms: int
    def __init__(self, address: _Optional[str] = ..., grace_ms: _Optional[int] = ..., undo: _Optional[bool] = ..., hand_over_ms: _Optional[int] = ...) -> None: ...

class FlushWorkerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...
