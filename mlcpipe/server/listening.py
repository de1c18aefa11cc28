"""Where a server listens: addresses of networks, and sockets in the file system."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.errors import UsageError
from mlcpipe.server.guard import is_loopback

MAX_HOSTS = 16
_UNIX = ".sock"  # ends a host that is a path, as for llama-server


@dataclass(frozen=True)
class Listener:
    """A socket that listens on `host`, as its user wrote it: a name or address, or the path of a Unix socket."""

    host: str
    socket: socket.socket

    @property
    def path(self) -> str | None:
        """The path of a Unix socket, None for an address."""
        return self.host if self.host.endswith(_UNIX) else None

    @property
    def address(self) -> str:
        """The local address of its connections; of a wildcard they have others."""
        return self.path or str(self.socket.getsockname()[0])

    @property
    def local(self) -> bool:
        """Whether only programs of this machine reach it."""
        return self.path is not None or is_loopback(self.address)

    def url(self, scheme: str) -> str:
        """Where clients find it; of a Unix socket its path."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.socket.getsockname()[1]}"

    def curl(self, scheme: str) -> str:
        """The first words of a request to it, up to its path."""
        if self.path is not None:
            return f"curl --unix-socket {self.path} {scheme}://localhost"
        return f"curl {self.url(scheme)}"


@contextlib.contextmanager
def listening(hosts: Sequence[str], port: int) -> Iterator[list[Listener]]:
    """Listen on all hosts at one port, any free one for 0. Raises UsageError.

    With several hosts, an IPv6 address takes IPv6 alone, so that 0.0.0.0 and :: go together. Files of Unix sockets are
    removed at the end.
    """
    if len(hosts) > MAX_HOSTS or len({*hosts}) < len(hosts):
        raise UsageError("--host", expected=f"at most {MAX_HOSTS}, each once", found=", ".join(hosts)[:200])
    with contextlib.ExitStack() as stack:
        made: list[Listener] = []
        for host in hosts:
            if host.endswith(_UNIX):
                one = stack.enter_context(_unix_socket(Path(host)))
            else:
                one = stack.enter_context(bound_socket(host, port, alone=len(hosts) > 1))
                port = port or one.getsockname()[1]
            made.append(Listener(host, one))
        yield made


def bound_socket(host: str, port: int, *, alone: bool = False) -> socket.socket:
    """A listening socket; port 0 takes any free port, `alone` is IPv6 without IPv4. Raises UsageError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if alone and family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((host, port))
            made.listen()  # of two servers with SO_REUSEADDR, the second is refused here
        except BaseException:
            made.close()
            raise
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"cannot listen on {host}:{port}",
            found=getattr(error, "strerror", error),
            next_step="stop the other program, or choose another --host or --port",
        ) from None
    return made


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """A listening socket that this user alone may connect to, in place of one that nobody listens on any more."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError(f"cannot listen on {path}", expected="a system with Unix sockets")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with made:
        try:
            _remove_left(path)
            made.bind(str(path))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot listen on {path}", found=getattr(error, "strerror", None) or error,
                next_step="stop the other program, or choose another path",
            ) from None  # fmt: skip
        try:
            os.chmod(path, 0o600)  # before anybody can connect
            made.listen()
            yield made
        finally:
            path.unlink(missing_ok=True)


def _remove_left(path: Path) -> None:
    """Remove the socket of a server that has ended. Raises OSError for another file, and for one that still listens."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(0, "there is another file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(0, "another server listens there")
