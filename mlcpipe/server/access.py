"""A name for each request, in its response and in errors; and a line in JSON for each, without what it says."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from mlcpipe.server.errors import ANTHROPIC_PATH, request_id

_GIVEN = re.compile(rb"[\w.:-]{1,128}", re.ASCII)
_MOST_PATH = 200  # characters of a line
LEFT = 499  # status of a request whose client left before the response began, as nginx


class Access:
    """The outermost ASGI layer. A client's `X-Request-Id` is taken if it has 1 to 128 letters, digits and `._:-`.

    `log` takes a line for each response that has ended; paths come without their query.
    """

    def __init__(self, app: Any, log: Callable[[str], None] | None = None) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name.lower() == b"x-request-id"]
        name = given[0] if len(given) == 1 and _GIVEN.fullmatch(given[0]) else b"req_" + secrets.token_hex(12).encode()
        status, size, began = LEFT, 0, time.monotonic()
        headers = [(b"x-request-id", name)]
        if scope["path"].startswith(ANTHROPIC_PATH):
            headers.append((b"request-id", name))

        async def named(message: dict[str, Any]) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            size += len(message.get("body", b""))
            await send(message)

        reset = request_id.set(name.decode())
        try:
            await self._app(scope, receive, named)
        finally:
            request_id.reset(reset)
            if self._log is not None:
                self._log(_line(scope, name.decode(), status, size, time.monotonic() - began))


def _line(scope: Any, name: str, status: int, nbytes: int, seconds: float) -> str:
    return json.dumps(
        {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "request_id": name,
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": scope["path"][:_MOST_PATH],
            "status": status,
            "bytes": nbytes,
            "seconds": round(seconds, 6),
        }
    )
