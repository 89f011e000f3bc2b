from prefixmesh.proto.v1 import worker_control_pb2 as _worker_control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ticket(_message.Message):
    __slots__ = ("request_id", "tenant", "namespace", "incarnation", "adapter_digest", "router_id", "expires_unix_ms", "prompt_tokens", "max_tokens", "branches", "public_boundaries", "sources")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    namespace: bytes
    incarnation: int
    adapter_digest: str
    router_id: str
    expires_unix_ms: int
    prompt_tokens: int
    max_tokens: int
    branches: int
    public_boundaries: _containers.RepeatedCompositeFieldContainer[PublicBoundary]
    sources: _containers.RepeatedCompositeFieldContainer[_worker_control_pb2.KvSource]
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., namespace: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., adapter_digest: _Optional[str] = ..., router_id: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., branches: _Optional[int] = ..., public_boundaries: _Optional[_Iterable[_Union[PublicBoundary, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[_worker_control_pb2.KvSource, _Mapping]]] = ...) -> None: ...

class PublicBoundary(_message.Message):
    __slots__ = ("namespace", "boundary_tokens", "fingerprint")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    boundary_tokens: int
    fingerprint: int
    def __init__(self, namespace: _Optional[bytes] = ..., boundary_tokens: _Optional[int] = ..., fingerprint: _Optional[int] = ...) -> None: ...
