"""Runtimes of browsers as commands: one of them in one Chromium, driven by web/driver.mjs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.runners import OURS, Cell, Output, Reading
from mlcpipe.errors import ResourceError

WEB = Path(__file__).with_name("web")
# The name of a sample by the kind of a cell.
_SAMPLES = {"prefill": "prefill", "decode": "decode", "load": "first_token"}


@dataclass(frozen=True)
class Browser:
    """Which browser, how it finds its adapter (swiftshader or default), and whether it has a window."""

    executable: str
    adapter: str
    headed: bool


@dataclass(frozen=True)
class WebEffort:
    """How much each process measures; `timeout_s` is for a page."""

    threads: int
    repeats: int
    decode_tokens: int
    timeout_s: float


@dataclass(frozen=True)
class WebRunner:
    """A runtime under one name: a module of web/runtimes, the folder with its model, its own options."""

    name: str
    peer: str
    module: str
    model: Path
    browser: Browser
    effort: WebEffort
    options: Mapping[str, str] = field(default_factory=dict)
    bytes_per_token: int = 0
    kv_factor: float = 0.0

    def command(self, cells: Sequence[Cell]) -> list[str]:
        """For a load, or for prefill and decode of one prompt: those come from the same generation."""
        job = {
            "runtime": self.module,
            "model": str(self.model),
            "kind": "first_token" if cells[0].kind == "load" else "speed",
            "prompt": cells[0].tokens,
            "count": self.effort.decode_tokens,
            "repeats": self.effort.repeats,
            "threads": self.effort.threads,
            "timeout_s": self.effort.timeout_s,
            "options": dict(self.options),
            "chromium": self.browser.executable,
            "adapter": self.browser.adapter,
            "headed": self.browser.headed,
        }
        return ["node", str(WEB / "driver.mjs"), json.dumps(job)]

    def parse(self, stdout: str, cells: Sequence[Cell]) -> Output:
        """The last line is JSON. Raises ResourceError if there is none, or a runtime on WebGPU found no adapter."""
        lines = [line for line in stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise ResourceError(f"{self.name} printed no result", found=stdout.strip()[:60])
        said: dict[str, Any] = json.loads(lines[-1])
        readings = {cell: Reading.of(said["samples"][_SAMPLES[cell.kind]]) for cell in cells}
        return Output(readings, said=said, cpu_s=said["cpu_s"])


def runners_of(folders: Mapping[str, Path], browser: Browser, effort: WebEffort) -> list[WebRunner]:
    """All runtimes, ours first; `folders` has bundle, onnx and gguf (with a file model.gguf)."""
    bundle, onnx = folders["bundle"], folders["onnx"]
    return [
        WebRunner(OURS, OURS, "webllm", bundle, browser, effort),
        WebRunner(PLAIN, PLAIN, "tvmjs", bundle, browser, effort),
        *(
            WebRunner(f"{TRANSFORMERS} {dtype}", TRANSFORMERS, "transformers", onnx, browser, effort, {"dtype": dtype})
            for dtype in ("q4", "fp32")
        ),
        WebRunner(WLLAMA, WLLAMA, "wllama", folders["gguf"], browser, effort, {"file": "model.gguf"}),
    ]


PLAIN = "tvmjs alone"
TRANSFORMERS = "transformers.js"
WLLAMA = "wllama"
