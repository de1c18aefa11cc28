"""A server of one file of data, which fails as it is told to, and a folder of an app that downloads it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlcpipe.compiler.container import write_parts
from mlcpipe.web.site import Site
from tests.e2e.web.faulty_server import FaultyServer

PART, PARTS = 100_000, 7
NAME = "model.mlcp"


@dataclass
class Host:
    server: FaultyServer
    content: bytes
    json: Path
    app: Path

    @property
    def url(self) -> str:
        return f"{self.server.url}{NAME}"

    def ranges(self) -> list[str | None]:
        return [request["range"] for request in self.server.seen]

    def is_whole(self) -> bool:
        return (self.app / NAME).read_bytes() == self.content and len(list(self.app.iterdir())) == 1


@contextmanager
def hosted(folder: Path) -> Iterator[Host]:
    """A host of a file of `PARTS` parts, the last of 777 bytes."""
    content = np.random.default_rng(1).bytes(PART * (PARTS - 1) + 777)
    (folder / NAME).write_bytes(content)
    with FaultyServer(Site({NAME: folder / NAME})) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield Host(server, content, write_parts(folder / NAME, PART), folder / "app")
        server.shutdown()
        thread.join(timeout=10)
