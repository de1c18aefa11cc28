"""Checks and measures every GPU of this machine: `make check-gpu`, or `python -m bench.check_gpu`.

Each part is a process with its own time limit, so that a failure or a hang ends that part alone. The run takes less
than nine minutes and leaves one JSON file (`build/check-gpu.json`) and a table. `wheels.txt` lists its requirements
in addition to this repository. On software devices the models are small.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.check_gpu import parts
from bench.check_gpu.report import show
from mlcpipe import devices

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 530.0
SOFTWARE = 4  # times the limits: a CPU does a GPU's work, next to others
OUTPUT = ROOT / "build" / "check-gpu.json"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one part: `status` is ok, failed, skipped or timeout; `result` its numbers, `reason` one line."""

    part: str
    device: str
    status: str
    seconds: float
    result: dict[str, Any]
    reason: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Run all parts on all GPUs; 1 if one failed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.check_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=sorted(parts.PARTS), help="run one part here and print its JSON")
    parser.add_argument(
        "--device", help="as for mlcpipe: cuda:0; by default every GPU, software devices if there is none"
    )
    parser.add_argument("--parts", help="these alone: speed,batches (default: all)")
    parser.add_argument("--work", type=Path, help="a folder for bundles (default: a temporary one)")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help=f"the JSON file (default: {OUTPUT.relative_to(ROOT)})"
    )
    options = parser.parse_args(arguments)
    if options.part:
        print(json.dumps(parts.PARTS[options.part].run(parts.Setup.of(options.device, options.work))))
        return 0
    chosen = options.parts.split(",") if options.parts else list(parts.PARTS)
    if unknown := sorted(set(chosen) - set(parts.PARTS)):
        parser.error(f"--parts: expected some of {', '.join(parts.PARTS)}, found {', '.join(unknown)}")
    specs = [options.device] if options.device else parts.gpus()
    if not specs:
        print("error: no GPU found; `mlcpipe doctor` says what is missing", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        outcomes = list(_run_all(chosen, specs, Path(folder)))
    about = parts.machine()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "parts": [vars(outcome) for outcome in outcomes]}
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(about, outcomes)
    print(f"\n{options.output}")
    return int(any(outcome.status in ("failed", "timeout") for outcome in outcomes))


def _run_all(chosen: list[str], specs: list[str], work: Path) -> Iterator[Outcome]:
    slowness = {spec: SOFTWARE if parts.is_software(devices.choose(spec)) else 1 for spec in specs}
    deadline = time.monotonic() + TOTAL_S * max(slowness.values())
    for name in chosen:
        part = parts.PARTS[name]
        for device in specs:
            left = deadline - time.monotonic()
            if device.partition(":")[0] not in part.kinds:
                continue
            print(f"{name} on {device} ...", file=sys.stderr, flush=True)
            yield _run(name, part.limit_s * slowness[device], device, work, left)


def _run(name: str, limit_s: float, device: str, work: Path, left_s: float) -> Outcome:
    """One part in its own process."""
    if left_s < 5:
        return Outcome(name, device, "skipped", 0.0, {}, "no time was left")
    command = [sys.executable, "-m", "bench.check_gpu", "--part", name, "--device", device, "--work", str(work)]
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=min(limit_s, left_s))
    except subprocess.TimeoutExpired:
        return Outcome(name, device, "timeout", time.monotonic() - began, {}, f"stopped after {limit_s:.0f} s")
    seconds = time.monotonic() - began
    lines = [line for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if line.strip()]
    if done.returncode:
        return Outcome(name, device, "failed", seconds, {}, lines[-1] if lines else f"exit {done.returncode}")
    result = json.loads(lines[-1])
    status = "skipped" if "skipped" in result else "failed" if result.get("failed") else "ok"
    return Outcome(name, device, status, seconds, result, str(result.get("skipped") or result.get("failed") or ""))


if __name__ == "__main__":
    sys.exit(main())
