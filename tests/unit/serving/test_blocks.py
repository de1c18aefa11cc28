"""Denoised blocks without a model: what stays of proposals, which pages are shared, which requests are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlcpipe.bundle.model_info import DiffusionInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.batch import Span, StepBuffer
from mlcpipe.runtime.serving.canvas import Canvas, Denoising
from mlcpipe.runtime.serving.denoised import check_options, denoising_of
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup, PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from tir_schedules.step_layout import SEES

MASK = 99
INFO = DiffusionInfo(mask=MASK, block=4, steps=4, threshold=0.9)
LIMITS = Limits(128, prefill_chunk=64)


def test_more_probable_tokens_than_the_threshold_stay_or_else_a_share() -> None:
    canvas = Canvas.blank(Denoising(8, 3, 0.9, MASK), 10)
    assert canvas.tokens == [MASK] * 6
    canvas.keep([1, 2, 3, 4, 5, 6], [0.1, 0.95, 0.3, 0.91, 0.92, 0.2])  # three, as many as a third of 8, rounded up
    assert canvas.tokens == [MASK, 2, MASK, 4, 5, MASK]
    canvas.keep([7, 8, 9], [0.5, 0.5, 0.4])  # the first of equal ones; the step's share is three
    assert canvas.tokens == [7, 2, 8, 4, 5, 9]


def test_edits_replace_what_is_decided_until_nothing_changes() -> None:
    canvas = Canvas(Denoising(4, 4, 0.9, MASK, 0.6, 3), [1, 2, MASK])
    assert canvas.asked == [0, 1, 2]
    canvas.keep([1, 5, 6], [0.9, 0.61, 0.2])
    assert canvas.tokens == [1, 5, 6]
    assert not canvas.finished(frozenset({1}), 1), "a token that ends the answer may be replaced"
    canvas.keep([7, 5, 6], [0.7, 0.9, 0.9])
    assert canvas.tokens == [7, 5, 6] and not canvas.finished(frozenset(), 9)
    again = replace(canvas, tokens=[*canvas.tokens])
    canvas.keep([8, 9, 9], [0.6, 0.5, 0.1])  # not above the threshold
    assert canvas.tokens == [7, 5, 6] and canvas.finished(frozenset(), 9)
    for token in (8, 9):
        assert not again.finished(frozenset(), 9)
        again.keep([token, 5, 6], [0.9] * 3)
    assert again.tokens == [9, 5, 6] and again.finished(frozenset(), 9), "all steps after the last mask are spent"


def test_an_answer_may_end_before_its_block() -> None:
    canvas = Canvas(Denoising(8, 8, 0.9, MASK), [1, 2, MASK, 3])
    assert not canvas.finished(frozenset({3}), 3)
    assert canvas.finished(frozenset({2}), 3)
    assert canvas.finished(frozenset(), 2)


def test_no_two_steps_take_one_random_number() -> None:
    canvas, numbers = Canvas.blank(Denoising(4, 4, 1.0, MASK), 0), set()
    while canvas.masked:
        numbers |= {canvas.number(place) for place in canvas.masked}
        canvas.keep([5] * len(canvas.masked), [0.5] * len(canvas.masked))
    assert len(numbers) == 4 + 3 + 2 + 1


def sequence(pool: PagePool, tokens: list[int], block: int) -> Sequence:
    return pool.sequence(0, ScheduledRequest(tuple(tokens), 100, denoising=Denoising(block, 4, 0.9, MASK)))


def computed(pool: PagePool, tree: PrefixTree, tokens: list[int], block: int) -> Sequence:
    one = sequence(pool, tokens, block)
    tree.take(one)
    assert pool.reserve(one, one.left)
    one.computed = one.request.denoising.begin(len(tokens)) if one.request.denoising else 0
    tree.add(one)
    return one


def test_a_page_is_shared_only_with_the_rest_of_its_block() -> None:
    pool = PagePool([PageGroup(40)])
    tree = PrefixTree(pool)
    first = computed(pool, tree, [*range(70)], 32)
    assert first.shared == 4
    other = [*range(16), *range(50, 66), *range(32, 70)]  # the same first page, and another one after it in its block
    assert tree.take(sequence(pool, other, 32)) == 0
    assert tree.take(sequence(pool, [*range(64), 1], 32)) == 64
    assert tree.take(sequence(pool, [*range(60)], 32)) == 32
    assert tree.take(sequence(pool, [*range(70)], 16)) == 0, "keys of another block"
    tree.invariants()


def test_parked_tokens_are_taken_in_whole_blocks() -> None:
    pool = PagePool([PageGroup(40)])
    tree = PrefixTree(pool)
    parked = computed(pool, tree, [*range(44)], 8)
    assert parked.computed == 40
    assert tree.shared(parked, sequence(pool, [*range(37), 5, 6, 7, 8], 8)) == 32
    assert tree.shared(parked, sequence(pool, [*range(44)], 8)) == 40


def test_the_step_says_what_each_row_sees() -> None:
    pool = PagePool([PageGroup(40)])
    spans = []
    for tokens, block, begin, rows in (([*range(20)], 4, 8, 10), ([*range(50)], 32, 0, 40), ([*range(9)], 1, 4, 1)):
        one = sequence(pool, tokens, block)
        assert pool.reserve(one, 64)
        spans.append(Span(one, begin, rows))
    step = StepBuffer().fill(spans)
    sees = step[step[SEES] : step[SEES] + 51]
    expected = [12] * 4 + [16] * 4 + [18] * 2 + [32] * 32 + [40] * 8 + [5]
    np.testing.assert_array_equal(sees, expected)


REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"logprobs": 1}, {}, "logprobs"),
    ({"prompt_logprobs": 1}, {}, "prompt_logprobs"),
    ({"prediction": [3]}, {}, "prediction"),
    ({}, {"repetition_penalty": 1.1}, "repetition_penalty"),
    ({}, {"presence_penalty": 0.5}, "presence_penalty"),
    ({}, {"frequency_penalty": 0.5}, "frequency_penalty"),
    ({}, {"block": 12}, "block; expected a divisor of 64"),
    ({}, {"block": 64}, "block; expected a divisor of 64, at most 32"),
    ({}, {"block": 8, "steps": 9}, "steps; expected at most the 8 tokens"),
)


@pytest.mark.parametrize(("request_fields", "settings", "what"), REFUSED, ids=[what for *_, what in REFUSED])
def test_what_needs_the_token_before_is_refused_by_name(
    request_fields: dict[str, Any], settings: dict[str, Any], what: str
) -> None:
    request = Request([3], 4, SamplingParams(**settings), **request_fields)
    with pytest.raises(UsageError, match=what):
        denoising_of(request, INFO, LIMITS)


def test_settings_of_the_checkpoint_and_of_a_request() -> None:
    request = Request([3], 4, SamplingParams())
    assert denoising_of(request, INFO, LIMITS) == Denoising(4, 4, 0.9, MASK, None, 16)
    own = replace(request, sampling=SamplingParams(block=32, steps=8, threshold=0.5))
    assert denoising_of(own, INFO, LIMITS) == Denoising(32, 8, 0.5, MASK, None, 16)
    edits = replace(request, sampling=SamplingParams(editing_threshold=0.0, max_post_steps=4))
    assert denoising_of(edits, INFO, LIMITS) == Denoising(4, 4, 0.9, MASK, 0.0, 4)
    info = INFO.model_copy(update={"editing_threshold": 0.5, "max_post_steps": 7})
    assert denoising_of(request, info, LIMITS) == Denoising(4, 4, 0.9, MASK, 0.5, 7)
    none = replace(request, sampling=SamplingParams(editing_threshold=1))
    assert denoising_of(none, info, LIMITS) == Denoising(4, 4, 0.9, MASK, None, 7)
    larger = replace(own, sampling=replace(own.sampling, steps=None))
    assert denoising_of(larger, INFO, LIMITS) == Denoising(
        32, 32, 0.5, MASK, None, 16
    )  # a step for each token, as the model has
    assert denoising_of(request, None, LIMITS) is None
    with pytest.raises(UsageError, match="remasking is for models that denoise answers"):
        denoising_of(replace(request, sampling=SamplingParams(remasking="random")), INFO, LIMITS)
    with pytest.raises(UsageError, match="block is for models that denoise blocks or answers"):
        denoising_of(own, None, LIMITS)
    for option, name in (("context_shift", "context shift"), ("drafts", "drafts"), ("prefixes", "saved prefixes")):
        with pytest.raises(UsageError, match=name):
            check_options(INFO, **{option: True})
        check_options(None, **{option: True})


@pytest.mark.parametrize("fields", ({"block": 12}, {"block": 0}, {"steps": 5}, {"threshold": 0.0}, {"mask": -1}))
def test_a_manifest_with_impossible_blocks_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="block|steps|threshold|mask"):
        DiffusionInfo.model_validate({**INFO.model_dump(), **fields})
