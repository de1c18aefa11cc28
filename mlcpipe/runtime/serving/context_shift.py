"""Shortens a text that exceeds the context to its first page and its last tokens (StreamingLLM, Xiao 2023).

When the context is full, about half of it is dropped at once, and the rest is recomputed as a prompt. So the answer is
that of a new prompt of the kept tokens, in every family of models, with any positions and windows.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcpipe.errors import UsageError
from tir_schedules.step_layout import PAGE

MIN_CONTEXT = 4 * PAGE


def check_shiftable(context: int) -> None:
    """Raises UsageError for a context of too few tokens."""
    if context < MIN_CONTEXT:
        raise UsageError("the context is too short to shift", expected=f"at least {MIN_CONTEXT} tokens", found=context)


def tokens_to_drop(count: int, context: int) -> int:
    """How many tokens after the first page a text of `count` tokens loses; fewer than `context` are left.

    The number grows in equal steps, so that a growing text keeps the same tokens for a while.
    """
    if count < context:
        return 0
    step = context - PAGE - context // 2 // PAGE * PAGE
    return step * ((count - context) // step + 1)


def without_dropped(tokens: Sequence[int], dropped: int) -> list[int]:
    """The first page, and the tokens after the next `dropped` ones."""
    return [*tokens[:PAGE], *tokens[PAGE + dropped :]]
