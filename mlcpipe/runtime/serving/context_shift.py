"""What is kept of a text that is longer than the context: its first page and its last tokens (StreamingLLM, Xiao 2023).

When the context is full, about half of it goes at once, and what is kept is computed anew as a prompt. So an answer is
what a new prompt of the kept tokens would get, in every family of models, whatever its positions and windows are.
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
    """How many tokens behind the first page a text of `count` tokens loses; less than `context` are left.

    It grows in steps of one size, so that a text which grows keeps what it kept for a while.
    """
    if count < context:
        return 0
    step = context - PAGE - context // 2 // PAGE * PAGE
    return step * ((count - context) // step + 1)


def without_dropped(tokens: Sequence[int], dropped: int) -> list[int]:
    """The first page, and what follows the next `dropped` tokens."""
    return [*tokens[:PAGE], *tokens[PAGE + dropped :]]
