"""Pictures and videos of http(s) URLs, for a server that may fetch them: from public addresses alone, and bounded.

A request names an address inside the server's network at will: a host is resolved once, all its addresses are checked,
and the connection is made to one of those that were checked, so that no later answer of a name server counts. Redirects
are followed likewise. Proxies of the environment are not used, and nothing but the picture is sent on to the client.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin
from weakref import WeakKeyDictionary

from mlcpipe.server.errors import ApiError
from mlcpipe.server.message_content import (
    SCHEMES,
    PlacedMessage,
    detail_of,
    is_picture,
    picture,
    pictures_in,
    place_of,
    places_of,
    url_of,
)

if TYPE_CHECKING:
    import ssl

    import httpx2

MAX_URL_CHARS = 8192
MAX_BYTES = 32 << 20  # of all pictures of a request
MAX_URLS = 16  # of a request
MAX_REDIRECTS = 3
DEADLINE_S = 30.0  # for all pictures of a request
CONNECT_S = 5.0  # of them, for each address of a host
AT_ONCE = 64  # requests whose pictures are fetched or decoded, whatever their models are
HELD_BYTES = 128 << 20  # of their pictures together, in addition to
OWN_BYTES = 2 << 20  # of each request, which wait for no other one
_MAX_ADDRESSES = 4  # of a host that are tried
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REDIRECTS = (301, 302, 303, 307, 308)
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Take = Callable[[int], Awaitable[None]]  # so many more bytes
# Of their own, so that names that resolve slowly, whose threads outlive their requests, hold up nothing else.
_RESOLVERS = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="mlcpipe-resolve")


class HeldBytes:
    """The bytes of pictures that all requests of a server hold.

    A request that needs more than its own part waits for room, unless it is the oldest one: so one always gets on, and
    slow servers of large pictures delay none with small ones.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # of requests in their order
        self._numbers = itertools.count()
        self._left = asyncio.Event()  # set, and replaced, when a request leaves

    def enter(self) -> int:
        """The number of another request. Raises ApiError where there are too many."""
        if len(self._held) >= AT_ONCE:
            raise ApiError(503, f"{AT_ONCE} requests have pictures fetched", code="overloaded", retry_after_s=10.0)
        number = next(self._numbers)
        self._held[number] = 0
        return number

    def leave(self, number: int) -> None:
        """The bytes of a request are gone."""
        del self._held[number]
        self._left.set()
        self._left = asyncio.Event()

    async def take(self, number: int, nbytes: int) -> None:
        """Wait until a request may hold so many more bytes."""
        while not self._fits(number, self._held[number] + nbytes):
            await self._left.wait()
        self._held[number] += nbytes

    def _fits(self, number: int, nbytes: int) -> bool:
        if nbytes <= OWN_BYTES or number == next(iter(self._held)):
            return True
        held = {**self._held, number: nbytes}
        return sum(max(0, one - OWN_BYTES) for one in held.values()) <= HELD_BYTES


_HELD: WeakKeyDictionary[asyncio.AbstractEventLoop, HeldBytes] = WeakKeyDictionary()  # of each server


def held_bytes() -> HeldBytes:
    """Those of the running event loop."""
    return _HELD.setdefault(asyncio.get_running_loop(), HeldBytes())


