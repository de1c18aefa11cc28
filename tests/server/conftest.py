"""A real `mlcpipe serve` with the demo model, on a free port of 127.0.0.1."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

if TYPE_CHECKING:
    from tests.conftest import Bundles

LIFE_S = 600  # of a server, whatever happens to the tests
STARTS_S = 120
NAME = "demo"


@dataclass(frozen=True)
class Running:
    """A server: where it is, and its process."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str]

    def end(self, *, number: int = signal.SIGTERM, within_s: float = 30) -> int:
        """Send a signal, and wait for its exit status."""
        self.process.send_signal(number)
        return self.process.wait(within_s)


@contextmanager
def running_server(
    *arguments: object, program: Sequence[object] = (sys.executable, "-m", "mlcpipe"), life_s: float = LIFE_S
) -> Iterator[Running]:
    """`PROGRAM serve ARGUMENTS…`, until the end of the block, and no longer than `life_s`."""
    command = [*map(str, program), "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    last = threading.Timer(life_s, process.kill)
    last.start()
    lines: list[str] = []
    found: list[str] = []
    came = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"https?://\S+:\d+(?=  \()", line):
                found.append(match[0])
                came.set()
        came.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        came.wait(STARTS_S)
        assert found, "".join(lines)
        yield Running(found[0], process, lines)
    finally:
        last.cancel()
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="session")
def demo_bundle(demo_bundles: Bundles) -> Path:
    """The demo model in q4f16_1."""
    return demo_bundles["q4f16_1"]


@pytest.fixture(scope="session")
def server(demo_bundle: Path) -> Iterator[Running]:
    """One without a key, shared: its cache and metrics are in any state."""
    with running_server(demo_bundle, "--name", NAME, "--threads", 2) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx2.Client]:
    """A plain client of `server`."""
    with httpx2.Client(base_url=server.url, timeout=60) as made:
        yield made
