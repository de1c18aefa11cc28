"""The text that a model is calibrated on, as windows of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.defaults import AWQ, CALIBRATION_TOKENS, GPTQ, NO_CALIBRATION, OWN_CALIBRATION, RTN, SEARCH
from mlcpipe.support.files import read_utf8, text_hash

OWN_TEXT = Path(__file__).with_name("text.txt")
"""Questions, answers and prose about language models, of this project and under its license, Apache 2.0."""
WINDOW = 512
_MAX_BYTES = 64 << 20
_MOST_CHARACTERS = 1 << 20  # of a text to encode
_LEAST_TOKENS = 1024


@dataclass(frozen=True)
class CalibrationText:
    """A text, and its `text_hash`."""

    text: str
    sha256: str


def read_calibration(source: str | Path) -> CalibrationText:
    """The text of a file, or of `own`. Raises UsageError for one that cannot be read or is not UTF-8."""
    path = OWN_TEXT if source == OWN_CALIBRATION else Path(source)
    text = read_utf8(path, _MAX_BYTES, UsageError, "calibration text")
    return CalibrationText(text, text_hash(text))


def calibration_text(method: str, requested: str | Path | None) -> CalibrationText | None:
    """The text of a file, of `own` or of `none`. None is `own` for awq and gptq, else `none`.

    Raises UsageError for one that cannot be read, has no effect, or is needed.
    """
    if requested is None:
        requested = OWN_CALIBRATION if method in (AWQ, GPTQ) else NO_CALIBRATION
    if requested == NO_CALIBRATION:
        if method in (AWQ, GPTQ):
            raise UsageError(f"--method {method} needs a calibration text", next_step="leave out --calibration none")
        return None
    if method == RTN:
        raise UsageError(f"--calibration has no effect on --method {method}", next_step=f"add --method {SEARCH}")
    return read_calibration(requested)


def windows_of(text: str, tokenizer: Tokenizer, context: int, most: int = CALIBRATION_TOKENS) -> list[list[int]]:
    """Windows of up to 512 tokens, no more than the context has, spread over the text; `most` tokens in all.

    Each begins with BOS if the tokenizer adds one. Raises UsageError for a text of fewer than 1024 tokens.
    """
    tokens = tokenizer.encode(text[:_MOST_CHARACTERS], add_special_tokens=True)
    if len(tokens) < _LEAST_TOKENS:
        raise UsageError(
            "the calibration text is too short", expected=f"at least {_LEAST_TOKENS} tokens", found=len(tokens)
        )
    size, bos = min(WINDOW, context), tokenizer.bos_token_id
    whole = len(tokens) // size
    count = max(1, min(whole, most // size))
    windows = [tokens[begin : begin + size] for begin in (i * whole // count * size for i in range(count))]
    return windows if tokens[0] != bos else [[tokens[0], *one[1:]] for one in windows]
