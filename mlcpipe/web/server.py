"""Serves a site to this computer's browser, with ranges, content types and headers like a good static host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from mlcpipe.errors import UsageError
from mlcpipe.web.site import Site

HOST = "127.0.0.1"
DEFAULT_PORT = 8157
"""Fixed, because a browser stores conversations and models by address."""
MAX_CONNECTIONS = 64
"""A browser opens at most six to one address; a connection has a thread."""
_CHUNK = 1 << 20
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
}
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


class SiteServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1 and answers only GET and HEAD for the files of a site.

    Args:
        site: files to serve, read on request.
        port: 0 chooses any free port.
        handler: handles connections; tests pass one that fails.

    Raises:
        UsageError: the port is taken or not allowed.
    """

    daemon_threads = True
    # Sockets of an earlier run may linger on the port; a live server still blocks it.
    allow_reuse_address = os.name == "posix"

    def __init__(
        self, site: Site, port: int = DEFAULT_PORT, *, handler: type[BaseHTTPRequestHandler] | None = None
    ) -> None:
        self.site = site
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((HOST, port), handler or SiteHandler)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {HOST}:{port}",
                found=error.strerror,
                next_step="stop the other program or choose a port with --port (conversations are stored per port)",
            ) from None

    @property
    def url(self) -> str:
        """The address for the browser."""
        return f"http://{HOST}:{self.server_port}/"

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Answer in a thread; close a connection beyond `MAX_CONNECTIONS`."""
        if not self._free.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread
            self._free.release()
            raise

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Free the slot when the connection ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Does nothing: browsers often drop connections, and file errors become responses."""


class SiteHandler(BaseHTTPRequestHandler):
    """Answers one connection of a `SiteServer`."""

    timeout = 60.0  # seconds that a connection may be idle or a browser not read; it opens another
    protocol_version = "HTTP/1.1"
    server_version = "mlcpipe"
    sys_version = ""
    server: SiteServer

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing, to keep the terminal clean."""

    def _answer(self, *, body: bool) -> None:
        # A foreign page may point its host name here (DNS rebinding), but it cannot forge this header.
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in (HOST, "localhost"):
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/") or "index.html"
        content = self.server.site.files.get(path)
        if content is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        try:
            with _open(content) as (file, size, tag):
                self._send(path, file, size, tag, body=body)
        except OSError:
            # The file or the connection is gone.
            self.close_connection = True

    def _send(self, path: str, file: BinaryIO, size: int, tag: str, *, body: bool) -> None:
        if self.headers.get("If-None-Match") == tag:
            return self._head(HTTPStatus.NOT_MODIFIED, path, tag, {})
        span = parse_range(self.headers.get("Range"), size)
        if self.headers.get("If-Range") not in (None, tag):
            span = None
        if span == "unsatisfiable":
            headers = {"Content-Range": f"bytes */{size}", "Content-Length": "0"}
            return self._head(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, path, tag, headers)
        first, last = (0, size - 1) if span is None or isinstance(span, str) else span
        headers = {"Content-Length": str(last - first + 1)}
        if span is not None:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._head(HTTPStatus.OK if span is None else HTTPStatus.PARTIAL_CONTENT, path, tag, headers)
        if body:
            self.copy(file, first, last - first + 1)

    def _head(self, status: HTTPStatus, path: str, tag: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        kept = "public, max-age=31536000, immutable" if path.startswith("assets/") else "no-cache"
        fixed = {
            "Content-Type": _TYPES.get(Path(path).suffix, "application/octet-stream"),
            "Accept-Ranges": "bytes",
            "Cache-Control": kept,
            "ETag": tag,
        }
        for name, value in (_HEADERS | fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        text = f"{status.value} {status.phrase}\n".encode()
        self.send_response(status)
        for name, value in (_HEADERS | {"Content-Type": "text/plain", "Content-Length": str(len(text))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def copy(self, file: BinaryIO, first: int, count: int) -> None:
        """Write `count` bytes starting at `first`."""
        file.seek(first)
        while count > 0:
            data = file.read(min(_CHUNK, count))
            if not data:  # the file shrank: the browser must see a broken response, not a short one
                raise OSError("the file shrank")
            self.wfile.write(data)
            count -= len(data)

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The Date header (RFC 9110)."""
        return formatdate(timestamp, usegmt=True)


@contextlib.contextmanager
def _open(content: Path | bytes) -> Iterator[tuple[BinaryIO, int, str]]:
    """The file, its size in bytes, and an entity tag that changes with it."""
    if isinstance(content, bytes):
        yield BytesIO(content), len(content), f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        return
    with content.open("rb") as file:
        status = os.fstat(file.fileno())
        yield file, status.st_size, f'"{status.st_size:x}-{status.st_mtime_ns:x}"'


def parse_range(header: str | None, size: int) -> tuple[int, int] | str | None:
    """First and last byte of a `Range` header (RFC 9110, 14.2); None for the whole file.

    A header with another unit, several ranges, or bad syntax is ignored; a range outside a file of `size` bytes
    is "unsatisfiable".
    """
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", (header or "").strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        count = min(int(match[2]), size)
        return (size - count, size - 1) if count else "unsatisfiable"
    first, last = int(match[1]), min(int(match[2] or size), size - 1)
    if match[2] and int(match[2]) < first:
        return None
    return (first, last) if first < size else "unsatisfiable"
