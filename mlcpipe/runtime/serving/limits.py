"""Limits of a scheduler, and its totals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """context: tokens of a prompt and its answer. sequences: admitted at once. queue: requests that wait.

    prefill_chunk and decode_rows bound the rows of a forward of each kind. step_s: how long a step may take while
    answers wait for their next token. recompute_above: longer sequences have other frequencies of RoPE, so all tokens
    are recomputed when an answer gets there (longrope). scored_rows bound the rows of a step that all give logits,
    masked_rows those of masks. whole_pictures: rows of one picture see each other, so that a step has all of them, or
    those that are left; it has at most prefill_chunk rows.
    """

    context: int
    prefill_chunk: int = 512
    sequences: int = 64
    queue: int = 256
    decode_rows: int = 512
    step_s: float = 0.1
    recompute_above: int | None = None
    scored_rows: int = 64
    masked_rows: int = 64
    whole_pictures: bool = False


@dataclass
class Totals:
    """Since the start, for metrics. A request is counted in queries and hits when it is first admitted."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens of prompts
    prefix_hits: int = 0  # of them, found in the tree
    prefix_lost: int = 0  # found, but without the recurrent state, or the window, that the next token needs
    misses: Counter[str] = field(default_factory=Counter)  # requests, by `CacheMiss.reason`
    answer_tokens: int = 0
    rejected: int = 0
    drafts: int = 0
    drafted: int = 0  # tokens of drafts that were checked
    accepted: int = 0  # of them, those that were accepted
