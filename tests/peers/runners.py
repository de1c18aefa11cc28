"""The two runtimes as commands to run and output to read: one cell of the comparison in a process of its own."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlcpipe.errors import ResourceError


@dataclass(frozen=True)
class Cell:
    """One thing to measure: `kind` is prefill (of `tokens` tokens) or decode (after `tokens` tokens)."""

    kind: str
    tokens: int


@dataclass(frozen=True)
class Reading:
    """Tokens a second in one process, over its repeats, and what the process said about itself."""

    median: float
    low: float
    high: float
    said: Mapping[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much each process measures."""

    threads: int
    repeats: int
    decode_tokens: int


class Runner(Protocol):
    """A runtime under one name."""

    @property
    def name(self) -> str: ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads."""

    def command(self, cell: Cell) -> list[str]: ...

    def parse(self, stdout: str) -> Reading: ...


@dataclass(frozen=True)
class Mlcpipe:
    """`mlcpipe bench` on a compiled bundle; decoding includes the choice of the most probable token."""

    bundle: Path
    effort: Effort
    bytes_per_token: int
    name: str = "mlcpipe"

    def command(self, cell: Cell) -> list[str]:
        """One prefill length or one depth: the other list is empty."""
        lengths = {"prefill": "", "decode": "", cell.kind: str(cell.tokens)}
        return [
            sys.executable, "-m", "mlcpipe", "bench", str(self.bundle), "--json",
            "--prefill", lengths["prefill"], "--decode-depth", lengths["decode"],
            "--decode-tokens", str(self.effort.decode_tokens), "--repeats", str(self.effort.repeats),
            "--threads", str(self.effort.threads),
        ]  # fmt: skip

    def parse(self, stdout: str) -> Reading:
        """Raises ResourceError if the context was too short or there is no JSON."""
        try:
            said = json.loads(stdout)
        except ValueError as error:
            raise ResourceError("mlcpipe bench printed no JSON", found=stdout.strip()[:60]) from error
        (result,) = said["results"]
        speed = result["speed"]
        if speed is None:
            raise ResourceError("mlcpipe did not measure", where=str(self.bundle), found=result["skipped"])
        return Reading(speed["median"], speed["low"], speed["high"], said)


@dataclass(frozen=True)
class LlamaBench:
    """llama.cpp's own benchmark; it decodes random tokens and chooses none."""

    binary: Path
    gguf: Path
    effort: Effort
    bytes_per_token: int
    flash_attention: bool

    @property
    def name(self) -> str:
        return f"llama.cpp fa{self.flash_attention:d}"

    def command(self, cell: Cell) -> list[str]:
        """CPU alone, also in a build with other backends."""
        what = {
            "prefill": ["-p", str(cell.tokens), "-n", "0", "-d", "0"],
            "decode": ["-p", "0", "-n", str(self.effort.decode_tokens), "-d", str(cell.tokens)],
        }
        return [
            str(self.binary), "-m", str(self.gguf), "-ngl", "0", "-t", str(self.effort.threads),
            "-fa", str(int(self.flash_attention)), "-r", str(self.effort.repeats), "-o", "jsonl",
            *what[cell.kind],
        ]  # fmt: skip

    def parse(self, stdout: str) -> Reading:
        """One line of JSON. Raises ResourceError if there is another number of them."""
        lines = [line for line in stdout.splitlines() if line.startswith("{")]
        if len(lines) != 1:
            raise ResourceError("llama-bench printed no single result", expected="1 line", found=len(lines))
        said = json.loads(lines[0])
        samples = said["samples_ts"]
        return Reading(statistics.median(samples), min(samples), max(samples), said)
