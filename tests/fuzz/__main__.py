"""`python -m tests.fuzz bundle|checkpoint FOLDER`: run cases, print each finding and a summary; exit 1 with findings."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

# Before numpy: children are forked, and a fork must not meet threads.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tests.fuzz import attacks, bundles, checkpoints, child

_MAKERS = {
    "bundle": bundles.make,
    "checkpoint": checkpoints.make,
    "bundle-attack": attacks.bundle,
    "checkpoint-attack": attacks.checkpoint,
}
_ATTACKS = {"bundle-attack": attacks.BUNDLES, "checkpoint-attack": attacks.CHECKPOINTS}


def _preload() -> None:
    """What children would import again and again."""
    import mlcpipe.cli
    import mlcpipe.cli.compile
    import mlcpipe.compiler.compile
    import mlcpipe.runtime.engine  # noqa: F401


def _fuzz(kind: str, source: Path, seeds: Iterable[int], seconds: float, cases: int | None) -> int:
    began, count, findings = time.monotonic(), 0, 0
    ended: Counter[str] = Counter()
    slowest, largest = 0.0, 0
    shapes: dict[str, int] = {}  # an error's words without what differs from case to case -> the first seed with it
    with tempfile.TemporaryDirectory(prefix="mlcpipe-fuzz-") as name:
        folder = Path(name)
        os.environ["MLCPIPE_CACHE"] = str(folder / "cache")
        for seed in itertools.islice(seeds, cases):
            if time.monotonic() - began > seconds:
                break
            shutil.rmtree(folder / "output", ignore_errors=True)
            count += 1
            for command in _MAKERS[kind](seed, source, folder):
                outcome = child.run(command, folder / "stderr")
                slowest, largest = max(slowest, outcome.seconds), max(largest, outcome.resident_bytes)
                words = (
                    re.sub(r"'.*?'|\"[^\"]*\"|/\S+|\S*\d\S*|found .*", "", outcome.errors[-2000:])
                    if outcome.status
                    else ""
                )
                shapes.setdefault(f"{command[0]} {outcome.status} {words}", seed)
                if outcome.finding:
                    findings += 1
                    sys.stdout.write(child.as_line(seed, outcome) + "\n")
                    sys.stdout.flush()
                ended["answered" if outcome.status == 0 else "refused" if outcome.status == 2 else "other"] += 1
                if outcome.status != 0 and command[0] == "compile":
                    break  # there is no bundle to chat with
    spent = time.monotonic() - began
    sys.stdout.write(
        f"{kind}: {count} inputs in {spent:.0f} s, {dict(ended)}, slowest {slowest:.1f} s, "
        f"largest {largest >> 20} MiB, {findings} findings\ninteresting: {sorted(set(shapes.values()))}\n"
    )
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("kind", choices=sorted(_MAKERS))
    parser.add_argument("source", type=Path, help="a whole bundle or checkpoint")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="+", help="these seeds and no others")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    _preload()
    every = range(len(_ATTACKS[options.kind])) if options.kind in _ATTACKS else itertools.count(options.first)
    seeds = options.seeds or every
    return min(1, _fuzz(options.kind, options.source.resolve(), seeds, options.seconds, options.cases))


if __name__ == "__main__":
    sys.exit(main())
