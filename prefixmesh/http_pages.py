"""A very small HTTP server: a few fixed pages, for programs that read figures. Not for callers, and not for the open.

It answers GET and HEAD of the paths it was given, one request a connection, and only on loopback: it knows no credentials. It runs
in its owner's event loop, and everything a peer could make it hold is bounded.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from prefixmesh.errors import ConfigError
from prefixmesh.rpc.channel import join_address
from prefixmesh.rpc.identity import is_loopback

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 8192
"""Longest request, which has no body: what a browser sends with its cookies fits."""

REQUEST_WAIT_S: Final = 10.0
"""A peer that has not sent its request, or not taken its answer, after so long holds a place for nothing."""

MAX_CONNECTIONS: Final = 16
"""Peers served at once: a few scrapers and a person. One more is turned away."""

PLAIN_TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a page answers."""

    body: bytes
    content_type: str = PLAIN_TEXT
    status: HTTPStatus = HTTPStatus.OK


Page = Callable[[], Awaitable[Reply]]


class PageServer:
    """Serves ``pages`` (by path) from ``start`` to ``close``."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = dict(pages)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which is a free one for 0. Raises ConfigError where that is not possible, or not loopback."""
        if not is_loopback(host):
            raise ConfigError(f"pages without credentials are served on loopback only, not on {host}")
        listener = _bind(host, port)
        try:
            self._server = await asyncio.start_server(
                self._accept, sock=listener, limit=MAX_HEAD_BYTES, start_serving=False
            )
        except BaseException:
            listener.close()
            raise
        # Only now, when ``close`` knows of it: asyncio's own start keeps an open port where it is cancelled.
        await self._server.start_serving()
        bound: int = listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening and break what is open. May be called again, and without ``start``."""
        if self._server is not None:
            self._server.close()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_WAIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, reply = await self._answer(head)
                writer.write(_encode(reply, with_body=method != "HEAD"))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except asyncio.LimitOverrunError:
            writer.write(_encode(_problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)))
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            _log.debug("page.peer_gone")
        finally:
            writer.close()

    async def _answer(self, head: bytes) -> tuple[str, Reply]:
        """The method and the reply to a request's head."""
        request_line, *lines = head.decode("latin-1").split("\r\n")
        words = request_line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "", _problem(HTTPStatus.BAD_REQUEST)
        method, target, _ = words
        if not _is_meant_for_us(lines):
            return method, _problem(HTTPStatus.MISDIRECTED_REQUEST)
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return method, _problem(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return method, _problem(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            return method, await page()
        except Exception:  # a page's bug is that page's: its reader is told, and its owner goes on
            _log.exception("page.failed path=%s", target.partition("?")[0])
            return method, _problem(HTTPStatus.INTERNAL_SERVER_ERROR)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {reason}") from error


def _is_meant_for_us(header_lines: list[str]) -> bool:
    """Whether every Host header names loopback: a page in somebody's browser, whose name was made to lead here, names its own."""
    for line in header_lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "host":
            host = value.strip()
            with contextlib.suppress(ValueError):
                host = host[1 : host.index("]")] if host.startswith("[") else host[: host.rindex(":")]
            if not is_loopback(host):
                return False
    return True


def _problem(status: HTTPStatus) -> Reply:
    return Reply(f"{status.value} {status.phrase}\n".encode(), status=status)


def _encode(reply: Reply, *, with_body: bool = True) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if reply.status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode() + (reply.body if with_body else b"")
