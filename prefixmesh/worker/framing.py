"""Frames between the gRPC front and the engine process: a 4-byte little-endian length, then one msgspec-msgpack message.

Never pickle: both ends decode into the structs of ``messages`` and nothing else. A frame above ``MAX_FRAME_BYTES`` is refused
by either end, so that neither can be made to reserve what the other only announces.
"""

import asyncio
import socket
import struct
from typing import Final, Literal

import msgspec

from prefixmesh.errors import FrameError
from prefixmesh.worker.messages import Command, EngineInfo, StepEvents

MAX_FRAME_BYTES: Final = 64 * 2**20
"""The largest message is a prompt of 4 bytes a token: room for 16 million tokens."""

_LENGTH: Final = struct.Struct("<I")


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to front, while it starts: what it is doing, for one log line."""

    doing: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to front, once: it takes commands now."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to front, instead of ``Ready``: why it cannot start. The engine's process ends after it."""

    kind: Literal["config", "model", "internal"]
    problem: str


FromEngine = Loading | Ready | StartFailed | StepEvents

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(
    Loading | Ready | StartFailed | StepEvents
)


def encode_frame(message: Command | FromEngine) -> bytes:
    """The message with its length in front. Raises FrameError when it is too large to be taken by the other end."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame has at most {MAX_FRAME_BYTES} bytes, this one {len(body)}")
    return _LENGTH.pack(len(body)) + body


def decode_command(body: bytes) -> Command:
    """What a front sent."""
    try:
        return _command_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a command: {error}") from error


def decode_from_engine(body: bytes) -> FromEngine:
    """What an engine sent."""
    try:
        return _from_engine_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a message of the engine: {error}") from error


def receive_frame(connection: socket.socket) -> bytes | None:
    """Read one frame's body, blocking; None when the other end is gone, also in the middle of a frame."""
    header = _receive_exactly(connection, _LENGTH.size)
    return None if header is None else _receive_exactly(connection, _checked_length(header))


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """``receive_frame`` for asyncio."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_checked_length(header))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _checked_length(header: bytes) -> int:
    size: int = _LENGTH.unpack(header)[0]
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a frame has at most {MAX_FRAME_BYTES} bytes, {size} announced")
    return size


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        try:
            piece = connection.recv(min(size - len(received), 2**20))
        except ConnectionError:
            return None
        if not piece:
            return None
        received += piece
    return bytes(received)
