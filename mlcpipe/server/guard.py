"""Access and limits: host and origin, API keys, concurrent requests, the size of a body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlcpipe.server.errors import ApiError
from mlcpipe.server.off_loop import LONG_BYTES

Scope = dict[str, Any]
OPEN_PATHS = ("/health", "/v1/health", "/ping")
_OF_V1 = ("audio", "chat", "completions", "conversations", "embeddings", "messages", "models", "rerank", "responses")
MAX_BODY_BYTES = 32 << 20
MAX_HELD_BYTES = 8 * MAX_BODY_BYTES  # of the bodies of all unanswered requests
READ_S = 30.0  # for a head to come, and for a body
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:/?#@]+))(?::[0-9]*)?")  # an address or name, and a port
_log = logging.getLogger("mlcpipe.server")


@dataclass(frozen=True)
class Rules:
    """Access and limits.

    keys             of the API, empty for public access
    host             that the server listens on, as its user wrote it
    more_hosts       other ones
    loopback         whether only programs of this machine reach it
    local            addresses that only programs of this machine reach, where others are reached from a network
    origins          of pages of other sites that may ask, where * stands for any characters
    tls              the certificate and its key in PEM, None for HTTP
    hosts            other names of the server: without a key it answers to no name that is unknown to it
    per_key          concurrent requests, None for any number
    shares_prompts   whether keys share computed and saved prompts
    adapter_folders  whose adapters clients may load, None for all folders
    logs_access      whether a line is written for each request
    """

    keys: Collection[str] = ()
    host: str = "127.0.0.1"
    loopback: bool = True
    more_hosts: Collection[str] = ()
    local: Collection[str] = ()
    per_key: int | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    shares_prompts: bool = False
    adapter_folders: Collection[Path] | None = None
    origins: Collection[str] = ()
    hosts: Collection[str] = ()
    tls: tuple[Path, Path] | None = None
    logs_access: bool = False

    @cached_property
    def origin_pattern(self) -> str:
        """A regular expression for whole origins that may ask."""
        origins = (
            re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", one.rstrip("/").lower()) for one in self.origins
        )
        return "|".join(re.escape(one).replace(r"\*", ".*") for one in origins)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the server; beyond loopback also those of its machine."""
        machine = socket.gethostname().lower()
        own = () if self.loopback else (machine, machine.partition(".")[0] + ".local")
        given = self.host, *self.more_hosts, *self.hosts
        return frozenset(("localhost", *own, *(name.lower() for name in given)))

    def is_local(self, address: str) -> bool:
        """Whether only programs of this machine reach the listener at the local `address` of a connection."""
        return self.loopback or address in self.local

    @cached_property
    def owners(self) -> dict[bytes, str]:
        """The namespace of prompts by the digest of each key; "" is shared by everybody."""
        digests = {_digest(key) for key in self.keys}
        walls = len(digests) > 1 and not self.shares_prompts
        return {digest: digest.hex()[:32] if walls else "" for digest in digests}


