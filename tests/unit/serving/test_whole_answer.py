"""Answers that are denoised as a whole, without a model: which masks each step decides, and lengths that are refused."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from mlcpipe.bundle.model_info import Order, WholeAnswerInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import ORDERS, SamplingParams
from mlcpipe.runtime.serving.denoised import denoising_of
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.whole_answer import WholeAnswer, WholeCanvas

MASK = 99
LIMITS = Limits(256, prefill_chunk=256, masked_rows=128)
LLADA = WholeAnswerInfo(mask=MASK, orders=("low_confidence", "random"), shifted=False)


def test_the_table_of_orders_is_that_of_the_manifest() -> None:
    assert get_args(Order) == ORDERS


@pytest.mark.parametrize("steps", (1, 2, 7, 24, 64, 129, 512))
def test_the_schedule_is_that_of_the_program_in_float32(steps: int) -> None:
    torch = pytest.importorskip("torch", reason="the reference is Dream's schedule in torch")
    times = torch.linspace(1, 1e-3, steps + 1)
    how = WholeAnswer(MASK, 3, 64, 64, steps, "entropy")
    parts = [how.part(step) for step in range(steps)]
    assert parts[:-1] == (1 - times[1:-1] / times[:-2]).tolist() and parts[-1] == 1
    for left in (1, 5, 63, 64, 500):
        counts = [int(torch.tensor(left) * (1 - times[i + 1] / times[i])) for i in range(steps - 1)]
        assert [int(np.float32(left) * part) for part in parts] == [*counts, left]


def test_a_block_is_decided_after_the_other_and_sent_as_far_as_it_is_decided() -> None:
    canvas = WholeCanvas(WholeAnswer(MASK, 5, 6, 4, 2, "low_confidence"), [MASK] * 6)
    assert canvas.asked == [0, 1, 2, 3]
    canvas.keep([1, 2, 3, 4], [0.1, 0.4, 0.2, 0.3])  # two of four in each of two steps
    assert canvas.tokens == [MASK, 2, MASK, 4, MASK, MASK] and canvas.take(frozenset(), 9) == []
    canvas.keep([5, 6], [0.5, 0.5])
    assert canvas.take(frozenset(), 9) == [5, 2, 6, 4]
    assert canvas.tokens == [MASK, MASK] and canvas.asked == [0, 1]
    canvas.keep([7, 8], [0.1, 0.2])
    assert canvas.take(frozenset(), 9) == [] and canvas.asked == [0]
    canvas.keep([9], [0.1])
    assert canvas.take(frozenset(), 9) == [9, 8] and not canvas.asked and not canvas.tokens


def test_random_orders_ask_for_what_they_decide_alone() -> None:
    for order in ("origin", "random"):
        how = WholeAnswer(MASK, 2, 16, 16, 8, order, seed=4)
        canvas, asked = how.blank(2), []
        while canvas.asked:
            assert set(canvas.asked) <= {place for place, token in enumerate(canvas.tokens) if token == MASK}
            asked += canvas.asked
            canvas.keep([1] * len(canvas.asked), [0.5] * len(canvas.asked))
        assert sorted(asked) == [*range(16)] and asked != sorted(asked)
        assert how.blank(2).asked == WholeAnswer(MASK, 2, 16, 16, 8, order, seed=4).blank(2).asked


def asked(max_tokens: int, prompt: int = 100, **settings: Any) -> WholeAnswer:
    how = denoising_of(Request([3] * prompt, max_tokens, SamplingParams(seed=1, **settings)), LLADA, LIMITS)
    assert isinstance(how, WholeAnswer)
    return how


def test_lengths_are_those_that_steps_have_rows_for() -> None:
    assert (asked(40).answer, asked(40).block, asked(40).steps) == (40, 40, 40)
    assert asked(10_000).answer == 128, "the default, where as many as possible are asked"
    assert asked(10_000, prompt=250).answer == 6
    assert (asked(150, block=50).block, asked(150, block=50, steps=6).steps) == (50, 2)
    for prompt, tokens, given, what in (
        (256, 1, {}, "the prompt is too long; expected less than 256 tokens"),
        (100, 150, {}, "decided together; expected at most 128; found 150"),
        (100, 150, {"block": 50, "steps": 7}, "a multiple of the 3 blocks"),
        (100, 150, {"remasking": "origin"}, "remasking"),
    ):
        with pytest.raises(UsageError, match=what):
            asked(tokens, prompt, **given)
