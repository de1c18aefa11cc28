"""WebGPU: browsers run the models, so there is no device to open here. Node builds the page and measures kernels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from mlcpipe.devices.base import Device
from mlcpipe.errors import UsageError
from mlcpipe.host.finding import Finding

TVM_KIND, TITLE = "webgpu", "browsers"
BROWSER_TARGET = "webgpu"


def devices() -> tuple[Device, ...]:
    """None: this process cannot open any."""
    return ()


def choose(spec: str | None = None) -> Device:
    """Raises UsageError: a page uses the device that its browser offers."""
    raise UsageError("models for WebGPU run in browsers", next_step="type `mlcpipe chat --web`, or `mlcpipe package`")


def findings() -> Iterator[Finding]:
    """Node, which builds the chat page and runs candidates of `mlcpipe tune`."""
    node = shutil.which("node")
    purpose = "it builds the chat page and measures kernels for browsers"
    missing = Finding("node", "missing", f"there is no Node: {purpose}", "install Node 20.19 or newer")
    yield missing if node is None else Finding("node", "ok", node)
