"""Frames between front and engine: they survive any split, and nothing but our own messages is taken."""

import asyncio
import pickle
import socket
import struct
import threading

import pytest

from prefixmesh.cache.ledger import Hits, LedgerRow, Misses
from prefixmesh.cache.public import PublicPrefix
from prefixmesh.errors import FrameError
from prefixmesh.ids import Fingerprint, Namespace
from prefixmesh.worker.framing import (
    MAX_FRAME_BYTES,
    FromEngine,
    Loading,
    StartFailed,
    decode_command,
    decode_from_engine,
    encode_frame,
    read_frame,
    receive_frame,
)
from prefixmesh.worker.messages import (
    Abort,
    CacheChange,
    CacheChanges,
    Command,
    Ended,
    Flush,
    GetStats,
    Shutdown,
    Stats,
    StepEvents,
    TokensOut,
)
from tests.support.scheduling import submit_command

COMMANDS: list[Command] = [
    submit_command("r", [1, 2, 3], owner="acme", priority=-2),
    submit_command("r", [1, 2, 3], public=[PublicPrefix(Namespace(b"p" * 16), 64, Fingerprint(2**64 - 1))]),
    Abort(request_id="r"),
    GetStats(),
    Flush(),
    Shutdown(),
]
FROM_ENGINE: list[FromEngine] = [
    Loading(doing="weights"),
    StartFailed(kind="config", problem="no"),
    StepEvents(
        events=[
            TokensOut(request_id="r", position=0, token_ids=(7, 8)),
            Ended(
                request_id="r",
                reason="stop",
                completion_tokens=2,
                prefill_ms=1.5,
                first_token_ms=2.5,
                decode_ms=3.5,
            ),
            CacheChanges(
                changes=[
                    CacheChange("cleared"),
                    CacheChange("stored", 1, 2**64 - 1, b"8 bytes!"),
                    CacheChange("removed", 0, None, b"8 bytes!"),
                ]
            ),
            Stats(
                running=1,
                queued=2,
                total_pages=3,
                free_pages=4,
                evictable_pages=5,
                protected_pages=6,
                prefill_tokens_per_s=7.5,
                decode_step_ms=8.5,
                cache=LedgerRow(2, 40, Hits(10, 5), Misses(11, 7, 4, 3)),
                double_releases=9,
                steps=10,
            ),
        ]
    ),
]


def test_every_message_comes_back_equal() -> None:
    for command in COMMANDS:
        assert decode_command(encode_frame(command)[4:]) == command
    for message in FROM_ENGINE:
        assert decode_from_engine(encode_frame(message)[4:]) == message


def test_frames_survive_any_split_of_the_bytes() -> None:
    """One byte at a time, by the blocking reader."""
    ours, theirs = socket.socketpair()
    data = b"".join(encode_frame(command) for command in COMMANDS)

    def trickle() -> None:
        for i in range(len(data)):
            theirs.sendall(data[i : i + 1])
        theirs.close()

    with ours:
        writer = threading.Thread(target=trickle)
        writer.start()
        received = [decode_command(receive_frame(ours) or b"") for _ in COMMANDS]
        assert received == COMMANDS
        assert receive_frame(ours) is None, "the end of the connection is the end"
        writer.join()


async def test_the_asyncio_reader_reads_the_same() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(encode_frame(message) for message in FROM_ENGINE))
    reader.feed_data(b"\x05\x00")  # died within a frame
    reader.feed_eof()
    received = [decode_from_engine(await read_frame(reader) or b"") for _ in FROM_ENGINE]
    assert received == FROM_ENGINE
    assert await read_frame(reader) is None


def test_a_frame_that_announces_too_much_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
        with pytest.raises(FrameError, match="announced"):
            receive_frame(ours)


def test_a_message_too_large_is_not_sent() -> None:
    with pytest.raises(FrameError, match="at most"):
        encode_frame(Loading(doing="x" * MAX_FRAME_BYTES))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", pickle.dumps(Abort), encode_frame(FROM_ENGINE[0])[4:]]
)
def test_what_is_no_command_is_refused(body: bytes) -> None:
    """F72: a pickle, an unknown message, rubbish."""
    with pytest.raises(FrameError):
        decode_command(body)
