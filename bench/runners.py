"""The runtimes as commands to run and output to read: some rows of the comparison in a process of its own."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mlcpipe.cli.bench.batch import PROMPT
from mlcpipe.errors import ResourceError

OURS = "mlcpipe"
_WORKER = Path(__file__).with_name("openvino_worker.py")
_NATIVE_WORKER = Path(__file__).with_name("native_worker.py")
_PEAK = Path(__file__).with_name("peak.py")


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    `kind` is prefill (of `tokens` tokens), decode (after `tokens` tokens), batch (decode of `tokens` sequences together,
    after prompts of 128 tokens), load (to the first token of a prompt of `tokens`, seconds) or memory (the most that is
    resident in a prefill of `tokens` tokens and some decoding, bytes).
    """

    kind: str
    tokens: int = 0

    @property
    def more_is_better(self) -> bool:
        return self.kind in ("prefill", "decode", "batch")


@dataclass(frozen=True)
class Reading:
    """One process's result over its repeats, in the unit of the cell."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: Sequence[float]) -> Reading:
        return Reading(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True)
class Output:
    """A process's results, and its facts about itself.

    Ours also says what share of the read bandwidth decoding had, and that bandwidth (GB/s); browsers say how many CPU
    seconds they used.
    """

    readings: Mapping[Cell, Reading]
    shares: Mapping[Cell, float] = field(default_factory=dict)
    read_gb_s: tuple[float, ...] = ()
    said: Mapping[str, Any] = field(default_factory=dict)
    cpu_s: float | None = None


@dataclass(frozen=True)
class Effort:
    """How much each process measures."""

    threads: int
    repeats: int
    decode_tokens: int


class Runner(Protocol):
    """A runtime under one name; `peer` is the name that its variants share."""

    @property
    def name(self) -> str: ...

    @property
    def peer(self) -> str: ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads."""

    @property
    def kv_factor(self) -> float:
        """Bytes of its KV cache over those of ours."""

    def command(self, cells: Sequence[Cell]) -> list[str]:
        """For cells of one kind."""

    def parse(self, stdout: str, cells: Sequence[Cell]) -> Output:
        """Raises ResourceError if a cell is missing."""


def _tokens(cells: Sequence[Cell]) -> str:
    return ",".join(str(cell.tokens) for cell in cells)


def _json_lines(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]


def _complete(who: str, readings: Mapping[Cell, Reading], cells: Sequence[Cell]) -> Mapping[Cell, Reading]:
    missing = [cell for cell in cells if cell not in readings]
    if missing:
        raise ResourceError(f"{who} printed no result", expected=missing[0], found=list(readings))
    return readings


@dataclass(frozen=True)
class Mlcpipe:
    """`mlcpipe bench` on a compiled bundle; decoding includes the choice of the most probable token."""

    bundle: Path
    effort: Effort
    bytes_per_token: int
    device: str | None = None
    name: str = OURS
    peer: str = OURS
    kv_factor: float = 1.0

    def command(self, cells: Sequence[Cell]) -> list[str]:
        """The list that has no cells is empty; memory is that of a prefill and decoding after it."""
        kind, tokens, repeats = cells[0].kind, _tokens(cells), self.effort.repeats
        prefill = tokens if kind in ("prefill", "memory") else ""
        depth = tokens if kind in ("decode", "memory") else ""
        return [
            sys.executable, "-m", "mlcpipe", "bench", str(self.bundle), "--json",
            "--prefill", prefill, "--decode-depth", depth, "--decode-tokens", str(self.effort.decode_tokens),
            "--repeats", str(1 if kind == "memory" else repeats), "--threads", str(self.effort.threads),
            *(["--batch", tokens] if kind == "batch" else []),
            *(["--device", self.device] if self.device else []),
        ]  # fmt: skip

    def parse(self, stdout: str, cells: Sequence[Cell]) -> Output:
        """Raises ResourceError if the context was too short or there is no JSON."""
        try:
            said = json.loads(stdout)
        except ValueError as error:
            raise ResourceError("mlcpipe bench printed no JSON", found=stdout.strip()[:60]) from error
        readings, shares = {}, {}
        for result in said["results"]:
            if result["speed"] is None:
                raise ResourceError("mlcpipe did not measure", where=str(self.bundle), found=result["skipped"])
            cell = Cell(result["kind"], result["tokens"])
            readings[cell] = _reading(result["speed"])
            if result["share_of_read_bandwidth"] is not None:
                shares[cell] = result["share_of_read_bandwidth"]
        for cell in cells:
            if cell.kind == "load":
                readings[cell] = _reading(said["first_token_s"])
            elif cell.kind == "memory":
                readings[cell] = Reading.of([said["memory"]["resident"]])
        return Output(_complete(self.name, readings, cells), shares, tuple(said["read_gb_s"]), said)


def _reading(speed: Mapping[str, float]) -> Reading:
    return Reading(speed["median"], speed["low"], speed["high"])


@dataclass(frozen=True)
class Native:
    """The native runtime's program on the same bundle."""

    program: Path
    bundle: Path
    effort: Effort
    bytes_per_token: int
    name: str = "mlcpipe native"
    peer: str = "mlcpipe native"
    kv_factor: float = 1.0

    def command(self, cells: Sequence[Cell]) -> list[str]:
        return _worker_command(
            [sys.executable, str(_NATIVE_WORKER), str(self.program), str(self.bundle)], self.effort, cells
        )

    def parse(self, stdout: str, cells: Sequence[Cell]) -> Output:
        """A line of JSON for each cell."""
        readings = _worker_readings(_json_lines(stdout))
        return Output(_complete(self.name, readings, cells), said={"version": "the same bundle and kernels"})


