"""Hostile bundles and checkpoints: the command line answers or refuses in one line, in bounded memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Bundles
from tests.fuzz import attacks, bundles, checkpoints
from tests.fuzz.child import HANGS_S, LIMIT_S, MAX_RESIDENT_BYTES, Outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fuzzers need Linux: fork, wait4 and RLIMIT_AS")
ROOT = Path(__file__).parents[2]
CORPUS = json.loads(Path(__file__).with_name("corpus.json").read_text(encoding="utf-8"))
KINDS = ("bundle", "checkpoint")


def fuzz(kind: str, sources: Bundles, *options: str, seconds: float = 600) -> str:
    """The harness's report; it must have no findings."""
    source = sources["q4f16_1"] if kind.startswith("bundle") else sources.checkpoint
    command = [sys.executable, "-m", "tests.fuzz", kind, str(source), "--seconds", str(seconds), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 2 * HANGS_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " 0 findings" in done.stdout
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for path in sorted(folder.rglob("*"))
        if not path.is_fifo()
    }


@pytest.mark.parametrize("make", [bundles.make, checkpoints.make], ids=KINDS)
@pytest.mark.full
def test_a_case_is_made_of_its_seed_alone(
    make: Callable[[int, Path, Path], list[list[str]]], tiny_bundles: Bundles, tmp_path: Path
) -> None:
    source = tiny_bundles["q4f16_1"] if make is bundles.make else tiny_bundles.checkpoint
    made = []
    for seed in range(20):
        commands = make(seed, source, tmp_path / "case")
        made.append((commands, contents(tmp_path / "case")))
        assert make(seed, source, tmp_path / "case") == commands
        assert contents(tmp_path / "case") == made[-1][1], seed
    assert len({str(one) for one in made}) == 20  # and another seed is another case


@pytest.mark.parametrize(
    ("outcome", "finding"),
    [
        (Outcome((), 0, 1, 0, "lower the model: 0.7 s\n"), ""),
        (Outcome((), 2, 1, 0, "note\nerror: wrong; found 1\n"), ""),
        (Outcome((), 2, 1, 0, ""), "exit 2 without its line"),
        (Outcome((), 2, 1, 0, "error: wrong\nmore\n"), "exit 2 without its line"),
        (Outcome((), 2, 1, 0, f"error: {'a' * 2000}\n"), "exit 2 without its line"),
        (Outcome((), 2, 1, 0, "thread panicked at x.rs\nerror: wrong\n"), "more than words on stderr"),
        (Outcome((), 70, 1, 0, "error: this is a bug\n"), "exit 70"),
        (Outcome((), -11, 1, 0, ""), "signal 11"),
        (Outcome((), 0, 1, MAX_RESIDENT_BYTES + 1, ""), "took 2048 MiB"),
        (Outcome((), -9, LIMIT_S, 0, ""), "took 60 s"),
    ],
)
def test_what_is_a_finding(outcome: Outcome, finding: str) -> None:
    assert outcome.finding == finding


@pytest.mark.full
@pytest.mark.full_cases("bundle")
@pytest.mark.parametrize("kind", KINDS)
def test_interesting_seeds(kind: str, tiny_bundles: Bundles) -> None:
    report = fuzz(kind, tiny_bundles, "--seeds", *map(str, CORPUS[kind]))
    assert f"{kind}: {len(CORPUS[kind])} inputs" in report


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_three_seconds(kind: str, tiny_bundles: Bundles) -> None:
    fuzz(kind, tiny_bundles, seconds=3)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_attacks(kind: str, tiny_bundles: Bundles) -> None:
    count = len(attacks.BUNDLES if kind == "bundle" else attacks.CHECKPOINTS)
    assert f"attack: {count} inputs" in fuzz(f"{kind}-attack", tiny_bundles)


@pytest.mark.everything
@pytest.mark.parametrize("kind", KINDS)
def test_an_hour(kind: str, tiny_bundles: Bundles) -> None:
    """Seeds that no run before had; MLCPIPE_FUZZ_SECONDS sets another time."""
    seconds = float(os.environ.get("MLCPIPE_FUZZ_SECONDS", "3600"))
    fuzz(kind, tiny_bundles, "--first", str(int(time.time()) * 1000), seconds=seconds)
