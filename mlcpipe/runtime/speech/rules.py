"""Which tokens may come next, as the published program decides (github.com/openai/whisper, decoding.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import SpeechInfo

Floats = NDArray[np.float32]
_NEVER = np.float32(-np.inf)


class TokenRules:
    """The rules for an answer after its prompt; with `timestamps` it is text between pairs of times."""

    def __init__(self, info: SpeechInfo, *, timestamps: bool) -> None:
        self._info, self._timestamps = info, timestamps
        control = (info.start, info.transcribe, info.translate, info.no_speech, info.previous, info.no_timestamps)
        never = {*info.suppressed, *(one for one in control if one is not None)} - {info.end}
        self._never = np.array(sorted(never), np.int64)
        self._never_first = np.array(info.suppressed_first, np.int64)

    def apply(self, logits: Floats, answer: Sequence[int]) -> None:
        """Make tokens impossible that may not follow `answer`; logits f32[vocab] are changed in place.

        Times come in pairs around text and never go back; the first token is a time, not too late. Where all times
        together are more probable than each other token, the next token is a time.
        """
        info = self._info
        logits[self._never] = _NEVER
        if not answer:
            logits[self._never_first] = _NEVER
        if not self._timestamps:
            return
        first = info.timestamps
        if answer:
            self._pair(logits, answer)
        else:
            logits[:first] = _NEVER
            if info.latest_start is not None:
                logits[first + info.latest_start + 1 :] = _NEVER
        if log_sum_exp(logits[first:]) > logits[:first].max():
            logits[:first] = _NEVER

    def _pair(self, logits: Floats, answer: Sequence[int]) -> None:
        first = self._info.timestamps
        last, before = answer[-1] >= first, len(answer) < 2 or answer[-2] >= first
        if last:
            if before:
                logits[first:] = _NEVER
            else:
                logits[: self._info.end] = _NEVER
        times = [one for one in reversed(answer) if one >= first][:1]
        if times:
            logits[first : times[0] + (not last or before)] = _NEVER


def log_sum_exp(logits: Floats) -> float:
    """log(sum(exp(x))) of f32[n] in float64; -inf where no token is possible."""
    top = logits.max()
    if not np.isfinite(top):
        return float("-inf")
    return float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
