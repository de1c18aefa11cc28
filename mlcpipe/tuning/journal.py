"""The measurements of a `mlcpipe tune` run, one line per candidate, so that an interrupted run resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlcpipe.support.private import private_folder
from mlcpipe.tuning.noise import Verdict

_MAX_BYTES = 64 << 20
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Trial:
    """One candidate and the verdict of its pairs, None if it failed. `final`: new pairs of the best candidate."""

    key: Key
    choice: Mapping[str, int]
    verdict: Verdict | None
    final: bool = False


class Journal:
    """The trials of one target, variant and device. Unreadable lines are skipped: Ctrl-C may truncate a line."""

    def __init__(self, folder: Path, target: str, variant: str, device: str) -> None:
        name = re.sub(r"[^a-z0-9]+", "-", f"{target} {variant} {device}".lower()).strip("-")
        self._path = folder / f"{name[:120]}.jsonl"
        self.trials: list[Trial] = []
        self._cut = False
        if self._path.is_file() and self._path.stat().st_size <= _MAX_BYTES:
            text = self._path.read_text(encoding="utf-8", errors="replace")
            self.trials = [trial for line in text.splitlines() if (trial := _trial(line)) is not None]
            self._cut = bool(text) and not text.endswith("\n")

    def of(self, key: Key) -> list[Trial]:
        """The trials of one row range of a kernel, in order."""
        return [trial for trial in self.trials if trial.key == key]

    def add(self, trial: Trial) -> None:
        """Add a trial, on disk first."""
        verdict = None if trial.verdict is None else vars(trial.verdict)
        entry = {"key": trial.key, "choice": dict(trial.choice), "verdict": verdict, "final": trial.final}
        private_folder(self._path.parent)
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._cut + json.dumps(entry) + "\n")
        self._cut = False
        self.trials.append(trial)

    def forget(self) -> None:
        """Start over."""
        self._path.unlink(missing_ok=True)
        self.trials = []


def _trial(line: str) -> Trial | None:
    try:
        entry: dict[str, Any] = json.loads(line)
        kernel, rule, bucket = map(str, entry["key"])
        choice = {str(name): int(value) for name, value in entry["choice"].items()}
        verdict = None if entry["verdict"] is None else Verdict(**entry["verdict"])
        return Trial((kernel, rule, bucket), choice, verdict, bool(entry["final"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
