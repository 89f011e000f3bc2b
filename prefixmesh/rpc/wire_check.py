"""What must be known of a message before it is parsed, or after it could not be: two walks over the wire format, along the message's
descriptor (protobuf encoding guide).

The protobuf runtime refuses a string that is not UTF-8 without saying which; ``find_invalid_utf8`` finds its name. And parsing
turns the two bytes of an empty entry into some eighty of memory, so that one message of 64 MB can take gigabytes, and seconds
in which nobody else is served; ``find_crowded`` finds such a message first.
"""

from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

MAX_FIELDS: Final = 20_000
"""Most fields and list entries of one message, at every depth together: a chat of 4,096 messages has 12,288. Looking at so many takes
some 20 ms."""

SMALL_BYTES: Final = 256 * 1024
"""Messages up to this size are never crowded: whatever is in them, parsed they take 20 MB at most."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH: Final = 32
"""Deeper nesting than any message of ours; the walk is recursive."""


def find_invalid_utf8(descriptor: Descriptor, data: bytes) -> str | None:
    """Dotted path of the first string field in ``data`` that is not UTF-8.

    None when there is none, the bytes are no message, or it lies beyond the first ``MAX_FIELDS`` fields.
    """
    return _Utf8Walk().find(descriptor, memoryview(data), "", 0)


def find_crowded(descriptor: Descriptor, data: bytes) -> str | None:
    """Dotted path of the field at which ``data`` has more than ``MAX_FIELDS`` fields and list entries; "" where it is one that the
    message does not have, None when there are not so many. O(fields up to that one), whatever the size of their contents."""
    if len(data) <= SMALL_BYTES:
        return None
    return _CrowdWalk().find(descriptor, memoryview(data), "", 0)


class _CrowdWalk:
    """One walk over a message; counts its fields and list entries."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def find(self, descriptor: Descriptor, data: memoryview, prefix: str, depth: int) -> str | None:
        offset = 0
        while offset < len(data):
            tag, offset = _varint(data, offset)
            wire_type = tag & 7
            if wire_type > _FIXED32:
                return None  # no message: parsing stops here, too
            field = descriptor.fields_by_number.get(tag >> 3)
            self._left -= 1
            # Groups are walked as if their fields stood outside: nothing of ours has any, and they must be counted, too.
            if wire_type == _VARINT:
                _, offset = _varint(data, offset)
            elif wire_type in (_FIXED64, _FIXED32):
                offset += 8 if wire_type == _FIXED64 else 4
            elif wire_type == _LENGTH:
                size, offset = _varint(data, offset)
                piece, offset = data[offset : offset + size], offset + size
                found = self._count_piece(field, piece, prefix, depth)
                if found is not None:
                    return found
            if self._left < 0:
                return prefix + field.name if field is not None else ""
        return None

    def _count_piece(
        self, field: FieldDescriptor | None, piece: memoryview, prefix: str, depth: int
    ) -> str | None:
        if field is None:
            return None
        if field.message_type is not None and depth < _MAX_DEPTH:
            return self.find(field.message_type, piece, f"{prefix}{field.name}.", depth + 1)
        if field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            self._left -= len(piece)  # a packed list: an entry has at least a byte
        return None


class _Utf8Walk:
    """One walk over a message; counts the fields it looked at."""

    def __init__(self) -> None:
        self._fields_left = MAX_FIELDS

    def find(self, descriptor: Descriptor, data: memoryview, prefix: str, depth: int) -> str | None:
        offset = 0
        while offset < len(data) and depth < _MAX_DEPTH and self._fields_left:
            self._fields_left -= 1
            tag, offset = _varint(data, offset)
            number, wire_type = tag >> 3, tag & 7
            if wire_type == _VARINT:
                _, offset = _varint(data, offset)
            elif wire_type in (_FIXED64, _FIXED32):
                offset += 8 if wire_type == _FIXED64 else 4
            elif wire_type == _LENGTH:
                size, offset = _varint(data, offset)
                piece, offset = data[offset : offset + size], offset + size
                found = self._check_piece(descriptor.fields_by_number.get(number), piece, prefix, depth)
                if found is not None:
                    return found
            else:
                return None
        return None

    def _check_piece(
        self, field: FieldDescriptor | None, piece: memoryview, prefix: str, depth: int
    ) -> str | None:
        if field is None:
            return None
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                str(piece, "utf-8")
            except UnicodeDecodeError:
                return prefix + field.name
        elif field.message_type is not None:
            return self.find(field.message_type, piece, f"{prefix}{field.name}.", depth + 1)
        return None


def _varint(data: memoryview, offset: int) -> tuple[int, int]:
    """Value and next offset; past the end it reads zeros, which ends the walk."""
    value = shift = 0
    while offset < len(data) and shift < 70:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        offset = len(data) + 1
    return value, offset
