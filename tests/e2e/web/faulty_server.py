"""The site's server, with the faults that a network and a host have. Scenarios switch them on over HTTP."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mlcpipe.web.server import SiteHandler, SiteServer
from mlcpipe.web.site import Site


@dataclass
class Faults:
    """What goes wrong, by the last part of a path.

    breakAfter: the connection ends after so many bytes. flip: a byte at this place is wrong. status: the answer.
    slow: milliseconds for every 64 kB. times: how often breaks and flips happen (default: always).
    dead: no answer at all. noRanges: ranges are ignored. newLibrary: another library, in the manifest too.
    weightsBytes: the manifest's.
    """

    breakAfter: dict[str, int] = field(default_factory=dict)
    flip: dict[str, int] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    slow: dict[str, int] = field(default_factory=dict)
    times: int = 1_000_000
    dead: bool = False
    noRanges: bool = False
    newLibrary: bool = False
    weightsBytes: int | None = None


class FaultyServer(SiteServer):
    """A server on a free port that can be told to fail."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, 0, handler=_Handler)
        self.original = site
        self.faults = Faults()
        self.seen: list[dict[str, str | None]] = []

    def change(self, faults: Faults) -> None:
        """From now on these faults."""
        self.faults = faults
        files = dict(self.original.files)
        for name in [name for name in files if name.endswith("/mlcpipe.json")]:
            manifest = _read(files[name])
            if faults.weightsBytes is not None:
                libraries = [variant["library"] for variant in manifest["target"]["variants"]]
                for plan in [manifest["memory_plan"], *(own["memory_plan"] for own in libraries if own)]:
                    plan["weights_bytes"] = faults.weightsBytes
            if faults.newLibrary:
                library = b"another library"
                info = {"sha256": hashlib.sha256(library).hexdigest(), "bytes": len(library)}
                for path in [path for path in manifest["files"] if path.endswith(".wasm")]:
                    files[name.removesuffix("mlcpipe.json") + path] = library
                    manifest["files"][path] = info
            files[name] = json.dumps(manifest).encode()
        self.site = Site(files)


class _Handler(SiteHandler):
    server: FaultyServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.change(Faults(**json.loads(body)))
        self._json({})

    def do_GET(self) -> None:
        if self.path == "/requests":
            return self._json(self.server.seen)
        faults, name = self.server.faults, self._name()
        self.server.seen.append({"path": self.path, "range": self.headers.get("Range")})
        if faults.dead:
            self.close_connection = True
            return
        if name in faults.status:
            self.send_response(faults.status[name])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if faults.noRanges:
            del self.headers["Range"]
        super().do_GET()

    def copy(self, file: BinaryIO, first: int, count: int) -> None:
        faults, name = self.server.faults, self._name()
        file.seek(first)
        data = bytearray(file.read(count))
        length = len(data)
        if faults.times > 0 and (name in faults.breakAfter or name in faults.flip):
            faults.times -= 1
            if name in faults.flip and first <= faults.flip[name] < first + length:
                data[faults.flip[name] - first] ^= 1
            length = min(length, faults.breakAfter.get(name, length))
        for start in range(0, length, 1 << 16):
            self.wfile.write(data[start : min(start + (1 << 16), length)])
            time.sleep(faults.slow.get(name, 0) / 1000)
        if length < count:
            self.close_connection = True

    def _name(self) -> str:
        return self.path.rpartition("/")[2]

    def _json(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _read(content: Path | bytes) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(content if isinstance(content, bytes) else content.read_bytes())
    return data
