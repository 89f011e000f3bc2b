from prefixmesh.proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("worker_id", "incarnation", "model", "model_revision", "context_length", "page_size", "prefix_cache", "max_total_tokens", "max_running_requests", "protocol_version", "fingerprint_version", "rates", "pool", "running_requests", "queued_requests", "tokenizer_digest", "cache", "adapters")
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
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., context_length: _Optional[int] = ..., page_size: _Optional[int] = ..., prefix_cache: _Optional[str] = ..., max_total_tokens: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., protocol_version: _Optional[int] = ..., fingerprint_version: _Optional[int] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., pool: _Optional[_Union[PoolState, _Mapping]] = ..., running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., cache: _Optional[_Union[CacheCounts, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("prefill_tokens_per_s", "decode_step_ms")
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens_per_s: float
    decode_step_ms: float
    def __init__(self, prefill_tokens_per_s: _Optional[float] = ..., decode_step_ms: _Optional[float] = ...) -> None: ...

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
