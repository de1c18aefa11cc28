"""Client connections: strict parsing of heads, time limits for each part of a request, and a limit on their number.

At the limit, a new connection replaces the one that has sent nothing complete for the longest, else the one that has
not read for the longest. So slow clients block nobody; a new one is refused if all others wait for answers.
"""

from __future__ import annotations

import asyncio
import http
import ipaddress
import json
import re
import sys
from collections.abc import Callable
from typing import Any, Literal

import h11
from h11._readers import ChunkedReader
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import READ_S, is_loopback
from mlcpipe.server.sse import SLOW_READER_S

MOST = 4096  # connections
_LINGER_S = 2.0  # for a client to read a refusal, before the system drops it for later connections
_MOST_LINGERING = 32
ACCEPTED_AT_ONCE = 16
_TURNS = 4  # turns of the loop from accepting a connection until the replaced one is closed
_OWN_FILES = 128  # descriptors for other open files, and pictures that are fetched
_READ_BYTES = 16 << 10  # per read of a connection: a long one delays the others
_MOST_CHUNKS = 1 << 18  # per body, like its values
_NOT_STRICT = re.compile(rb"(?<!\r)\n|\r\n[ \t]")  # a line ended by LF alone, a folded line


def most_connections() -> int:
    """The most connections, not counting refused ones, for the process's file descriptors."""
    if sys.platform == "win32":
        return MOST
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    return max(8, min(MOST, soft - _OWN_FILES - _MOST_LINGERING - _TURNS * ACCEPTED_AT_ONCE))


def _network(host: str) -> str:
    """The address of another machine, for IPv6 its /64 network, which one client may own; "" for this machine, as its
    proxy speaks for many.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if is_loopback(host):
        return ""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else address
    return str(mapped or ipaddress.ip_network(f"{address}/64", strict=False))


def _check_lines(data: bytes) -> None:
    """Raises RemoteProtocolError for lines before the first empty one that do not end with CR LF, or are folded."""
    lines, mark, _ = data.partition(b"\r\n\r\n")
    if _NOT_STRICT.search(lines + mark):
        raise h11.RemoteProtocolError("a line does not end with CR LF, or is folded")


class _StrictChunks(ChunkedReader):
    """Refuses trailers as `_StrictReader` does heads, and bodies in too many chunks, as each takes time."""

    chunks = 0

    def __call__(self, buf: Any) -> Any:
        if self._reading_trailer:
            _check_lines(b"\r\n" + bytes(buf))  # after the line of the last chunk
        event = super().__call__(buf)
        self.chunks += isinstance(event, h11.Data) and event.chunk_start
        if self.chunks > _MOST_CHUNKS:
            raise h11.RemoteProtocolError(f"more than {_MOST_CHUNKS} chunks")
        return event


class _StrictReader(h11.Connection):
    """Refuses heads that proxies may read differently (RFC 9112, 2.2, 5.2, 6.1 and 7.1), against request smuggling."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            _check_lines(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names:
                if b"content-length" in names or event.http_version < b"1.1":
                    raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0")
                self._reader = _StrictChunks()
        return event


class Connection(H11Protocol):
    """One connection; at most `most` exist, and half as many from one address of another machine.

    `refused` is called for each refusal.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        most: int,
        refused: Callable[[ApiError], None],
        read_s: float = READ_S,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _StrictReader(h11.SERVER, config.h11_max_incomplete_event_size or 16 << 10)
        self._most, self._told, self._read_s = most, refused, read_s
        self._phase: Literal["idle", "head", "body", "answer"] = "answer"
        self.address = ""
        self.since = 0.0  # when the client began the incomplete part, or stopped reading
        self.lingers = False  # whether it was refused
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    @property
    def owes(self) -> bool:
        """Whether the client must send or read something now."""
        return (self._phase != "answer" or self.flow.write_paused) and not self.lingers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        others = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's selectors
        self.address = "" if self.client is None else _network(self.client[0])
        if self._find_place(others):
            self._watch()
        elif sum(one.lingers for one in others) < _MOST_LINGERING:
            self._refuse(ApiError(503, "there are too many connections", code="overloaded", retry_after_s=1.0))
        else:
            transport.abort()

    def _find_place(self, others: list[Connection]) -> bool:
        """Whether there is room, if necessary by closing the slowest client's connection."""
        others = [one for one in others if not one.lingers]
        same = [one for one in others if one.address == self.address != ""]
        full = same if len(same) >= self._most // 2 else others
        if full is others and len(others) < self._most:
            return True
        # A client that does not read may just be slow: first close those that send nothing.
        owing = ((one._phase == "answer", one.since, one) for one in full if one.owes)
        *_, oldest = min(owing, key=lambda each: each[:2], default=(None,))
        if oldest is not None:
            oldest.transport.abort()
        return oldest is not None

    def data_received(self, data: bytes) -> None:
        if not self.lingers:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        if self.transport.is_closing():  # after sending everything
            self._set_stuck()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._late, self._stuck):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._phase == "answer":
            self.since = self.loop.time()
        self._set_stuck()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None and not self.transport.is_closing():
            self._stuck.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request; an answer that has begun is cut off."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._refuse(ApiError(400, "the request is no HTTP/1.1, or not strictly", code="invalid_request"))
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        """The server shuts down: it accepts no request whose body is incomplete."""
        if self._phase == "body" and not self.lingers and not self.cycle.response_started:
            self._refuse(ApiError(503, "the server ends", code="cancelled", retry_after_s=5.0))
            self.transport.close()
        else:
            super().shutdown()

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, and close once the client has."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.lingers = True
        self._told(error)
        content = json.dumps(error.body("")).encode()
        headers = {"content-type": "application/json", "content-length": len(content), "connection": "close"}
        lines = [f"{name}: {value}" for name, value in {**headers, **error.headers}.items()]
        lines.insert(0, f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}")
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_late(_LINGER_S)

    def _watch(self) -> None:
        """Watch for the part that the client must send now."""
        if self.lingers or self.transport.is_closing():
            return
        state, before = self.conn.their_state, self._phase
        if state is h11.SEND_BODY:
            self._phase = "body"
        elif state is h11.IDLE:
            self._phase = "head" if self.cycle is None or self.conn.trailing_data[0] else "idle"
        else:
            self._phase = "answer"
        if self._phase == before:
            return
        if self._phase != "body":
            self.since = self.loop.time()
        times = {"head": self._read_s, "body": self._read_s, "idle": float(self.timeout_keep_alive)}
        self._set_late(times.get(self._phase))

    def _set_late(self, seconds: float | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = None if seconds is None else self.loop.call_later(seconds, self._end_late)

    def _end_late(self) -> None:
        """The client has not sent in time. For an expected body, the guard reports it."""
        if self._phase != "body" or self.lingers or self.cycle.response_complete:
            self.transport.abort()

    def _set_stuck(self) -> None:
        """Start the client's time limit for reading."""
        if self._stuck is not None:
            self._stuck.cancel()
        self._stuck = self.loop.call_later(SLOW_READER_S, self.transport.abort)