def _worker_command(command: list[str], effort: Effort, cells: Sequence[Cell]) -> list[str]:
    return [
        *command, cells[0].kind, _tokens(cells), "--threads", str(effort.threads), "--repeats", str(effort.repeats),
        "--decode-tokens", str(effort.decode_tokens),
    ]  # fmt: skip


def _worker_readings(lines: Sequence[Mapping[str, Any]]) -> dict[Cell, Reading]:
    return {Cell(line["kind"], line["tokens"]): Reading.of(line["samples"]) for line in lines if "samples" in line}


@dataclass(frozen=True)
class LlamaBench:
    """llama.cpp's own benchmark; it decodes random tokens and chooses none.

    `device` is the number of a Vulkan device as the loader lists them, None for the CPU alone, also in a build with
    other backends.
    """

    binary: Path
    gguf: Path
    effort: Effort
    bytes_per_token: int
    flash_attention: bool
    device: int | None = None
    peer: str = "llama.cpp"
    kv_factor: float = 1.0

    @property
    def name(self) -> str:
        return f"llama.cpp fa{self.flash_attention:d}"

    def command(self, cells: Sequence[Cell]) -> list[str]:
        """A load is a whole process that computes one token."""
        kind, tokens, repeats = cells[0].kind, _tokens(cells), self.effort.repeats
        decoded = str(self.effort.decode_tokens)
        if kind == "batch":
            return self._batched_bench(cells)
        what = {
            "prefill": ["-p", tokens, "-n", "0", "-d", "0", "-r", str(repeats)],
            "decode": ["-p", "0", "-n", decoded, "-d", tokens, "-r", str(repeats)],
            "load": ["-p", "1", "-n", "0", "-d", "0", "-r", "1", "--no-warmup"],
            "memory": ["-p", tokens, "-n", decoded, "-d", "0", "-r", "1"],
        }
        # Without the variable llama.cpp passes over software devices.
        chosen = [] if self.device is None else ["env", f"GGML_VK_VISIBLE_DEVICES={self.device}"]
        layers = "0" if self.device is None else "99"
        command = [
            *chosen, str(self.binary), "-m", str(self.gguf), "-ngl", layers, "-t", str(self.effort.threads),
            "-fa", str(int(self.flash_attention)), "-o", "jsonl", *what[kind],
        ]  # fmt: skip
        if kind in ("load", "memory"):  # which llama-bench does not report
            return [sys.executable, str(_PEAK), str(repeats + 1 if kind == "load" else 1), *command]
        return command

    def _batched_bench(self, cells: Sequence[Cell]) -> list[str]:
        sizes, decoded = [cell.tokens for cell in cells], self.effort.decode_tokens
        return [
            str(self.binary.with_name("llama-batched-bench")), "-m", str(self.gguf), "-t", str(self.effort.threads),
            "-fa", "on" if self.flash_attention else "off", "-c", str(max(sizes) * (PROMPT + decoded)),
            "-npp", str(PROMPT), "-ntg", str(decoded), "--output-format", "jsonl",
            "-npl", ",".join(str(size) for size in sizes for _ in range(self.effort.repeats)),
        ]  # fmt: skip

    def parse(self, stdout: str, cells: Sequence[Cell]) -> Output:
        """A line of JSON for each cell, of batches for each repeat; of load and memory the last is that of peak.py."""
        lines = _json_lines(stdout)
        readings = {}
        if cells[0].kind == "batch":
            speeds = {cell: [line["speed_tg"] for line in lines if line["pl"] == cell.tokens] for cell in cells}
            readings = {cell: Reading.of(found) for cell, found in speeds.items() if found}
        for line in lines if cells[0].kind != "batch" else ():
            if "samples_ts" in line:
                cell = Cell("prefill", line["n_prompt"]) if line["n_prompt"] else Cell("decode", line["n_depth"])
                readings[cell] = Reading.of(line["samples_ts"])
            elif cells[0].kind == "load":
                readings[cells[0]] = Reading.of(line["wall_s"][1:])
            else:
                readings[cells[0]] = Reading.of([line["peak_rss_bytes"]])
        return Output(_complete(self.name, readings, cells), said=lines[0] if lines else {})


@dataclass(frozen=True)
class OpenVino:
    """openvino-genai's LLMPipeline in an environment of its own; greedy decoding, its default KV cache (8 bits)."""

    python: Path
    model: Path
    effort: Effort
    bytes_per_token: int
    name: str = "OpenVINO GenAI"
    peer: str = "OpenVINO GenAI"
    kv_factor: float = 0.5  # 8 bits where ours has 16; its scales are not counted

    def command(self, cells: Sequence[Cell]) -> list[str]:
        return _worker_command([str(self.python), "-I", str(_WORKER), str(self.model)], self.effort, cells)

    def parse(self, stdout: str, cells: Sequence[Cell]) -> Output:
        """A line of JSON for each cell, and one about the runtime."""
        lines = _json_lines(stdout)
        readings = _worker_readings(lines)
        said = next((line for line in lines if "version" in line), {})
        return Output(_complete(self.name, readings, cells), said=said)
