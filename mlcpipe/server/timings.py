"""llama-server's `timings` of an answer, and `prompt_progress` of a stream, as its README describes them."""

from __future__ import annotations

import time
from typing import Any

from mlcpipe.server.answers import Delta, Usage


def timings(usage: Usage) -> dict[str, float]:
    """The times of a request in milliseconds; `cache_n` tokens of its prompts were not computed.

    The first token of an answer comes with its prompt, so the rates of an answer are those of the others.
    """
    return _timings(usage.cached, usage.prompt - usage.cached, usage.prompt_s, usage)


def _timings(cached: int, computed: int, prompt_s: float, usage: Usage) -> dict[str, float]:
    made: dict[str, float] = {"cache_n": cached}
    for name, count, steps, seconds in (
        ("prompt", computed, computed, prompt_s),
        ("predicted", usage.completion, usage.completion - usage.begun, usage.answer_s),
    ):
        made |= {f"{name}_n": count, f"{name}_ms": seconds * 1000}
        made |= {f"{name}_per_token_ms": seconds * 1000 / max(1, steps)}
        made |= {f"{name}_per_second": steps / seconds if seconds > 0 else 0.0}
    return made


class PromptProgress:
    """How far a prompt of `total` tokens is computed: before each part of it, and at its end.

    `cache` tokens were found computed, `processed` are those and the computed ones, `time_ms` is since the first part.
    """

    def __init__(self, total: int) -> None:
        self._total, self._cached, self._began = total, 0, time.monotonic()
        self._processed = -1

    def told(self, delta: Delta, *, timed: bool = False) -> dict[str, Any] | None:
        """Fields of an event with the progress that a delta tells, and the times so far if they are wanted.

        None for a delta that tells none.
        """
        now, processed = time.monotonic(), self._total
        if delta.progress is not None:
            self._cached, processed = delta.progress
            self._began = now if self._processed < 0 else self._began
        if processed <= self._processed:  # of a prompt that is computed again, after it was displaced
            return None
        self._processed, since_s = processed, now - self._began
        told = {"total": self._total, "cache": self._cached, "processed": processed, "time_ms": round(since_s * 1000)}
        more = {} if not timed else {"timings": _timings(self._cached, processed - self._cached, since_s, Usage())}
        return {"prompt_progress": told, **more}
