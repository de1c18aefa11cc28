"""Rows of sequences whose blocks, or whole answers, are denoised. All of them have the arithmetic of prompts.

A step computes the tokens of finished blocks that have no keys yet, and after them the block that is denoised: so the
step in which a block begins also computes the last one, as a prompt's chunk would. Keys of a canvas are overwritten in
each step; only whole known blocks count as computed. Of a whole answer each step computes prompt and answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from mlcpipe.runtime.serving.admission import Admission
from mlcpipe.runtime.serving.canvas import Canvas, Denoising
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import Sequence, State
from mlcpipe.runtime.serving.step import PrefillRows, Step
from mlcpipe.runtime.serving.whole_answer import WholeAnswer, WholeCanvas
from tir_schedules.step_layout import PAGE


class BlockSteps:
    """Plans and settles such rows for a scheduler."""

    def __init__(self, tree: PrefixTree, limits: Limits, admission: Admission) -> None:
        self._tree, self._limits, self._admission = tree, limits, admission
        self._left_out: list[Sequence] = []  # of the last step, for which it had no rows

    def plan_answers(self, step: Step) -> None:
        """Plan the block of each running sequence; those that a step has no rows for come first in the next one."""
        running, first = self._admission.running, self._left_out
        ordered = [*(one for one in first if one in running), *(one for one in running if one not in first)]
        self._left_out = []
        for sequence in ordered:
            if sequence.state is not State.RUNNING:
                continue
            canvas = _canvas(sequence)
            count = sequence.left + len(canvas.tokens)
            if not self._has_rows(step, count, canvas):
                self._left_out.append(sequence)
                continue
            while sequence.state is State.RUNNING and not self._tree.reserve(sequence, count):
                self._admission.preempt_for(sequence)
            if sequence.state is State.RUNNING:
                step.prefill.append(PrefillRows(sequence, sequence.computed, count, (), canvas))

    def plan_prompt(self, step: Step, sequence: Sequence, rows: int) -> int:
        """Plan up to `rows` rows of a prompt, at least a block, and its first canvas if all fits -> how many.

        All rows of a whole answer or none: each sees the others.
        """
        how = _how(sequence)
        unit = max(PAGE, how.block)
        rows = min(max(rows, unit), self._rows(step)) if how.keeps else self._rows(step)
        begin, canvas = sequence.computed, _canvas(sequence)
        count = len(sequence.tokens) + len(canvas.tokens) - begin
        whole = count <= rows and self._has_rows(step, count, canvas)
        if not whole:
            count = how.begin(len(sequence.tokens)) - begin
            count = count if count <= rows else (begin + rows) // unit * unit - begin
        if count <= 0:
            return 0
        while not self._tree.reserve(sequence, count):
            if step.prefill or not self._admission.preempt_for(sequence):
                return 0
        step.prefill.append(PrefillRows(sequence, begin, count, (), canvas if whole else None))
        return count

    def settle(self, rows: PrefillRows, proposed: Many[int], confidence: Many[float]) -> list[int]:
        """Count the computed tokens, and decide some of the canvas -> the answer's new tokens, if the block is done."""
        sequence, canvas, how = rows.sequence, rows.canvas, _how(rows.sequence)
        known = rows.begin + rows.rows - (0 if canvas is None else len(canvas.tokens))
        self._tree.pool.advance(sequence, how.begin(known) - rows.begin)
        if canvas is None:
            return []
        canvas.keep(proposed, confidence)
        taken = canvas.take(sequence.request.stop_ids, sequence.request.max_tokens - sequence.answer)
        if not canvas.tokens:
            sequence.canvas = None
        return sequence.push(taken, how.room(self._limits.context))

    def _has_rows(self, step: Step, count: int, canvas: Canvas | WholeCanvas) -> bool:
        """Whether a step has so many more rows, and logits for what a canvas asks."""
        asked = sum(len(rows.wanted) for rows in step.prefill)
        return count <= self._rows(step) and asked + len(canvas.asked) <= self._limits.masked_rows

    def _rows(self, step: Step) -> int:
        return self._limits.prefill_chunk - sum(rows.rows for rows in step.prefill)


def is_ready(sequence: Sequence) -> bool:
    """Whether all but the last of a sequence's whole blocks are computed: each step then gives tokens."""
    how = _how(sequence)
    return how.begin(len(sequence.tokens)) - sequence.computed <= how.block


def _canvas(sequence: Sequence) -> Canvas | WholeCanvas:
    """The canvas of a sequence, blank where its last block is finished."""
    if sequence.canvas is None:
        sequence.canvas = _how(sequence).blank(len(sequence.tokens))
    return sequence.canvas


def _how(sequence: Sequence) -> Denoising | WholeAnswer:
    how = sequence.request.denoising
    assert how is not None
    return how
