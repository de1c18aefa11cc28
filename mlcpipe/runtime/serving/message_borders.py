"""Where a prompt is cut so that states in slots are kept there: later prompts differ from it after one of its messages.

Chat templates write control tokens where messages begin and end, so that no template is rendered again to find them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tir_schedules.step_layout import PAGE

MIN_CHECKPOINT_TOKENS = 64  # between checkpoints that stay: a slot must save recomputing at least these
_APART = 4  # tokens from one control token of a border to the next: a role's name and the end of a line lie between
_MOST_TAIL = 32  # tokens with which an answer begins


def page_borders(length: int, control: Iterable[int]) -> tuple[int, ...]:
    """The ends of pages before control tokens, in order, for a prompt of `length` tokens.

    `control`: where those tokens are, in order. Control tokens close to the end begin the answer, and count as one
    border: templates write an answer of the last turn otherwise in the next, without thoughts for example.
    """
    places = [place for place in control if place < length]
    while len(places) > 1 and places[-1] - places[-2] <= _APART and length - places[-2] <= _MOST_TAIL:
        del places[-1]
    pages = sorted({place // PAGE * PAGE for place in places})
    return tuple(page for page in pages if page >= MIN_CHECKPOINT_TOKENS)


def border_between(borders: tuple[int, ...], begin: int, end: int, least: float = 0.0) -> int | None:
    """Where a forward of a prompt's tokens from `begin` to `end` ends instead of `end`; None for no border.

    It is the first one of the prompt, mostly the end of the system prompt, or else the last one between, if the forward
    keeps this share of its tokens.
    """
    inside = [one for one in borders if begin + MIN_CHECKPOINT_TOKENS <= one < end]
    if not inside:
        return None
    if inside[0] == borders[0]:
        return inside[0]
    return inside[-1] if inside[-1] - begin >= least * (end - begin) else None