async def resolved(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system finds them. Raises OSError."""
    loop, kind = asyncio.get_running_loop(), socket.SOCK_STREAM
    found = await loop.run_in_executor(_RESOLVERS, lambda: socket.getaddrinfo(host, port, type=kind))
    return [*dict.fromkeys(str(each[4][0]) for each in found)]


def is_public(address: str) -> bool:
    """Whether an address, and the IPv4 address inside it, is one of the public Internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return is_public(str(inner))
        if ip.is_site_local:  # which `is_global` takes for public
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


class RemotePictures:
    """Fetches the pictures of requests. `resolve` gives the addresses of a host and a port, `allows` checks each."""

    def __init__(self, resolve: Resolve = resolved, allows: Callable[[str], bool] = is_public) -> None:
        self._resolve, self._allows = resolve, allows
        self._tls: asyncio.Future[ssl.SSLContext] | None = None

    @asynccontextmanager
    async def fetched(self, messages: Sequence[Mapping[str, Any]]) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        """The messages, with the bytes of pictures that URLs name, which are held inside. Raises ApiError for pictures
        that cannot be had.
        """
        wanted = [(where, url) for where, part in pictures_in(messages) if _is_remote(url := url_of(part))]
        if not wanted:
            yield messages
            return
        if len({url for _, url in wanted}) > MAX_URLS:
            raise _refusal(wanted[-1][0], f"expected at most {MAX_URLS} pictures of other servers in a request")
        held = held_bytes()
        number = held.enter()
        try:
            try:
                found = await asyncio.wait_for(self._all(wanted, partial(held.take, number)), DEADLINE_S)
            except asyncio.TimeoutError:
                raise _refusal(wanted[0][0], f"the pictures did not come within {DEADLINE_S:.0f} s") from None
            yield [_with_bytes(index, message, found) for index, message in enumerate(messages)]
        finally:
            held.leave(number)

    async def _all(self, wanted: Sequence[tuple[str, str]], take: Take) -> dict[str, bytes]:
        import httpx2

        if self._tls is None:
            self._tls = asyncio.ensure_future(asyncio.to_thread(httpx2.create_ssl_context))
        found: dict[str, bytes] = {}
        timeout = httpx2.Timeout(DEADLINE_S, connect=CONNECT_S)
        tls = await asyncio.shield(self._tls)  # another request may wait for it too
        async with httpx2.AsyncClient(verify=tls, trust_env=False, timeout=timeout) as client:
            for where, url in wanted:
                if url not in found:
                    left = MAX_BYTES - sum(map(len, found.values()))
                    found[url] = await self._one(client, url, where, left, take)
        return found

    async def _one(self, client: httpx2.AsyncClient, url: str, where: str, most: int, take: Take) -> bytes:
        """The bytes of one picture, at most `most`. Raises ApiError."""
        import httpx2

        for _ in range(MAX_REDIRECTS + 1):
            try:
                parsed = httpx2.URL(url)
                host, port = parsed.raw_host.decode("ascii"), parsed.port or {"http": 80, "https": 443}[parsed.scheme]
            except (httpx2.InvalidURL, KeyError, ValueError):
                raise _refusal(where, f"expected a URL of http or https, found {url[:60]!r}") from None
            if not host or parsed.userinfo or len(url) > MAX_URL_CHARS or port > 65535:
                message = f"expected a URL of at most {MAX_URL_CHARS} characters with a host, without a password"
                raise _refusal(where, message)
            reply = await self._reply(client, parsed, await self._addresses(host, port, where), where, most, take)
            if isinstance(reply, bytes):
                return reply
            try:
                url = urljoin(url, reply)
            except ValueError:
                raise _refusal(where, f"expected a redirect to a URL, found {reply[:60]!r}") from None
        raise _refusal(where, f"expected at most {MAX_REDIRECTS} redirects")

    async def _addresses(self, host: str, port: int, where: str) -> Sequence[str]:
        """All addresses of a host. Raises ApiError, which does not tell names of the server's network from others."""
        try:
            found = await self._resolve(host, port)
        except (OSError, UnicodeError):
            found = ()
        if not found or not all(map(self._allows, found)):
            raise _refusal(where, f"the host {host[:100]!r} has no public address; send the picture as a data: URL")
        return found[:_MAX_ADDRESSES]

    async def _reply(
        self, client: httpx2.AsyncClient, url: httpx2.URL, addresses: Sequence[str], where: str, most: int, take: Take
    ) -> bytes | str:
        """The picture, or where it has moved. Raises ApiError."""
        import httpx2

        headers = {"host": url.netloc.decode("ascii"), "accept": "image/*, video/*", "accept-encoding": "identity"}
        host = {"sni_hostname": url.raw_host.decode("ascii")}
        for address in addresses:
            try:
                there = url.copy_with(host=address, fragment=None)
                async with client.stream("GET", there, headers=headers, extensions=host) as response:
                    if response.status_code in _REDIRECTS:
                        return response.headers.get("location", "")
                    if response.status_code != 200:
                        raise _refusal(where, f"its server answers with status {response.status_code}")
                    return await _read(response, where, most, take)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
            except httpx2.HTTPError as error:
                raise _refusal(where, f"its server fails: {type(error).__name__}") from None
        raise _refusal(where, "its server cannot be reached")


async def _read(response: httpx2.Response, where: str, most: int, take: Take) -> bytes:
    """The body, whose length is checked while it comes; the server waits for room. Raises ApiError."""
    data = bytearray()
    async for part in response.aiter_raw():
        await take(len(part))
        data += part
        if len(data) > most:
            raise _refusal(where, f"expected at most {MAX_BYTES >> 20} MiB of pictures of other servers in a request")
    return bytes(data)


def _is_remote(url: Any) -> bool:
    return isinstance(url, str) and url.lower().startswith(SCHEMES)


def _with_bytes(index: int, message: Mapping[str, Any], found: Mapping[str, bytes]) -> Mapping[str, Any]:
    """The message at `index`, with bytes where its pictures had one of these URLs."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_picture, content)):
        return message

    where, place = places_of(message, index)

    def filled(at: int, part: Any) -> Any:
        if not (is_picture(part) and _is_remote(url := url_of(part))):
            return part
        where_it_is = place_of(part, f"{place}[{at}].{part['type']}")
        return picture(found[url], detail_of(part), where=where_it_is, kind=part["type"])

    full = {**message, "content": [filled(at, part) for at, part in enumerate(content)]}
    return PlacedMessage(full, where, place)


def _refusal(where: str, words: str) -> ApiError:
    return ApiError(400, f"{where}: {words}", param=where, code="picture_not_fetched")
