from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Ticket(_message.Message):
    __slots__ = ("request_id", "tenant", "namespace", "incarnation", "adapter_digest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    namespace: bytes
    incarnation: int
    adapter_digest: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., namespace: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., adapter_digest: _Optional[str] = ...) -> None: ...
