"""Finds which field made a message unreadable, so that the caller is told its name and not just "malformed".

The protobuf runtime refuses a string that is not UTF-8 without saying which. This walks the wire format along the message's
descriptor (protobuf encoding guide) and is only run on messages that were refused already.
"""

from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH: Final = 32
"""Deeper nesting than any message of ours; the walk is recursive."""

_MAX_FIELDS: Final = 20_000
"""Fields looked at before giving up (about 20 ms): a message of 64 MB may hold millions, and its sender can do without the name."""


def find_invalid_utf8(descriptor: Descriptor, data: bytes) -> str | None:
    """Dotted path of the first string field in ``data`` that is not UTF-8.

    None when there is none, the bytes are no message, or it lies beyond the first ``_MAX_FIELDS`` fields.
    """
    return _Walk().find(descriptor, memoryview(data), "", 0)


class _Walk:
    """One walk over a message; counts the fields it looked at."""

    def __init__(self) -> None:
        self._fields_left = _MAX_FIELDS

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
