"""The integers of a forward, beside the same ones made one by one."""

from __future__ import annotations

import random
import sys
import time
from types import FrameType

import numpy as np
import pytest

from mlcpipe.runtime.serving import batch
from mlcpipe.runtime.serving.batch import Span, StepBuffer
from mlcpipe.runtime.serving.page_pool import PageGroup, PagePool
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from tir_schedules import step_layout as header
from tir_schedules.step_layout import PAGE


def sequences(pool: PagePool, rng: random.Random, count: int, tokens: int) -> list[Sequence]:
    """With pages in no order, and the last few of their tokens not computed."""
    made = [pool.sequence(i, ScheduledRequest((1,) * rng.randint(1, tokens), 9)) for i in range(count)]
    growing = list(made)
    while growing:
        one = rng.choice(growing)
        assert pool.reserve(one, 1)
        one.computed += 1
        pool.slide(one)
        if one.computed == len(one.tokens):
            growing.remove(one)
    for one in made:
        assert pool.reserve(one, 50)
    return made


def array(step: list[int], name: int, size: int) -> list[int]:
    return step[step[name] : step[name] + size]


@pytest.mark.parametrize(
    "groups",
    [(PageGroup(400),), (PageGroup(400), PageGroup(400, 40)), (PageGroup(400), PageGroup(400, 40), PageGroup(400, 70))],
    ids=["one", "window", "windows"],
)
@pytest.mark.parametrize("rows", [1, 2, 33], ids=str)
def test_every_integer_is_what_the_layout_says(groups: tuple[PageGroup, ...], rows: int) -> None:
    rng = random.Random(rows)
    buffer = StepBuffer()
    for count in (5, 1, 7):
        made = sequences(PagePool(groups), rng, count, 300)
        spans = [Span(one, rng.randint(0, one.computed), rng.randint(1, rows)) for one in made]
        step = buffer.fill(spans).tolist()
        n = sum(span.rows for span in spans)
        assert step[header.SEQUENCES : header.ROWS + 1] == [count, n] and step[9 : header.TABLES] == [0] * 7
        each = [(s, span, span.begin + i) for s, span in enumerate(spans) for i in range(span.rows)]
        tables = [span.sequence.tables for span in spans]
        assert array(step, header.POSITION, n) == [position for _, _, position in each]
        assert array(step, header.SEQUENCE, n) == [s for s, _, _ in each]
        slots = [tables[s][0][position // PAGE] * PAGE + position % PAGE for s, _, position in each]
        assert array(step, header.PLACE, n) == slots
        lengths = [max(len(span.sequence.request.tokens), position + 1) for _, span, position in each]
        assert array(step, header.ROPE_LENGTH, n) == lengths
        begins = [sum(span.rows for span in spans[:s]) for s in range(count + 1)]
        assert array(step, header.ROW_BEGIN, count + 1) == begins
        assert array(step, header.KEYS, count) == [span.begin + span.rows for span in spans]
        begins = [sum(len(table[0]) for table in tables[:s]) for s in range(count + 1)]
        assert array(step, header.TABLE_BEGIN, count + 1) == begins
        for group in range(len(groups)):
            found = array(step, header.TABLES + group, begins[-1])
            assert found == [page for table in tables for page in table[group]]
        used = header.HEADER + 4 * n + 3 * count + 2 + begins[-1] * len(groups)
        assert used <= len(step) == 1 << (len(step) - 1).bit_length()


def test_steps_have_the_same_size_and_address() -> None:
    made = sequences(PagePool([PageGroup(400)]), random.Random(0), 4, 200)
    buffer = StepBuffer()
    steps = [buffer.fill([Span(one, one.computed, 1) for one in made[:n]]) for n in (1, 4, 2)]
    assert len({(len(step), step.ctypes.data) for step in steps}) == 1


@pytest.mark.alone
def test_filling_costs_little() -> None:
    """A row with 2000 tokens before it, beside numpy's making an array of as many integers as it has pages."""
    made = sequences(PagePool([PageGroup(8192)]), random.Random(0), 32, 3000)
    spans, buffer = [Span(one, one.computed, 1) for one in made], StepBuffer()
    pages = list(range(125))

    def seconds(call: object, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            call()  # type: ignore[operator]
        return (time.perf_counter() - began) / times

    rounds = [(seconds(lambda: buffer.fill(spans), 20), 32 * seconds(lambda: np.array(pages), 200)) for _ in range(9)]
    fill_s, arrays_s = (min(one) for one in zip(*rounds))
    assert fill_s < 2 * arrays_s  # 0.5 to 0.8


def test_a_step_that_ctrl_c_ended_spoils_no_later_one() -> None:
    made = sequences(PagePool([PageGroup(400)]), random.Random(0), 4, 200)
    one, other = [Span(made[0], 0, 40)], [Span(sequence, 3, 2) for sequence in made]
    expected = StepBuffer().fill(one).tolist()

    def after(lines: int) -> bool:
        """Whether an interrupt came: after so many lines of a step of another shape."""
        buffer, left = StepBuffer(), lines
        buffer.fill(one)

        def trace(frame: FrameType, event: str, argument: object) -> object:
            nonlocal left
            left -= event == "line" and frame.f_code.co_filename == batch.__file__
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)  # type: ignore[arg-type]
            buffer.fill(other)
        except KeyboardInterrupt:
            assert buffer.fill(one).tolist()[: len(expected)] == expected, lines
            return True
        finally:
            sys.settrace(before)
        return False

    assert sum(after(lines) for lines in range(200)) > 30
