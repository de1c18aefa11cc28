"""A small hub on 127.0.0.1 that speaks the part of the protocol that downloads need, and can misbehave."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = ".safetensors"


@dataclass
class Hub:
    """What the server has, how it misbehaves (by file name), and what it was asked."""

    files: dict[str, bytes]
    repo: str = "org/tiny-model"
    revision: str = "main"
    endpoint: str = ""
    cut_after: dict[str, list[int]] = field(default_factory=dict)  # bytes per connection, then whole
    named: dict[str, bytes] = field(default_factory=dict)  # HEAD and GET agree on other content than the listed
    served: dict[str, bytes] = field(default_factory=dict)  # other content than the listed
    without_ranges: bool = False
    shifted_ranges: bool = False
    statuses: dict[str, list[int]] = field(default_factory=dict)  # per request, 0 or after the last: as it should be
    info_error: tuple[int, str] | None = None
    info_body: bytes | None = None
    info_raw: Iterable[bytes] = ()  # the whole answer in pieces, until the client leaves
    sent: int = 0  # pieces of it
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, file, Range

    def gets(self, name: str) -> list[str | None]:
        return [range_ for method, file, range_ in self.requests if method == "GET" and file == name]

    def info(self) -> bytes:
        siblings = [self.sibling(name, content) for name, content in self.files.items()]
        return json.dumps({"id": self.repo, "sha": COMMIT, "siblings": siblings}).encode()

    @staticmethod
    def sibling(name: str, content: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
        if name.endswith(LARGE):
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 130}
        return entry


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def etag(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else git_sha1(content)


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Quiet: the tests read `hub.requests`."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        prefixes = [f"/{self.hub.repo}/resolve/{revision}/" for revision in (COMMIT, self.hub.revision)]
        prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), None)
        if path == f"/api/models/{self.hub.repo}/revision/{self.hub.revision}":
            self.hub.requests.append((self.command, "info", None))
            if self.hub.info_raw:
                self.pieces(self.hub.info_raw)
            elif self.hub.info_error:
                self.refuse(*self.hub.info_error)
            else:
                self.reply(200, {}, self.hub.info() if self.hub.info_body is None else self.hub.info_body)
        elif path.startswith(f"/api/models/{self.hub.repo}/"):
            self.refuse(404, "RevisionNotFound")
        elif prefix:
            self.file(path.removeprefix(prefix), body)
        else:
            self.refuse(404, "RepoNotFound")

    def file(self, name: str, body: bool) -> None:
        range_ = self.headers.get("Range")
        self.hub.requests.append((self.command, name, range_))
        if name not in self.hub.files:
            return self.refuse(404, "EntryNotFound")
        status = self.hub.statuses[name].pop(0) if body and self.hub.statuses.get(name) else 0
        if status:
            return self.refuse(status, "")
        listed = self.hub.named.get(name, self.hub.files[name])
        content = self.hub.served.get(name, listed)
        headers = {"ETag": f'"{etag(name, listed)}"', "X-Repo-Commit": COMMIT}
        if not body:
            return self.reply(200, {**headers, "Content-Length": str(len(listed))}, b"")
        status, start = 200, 0
        if range_ and not self.hub.without_ranges:
            first, _, last = range_.removeprefix("bytes=").partition("-")
            status, start = 206, int(first) + self.hub.shifted_ranges
            content = content[: int(last) + 1] if last else content
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cuts = self.hub.cut_after.get(name)
        keep = cuts.pop(0) if cuts else len(content)
        headers["Content-Length"] = str(len(content) - start)
        self.reply(status, headers, content[start : start + keep])

    def pieces(self, pieces: Iterable[bytes]) -> None:
        self.close_connection = True
        with suppress(OSError):
            for piece in pieces:
                self.wfile.write(piece)
                self.hub.sent += 1

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"}, b"")

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serves `hub` on a free port of 127.0.0.1 until the block ends."""
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join(timeout=10)
