"""Several listeners of one server: addresses and Unix sockets, each with the guard's rules."""

from __future__ import annotations

import http.client
import socket
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.server.guard import Rules
from mlcpipe.server.listening import Listener, bound_socket, listening
from mlcpipe.server.run import Loaded, serve

KEY = {"authorization": "Bearer k"}
LOADS, WRONG_HOST, WRONG_ORIGIN, WRONG_KEY = 503, 421, 403, 401
unix = pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets")


def addresses() -> list[str]:
    """Of loopback, ::1 where this machine has IPv6."""
    with suppress(UsageError):
        bound_socket("::1", 0).close()
        return ["127.0.0.1", "::1"]
    return ["127.0.0.1"]


def status(listener: Listener, **headers: str) -> int:
    """Of a request for the models."""
    family = listener.socket.family
    made = socket.socket(family, socket.SOCK_STREAM)
    made.settimeout(20)
    port = 0 if listener.path else listener.socket.getsockname()[1]
    made.connect(listener.path or ("127.0.0.1" if family == socket.AF_INET else "::1", port))
    client = http.client.HTTPConnection("localhost", port)
    client.sock = made
    with made:
        client.request("GET", "/v1/models", headers=headers)
        return client.getresponse().status


def statuses(listeners: Sequence[Listener], rules: Rules, *asked: dict[str, str]) -> list[list[int]]:
    """Of requests to each listener of a server, which loads until they are answered."""
    found: list[list[int]] = []

    class Asked(Exception):
        """Ends the server."""

    def load() -> Loaded:
        found.extend([status(one, **headers) for headers in asked] for one in listeners)
        raise Asked

    with pytest.raises(Asked):
        serve([one.socket for one in listeners], load, rules, lambda loaded: None, 0.1)
    return found


@unix
def test_the_guard_is_the_same_on_all_loopback_listeners(tmp_path: Path) -> None:
    path, foreign = tmp_path / "a.sock", {"host": "evil.example"}
    page = {"origin": "https://evil.example"}
    with listening([*addresses(), str(path)], 0) as listeners:
        assert all(one.local for one in listeners)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        ports = {one.socket.getsockname()[1] for one in listeners if one.path is None}
        assert len(ports) == 1
        hosts = [one.host for one in listeners]
        rules = Rules(host=hosts[0], more_hosts=hosts[1:])
        assert statuses(listeners, rules, {}, foreign, page) == [[LOADS, WRONG_HOST, WRONG_ORIGIN]] * len(listeners)
    assert not path.exists()


@unix
def test_a_network_beside_a_socket_of_this_machine(tmp_path: Path) -> None:
    """With a key, a network's clients may name the server as they like; those of this machine may not."""
    with listening(["0.0.0.0", str(tmp_path / "a.sock")], 0) as listeners:
        assert [one.local for one in listeners] == [False, True]
        local = [one.address for one in listeners if one.local]
        rules = Rules(["k"], "0.0.0.0", loopback=False, local=local)
        named = {"host": "box.example", **KEY}
        found = statuses(listeners, rules, {}, KEY, named)
        assert found == [[WRONG_KEY, LOADS, LOADS], [WRONG_KEY, LOADS, WRONG_HOST]]


@unix
def test_the_socket_of_an_ended_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
        with pytest.raises(UsageError, match="another server listens"), listening([str(path)], 0):
            pass
    with listening([str(path)], 0) as (one,):
        assert one.url("http") == f"unix:{path}" and one.curl("http").startswith(f"curl --unix-socket {path} http://")
    path.write_text("mine")
    with pytest.raises(UsageError, match="another file"), listening([str(path)], 0):
        pass
    assert path.read_text() == "mine"


def test_a_host_is_named_once() -> None:
    with pytest.raises(UsageError, match="each once"), listening(["127.0.0.1", "127.0.0.1"], 0):
        pass
