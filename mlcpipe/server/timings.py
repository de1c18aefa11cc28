"""llama-server's `timings` of an answer, and `prompt_progress` of a stream, as its README describes them."""

from __future__ import annotations

import time
from typing import Any

from mlcpipe.server.answers import Delta, Usage


def timings(usage: Usage) -> dict[str, float]:
    """The times of a request in milliseconds; `cache_n` tokens of its prompts were not computed."""
    made: dict[str, float] = {"cache_n": usage.cached}
    for name, count, seconds in (
        ("prompt", usage.prompt - usage.cached, usage.prompt_s), ("predicted", usage.completion, usage.answer_s),
    ):  # fmt: skip
        made |= {f"{name}_n": count, f"{name}_ms": seconds * 1000}
        made |= {f"{name}_per_token_ms": seconds * 1000 / max(1, count)}
        made |= {f"{name}_per_second": count / seconds if seconds > 0 else 0.0}
    return made


class PromptProgress:
    """How far a prompt of `total` tokens is computed: before each part of it, and at its end.

    `cache` tokens were found computed, `processed` are those and the computed ones, `time_ms` is since the first part.
    """

    def __init__(self, total: int) -> None:
        self._total, self._cached, self._began = total, 0, time.monotonic()
        self._processed = -1

    def told(self, delta: Delta) -> dict[str, int] | None:
        """The progress that a delta tells, None for one that tells none."""
        if delta.progress is not None:
            if self._processed < 0:
                self._began = time.monotonic()
            self._cached, processed = delta.progress
        elif self._processed == self._total:
            return None
        else:
            processed = self._total
        if processed <= self._processed:  # of a prompt that is computed again, after it was displaced
            return None
        self._processed = processed
        time_ms = round((time.monotonic() - self._began) * 1000)
        return {"total": self._total, "cache": self._cached, "processed": processed, "time_ms": time_ms}


def add_timings(event: dict[str, Any], usage: Usage, *, wanted: bool) -> dict[str, Any]:
    """An event with the times so far, if they are wanted."""
    return {**event, "timings": timings(usage)} if wanted else event
