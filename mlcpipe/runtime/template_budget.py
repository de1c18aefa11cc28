"""What one rendering of an untrusted template may use: steps, bytes, nesting, processor time.

Every limit but the last is counted, so that the same template fails at the same place on every machine. The clock
is the time of this thread alone: a busy machine does not fail an honest template.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jinja2 import TemplateRuntimeError, Undefined
from jinja2.runtime import Context, Macro
from jinja2.utils import Namespace

BUDGET = "mlcpipe budget"  # a key of the context that no template can write: names have no spaces

MAX_STEPS = (
    2_000_000  # a chat of 1000 messages takes 13 000 to 30 000 with the templates in tests/runtime_text
)
MAX_BYTES = 128 << 20  # of all values made, plus 32 times the input
MAX_TEXT = 8 << 20  # characters of one value written out, plus 4 times the input
MAX_ITEMS = 200_000  # of one list, plus the input's
MAX_RANGE = 100_000  # as jinja2.sandbox.MAX_RANGE
MAX_WIDTH = 10_000  # of padding, an indent, a number in a format
MAX_BITS = 4096  # of an integer
MAX_DEPTH = 100  # of nested lists and mappings
MAX_CALLS = 50  # of nested macro and recursive-loop calls
MAX_SECONDS = 2.0  # processor time of the thread
MAX_INPUT_TEXT = 64 << 20  # characters of all messages and extras together
MAX_INPUT_ITEMS = 2_000_000
_CLOCK_EVERY = 64  # steps between two looks at the clock

_SCALARS = (type(None), bool, int, float, str, range, Undefined)
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, *_VIEWS)


class LimitError(TemplateRuntimeError):
    """A template wants more than its budget, or something that a chat template has no use for."""


@dataclass(frozen=True)
class Weight:
    """A value written out in full, shared parts counted each time: items, characters, nesting."""

    items: int
    text: int
    depth: int


class Budget:
    """The counters of one rendering. `inputs` is the weight of the caller's data, which widens the limits."""

    def __init__(self, inputs: Weight = Weight(0, 0, 0)) -> None:
        self._steps = MAX_STEPS + 32 * inputs.items
        self._bytes = MAX_BYTES + 32 * inputs.text
        self.max_text = MAX_TEXT + 4 * inputs.text
        self.max_items = MAX_ITEMS + inputs.items
        self._calls = 0
        self._deadline = time.thread_time() + MAX_SECONDS
        self._next_clock = self._steps - _CLOCK_EVERY

    @classmethod
    def for_inputs(cls, inputs: object) -> Budget:
        """A budget widened by the weight of `inputs`. Raises LimitError for inputs past the caller's own limits."""
        return cls(cls(Weight(MAX_INPUT_ITEMS, MAX_INPUT_TEXT, 0)).weigh(inputs))

    def tick(self, steps: int = 1) -> None:
        """Counts work, and looks at the clock now and then."""
        self._steps -= steps
        if self._steps < self._next_clock:
            self._next_clock = self._steps - _CLOCK_EVERY
            if self._steps < 0:
                raise LimitError(f"more than {MAX_STEPS} steps")
            if time.thread_time() > self._deadline:
                raise LimitError(f"more than {MAX_SECONDS:g} seconds of processor time")

    def scan(self, value: Any) -> None:
        """Counts an operation that looks at all of `value`: an item is a step, 4096 characters are one.

        Thus the clock is looked at after each operation that may take long, such as a search in 8 MB of text.
        """
        if isinstance(value, str):
            self.tick(1 + (len(value) >> 12))
        elif hasattr(value, "__len__"):
            self.tick(1 + len(value))

    def charge(self, size: int) -> None:
        """Counts `size` bytes of a new value."""
        self._bytes -= size
        if self._bytes < 0:
            raise LimitError(f"more than {MAX_BYTES >> 20} MiB of text")

    def fits_text(self, length: int) -> None:
        """Refuses a text of `length` characters before it is made."""
        if length > self.max_text:
            raise LimitError(f"a text of {length} characters, more than {self.max_text}")

    def fits_items(self, count: int) -> None:
        """Refuses a list of `count` items before it is made."""
        if count > self.max_items:
            raise LimitError(f"a list of {count} items, more than {self.max_items}")

    def enter(self) -> None:
        """Counts a macro call; each needs its `leave`."""
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise LimitError(f"more than {MAX_CALLS} nested calls")

    def leave(self) -> None:
        self._calls -= 1

    def take(self, value: Any, *, fresh: bool = True) -> Any:
        """Counts a value that an operation made, and returns it; an iterator becomes a list.

        `fresh` where the parts of a container are new too, not only the container.
        """
        if isinstance(value, str):
            self.fits_text(len(value))
            self.charge(sys.getsizeof(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise LimitError(f"an integer of more than {MAX_BITS} bits")
        elif isinstance(value, _CONTAINERS):
            weight = self.weigh(value)
            self.charge(sys.getsizeof(value) + (4 * weight.text if fresh else 0))
        elif isinstance(value, Iterator):
            return self.take(list(islice(value, self.max_items + 1)), fresh=fresh)
        elif not isinstance(value, (*_SCALARS, Namespace, Macro)):
            raise LimitError(f"a value of type {type(value).__name__}")
        return value

    def weigh(self, value: Any) -> Weight:
        """The weight of plain data; raises LimitError for anything else, or for more than one value may hold.

        Since every container is weighed when it is made, with shared parts counted each time, no later operation on
        it (printing, comparing, hashing, `tojson`) can take longer than the weight: a list that holds itself twice,
        doubled 60 times, stops at the 18th.
        """
        items = text = deepest = 0
        stack: list[tuple[Any, int]] = [(value, 1)]
        while stack:
            part, depth = stack.pop()
            items += 1
            if isinstance(part, str):
                text += len(part) + 4
            elif isinstance(part, _CONTAINERS):
                if depth > MAX_DEPTH:
                    raise LimitError(f"lists nested deeper than {MAX_DEPTH}")
                deepest = max(deepest, depth)
                self.fits_items(items + len(part) + len(stack))
                children = [*part, *part.values()] if isinstance(part, dict) else part
                stack.extend((child, depth + 1) for child in children)
            elif isinstance(part, _SCALARS):
                text += 16 if not isinstance(part, int) else 16 + part.bit_length() // 3
            else:
                raise LimitError(f"a list that holds a {type(part).__name__}")
            if items > self.max_items:
                self.fits_items(items)
            if not items & 63:
                self.tick(64)
        self.tick(items & 63)
        self.fits_text(text)
        return Weight(items, text, deepest)

    def plain(self, *values: Any) -> None:
        """Refuses values that are not data: written out, a namespace or a function has no bounded text."""
        for value in values:
            if not isinstance(value, (*_SCALARS, *_CONTAINERS)):
                raise LimitError(f"a {type(value).__name__} used as a value")


def budget_of(context: Context) -> Budget:
    """The budget of the rendering that `context` belongs to."""
    budget: Budget = context.resolve_or_missing(BUDGET)
    return budget
