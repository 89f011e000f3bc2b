"""The page server by itself: what a rude peer can make it hold, and that a page's own bug stays in the page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prefixmesh import http_pages
from prefixmesh.errors import ConfigError
from prefixmesh.http_pages import MAX_CONNECTIONS, MAX_HEAD_BYTES, PageServer, Reply


async def hello() -> Reply:
    return Reply(b"hello\n")


async def broken() -> Reply:
    raise KeyError("secret detail")


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    server = PageServer({"/hello": hello, "/broken": broken})
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.close()


async def ask(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_a_head_request_gets_the_head_alone() -> None:
    async with serving() as port:
        get = await ask(port, b"GET /hello HTTP/1.1\r\nHost: [::1]:80\r\n\r\n")
        head = await ask(port, b"HEAD /hello HTTP/1.0\r\n\r\n")
    assert get == head + b"hello\n"
    assert b"Content-Length: 6" in head


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET /hello\r\n\r\n", 400),
        (b"GET /hello HTTP/2.0\r\n\r\n", 400),
        (b"\xff\xfe \x00 \x16\x03\x01\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /hello HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /hello HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_no_request_of_ours_is_refused(sent: bytes, status: int) -> None:
    async with serving() as port:
        assert status_of(await ask(port, sent)) == status
        assert status_of(await ask(port, b"GET /hello HTTP/1.1\r\n\r\n")) == 200


async def test_a_broken_page_tells_no_details_and_the_next_is_served() -> None:
    async with serving() as port:
        answer = await ask(port, b"GET /broken HTTP/1.1\r\n\r\n")
        assert status_of(answer) == 500
        assert b"secret" not in answer
        assert status_of(await ask(port, b"GET /hello HTTP/1.1\r\n\r\n")) == 200


async def test_peers_that_say_nothing_hold_a_bounded_number_of_places_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One more is turned away at once; when their time is over, others are served."""
    monkeypatch.setattr(http_pages, "REQUEST_WAIT_S", 0.3)
    async with serving() as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        assert await ask(port, b"GET /hello HTTP/1.1\r\n\r\n") == b""
        for reader, writer in silent:
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
        assert status_of(await ask(port, b"GET /hello HTTP/1.1\r\n\r\n")) == 200


async def test_a_close_breaks_what_is_open_and_may_be_called_again() -> None:
    server = PageServer({"/hello": hello})
    await server.close()
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await server.close()
        assert await reader.read() == b""
        await server.close()
    writer.close()
    with pytest.raises(OSError, match=str(port)):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
async def test_it_listens_on_loopback_only(host: str) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        await PageServer({}).start(host, 0)