class Guard:
    """The outermost ASGI layer; it also turns uncaught exceptions into a response.

    `refused` is called for each refusal; `open_paths` need no key.
    """

    def __init__(
        self, app: Any, rules: Rules, refused: Callable[[ApiError], None], open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self.refused = refused
        self._rules = rules
        self._active: Counter[bytes] = Counter()
        self._held: dict[object, int] = {}  # bytes of long bodies, by request

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope, started = _as_meant(scope), False

        async def watched(message: dict[str, Any]) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._admit(scope, receive, watched)
        except ApiError as error:
            self.refused(error)
            if not started:
                await _respond(error, scope, send)
        except Exception:
            _log.exception("a request failed")
            if started:
                raise
            await _respond(ApiError(500, "the server failed; its log says why"), scope, send)

    async def _admit(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        origins = [value for name, value in scope["headers"] if name.lower() == b"origin"]
        self._check_host(headers, origins, self._rules.is_local((scope.get("server") or ("",))[0]))
        if scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        key = self._key(headers)
        owners = self._rules.owners
        same = [hmac.compare_digest(digest, key) for digest in owners]  # compare with every key, for constant time
        if same and not any(same):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        scope.setdefault("state", {}).update(owner=owners.get(key, ""), key=key.hex()[:32] if owners else "")
        per_key = self._rules.per_key
        if per_key is not None and scope["method"] == "POST" and self._active[key] >= per_key:
            message = f"{per_key} requests of this key are running already"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=1.0)
        self._active[key] += 1
        this = object()
        try:
            await self._app(scope, await self._whole_body(headers, receive, this), send)
        finally:
            self._held.pop(this, None)
            self._active[key] -= 1
            self._active += Counter()  # drops keys without requests

    def _check_host(self, headers: dict[bytes, bytes], origins: list[bytes], local: bool) -> None:
        """Refuse requests that a page of another site makes a browser send, if no key is required or the listener is
        for this machine only (`local`): foreign origins, and names that somebody else may have made to resolve to this
        address.
        """
        rules = self._rules
        if rules.keys and not local:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        parts = _HOST.fullmatch(host)
        name = (parts[1] or parts[2]).lower() if parts is not None else ""
        # Without a host is HTTP/1.0, which monitors speak and browsers do not.
        if b"host" in headers and name not in rules.names and not (is_loopback(name) if local else _is_address(name)):
            message = f"this server does not answer to the name {name[:100]!r}; serve --allow-host adds one"
            raise ApiError(421, message, code="wrong_host")
        for origin in (one.decode("latin-1") for one in origins):
            if (not host or origin.partition("://")[2] != host) and not (
                rules.origins and re.fullmatch(rules.origin_pattern, origin)
            ):
                raise ApiError(
                    403, "pages of other sites may not ask; serve --allow-origin admits one", code="wrong_origin"
                )

    def _key(self, headers: dict[bytes, bytes]) -> bytes:
        given = headers.get(b"x-api-key") or headers.get(b"api-key", b"")  # Anthropic's clients, those of Azure
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip()
        return hashlib.sha256(given).digest()

    async def _whole_body(self, headers: dict[bytes, bytes], receive: Any, this: object) -> Any:
        """A `receive` with the whole body. Raises ApiError for one that is too large, too slow or cut off."""
        most = self._rules.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > most:
            raise _too_large(most)
        try:
            body = await asyncio.wait_for(self._body(receive, this), READ_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not come within {READ_S:.0f} s") from None
        if body is None:
            raise ApiError(499, "the client left before the end of its body")
        messages = [{"type": "http.request", "body": body}]

        async def again() -> Any:
            return messages.pop() if messages else await receive()

        return again

    async def _body(self, receive: Any, this: object) -> bytes | None:
        """The whole body; None if the client left before its end."""
        parts, size, most = [], 0, self._rules.max_body_bytes
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise _too_large(most)
            if size > LONG_BYTES:
                self._held[this] = size
                if sum(self._held.values()) > MAX_HELD_BYTES:
                    raise ApiError(503, "there are too many long bodies", code="overloaded", retry_after_s=1.0)
            if not message.get("more_body", False):
                return b"".join(parts)


def _as_meant(scope: Scope) -> Scope:
    """With /v1 where a client's base URL lacks it, without double slashes, and HEAD as GET: uvicorn drops the body."""
    path = re.sub("/{2,}", "/", scope["path"])
    if path.split("/")[1] in _OF_V1:
        path = f"/v1{path}"
    return {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}


def namespace_of(owner: str, salt: str = "") -> str:
    """The namespace of prompts for a key's requests with this salt; "" for shared ones without salt."""
    whole = f"{owner}:{salt}" if owner or salt else ""
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest() if whole else ""


def is_loopback(address: str) -> bool:
    """Whether this is a loopback IP address; names are not."""
    if not _is_address(address):
        return False
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is too large; expected at most {most} bytes", code="request_too_large")


async def _respond(error: ApiError, scope: Scope, send: Any) -> None:
    content = json.dumps(error.body(scope["path"])).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **error.headers}
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
