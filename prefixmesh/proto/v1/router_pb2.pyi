from prefixmesh.proto.v1 import worker_control_pb2 as _worker_control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("worker_id", "address", "ready", "problem", "in_flight", "work_ms", "blocks", "routed", "prompt_tokens", "cached_tokens", "cache", "adapters")
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
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., ready: _Optional[bool] = ..., problem: _Optional[str] = ..., in_flight: _Optional[int] = ..., work_ms: _Optional[float] = ..., blocks: _Optional[int] = ..., routed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., cache: _Optional[_Union[_worker_control_pb2.CacheCounts, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...
