"""Design spaces: the choices of `mlcpipe tune` for a kernel, and the valid records of them.

A rule that has choices states them for each range of rows that its kernel tells apart; the names are knobs of the
target's [schedule], or knobs that only records set. Finite, and small enough to be listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Choice = Mapping[str, int]


@dataclass(frozen=True)
class Space:
    """The choices for one range of rows of one kernel.

    `bucket` names the range, `rows` is a size in it to measure with (attention: `rows` queries after `keys` cached
    tokens), `family` what the user calls such kernels (gemv, gemm, ...). `default` is what the kernel has without a
    record. `problem(choice)` says why a choice cannot be compiled, or nothing.
    """

    bucket: str
    rows: int
    family: str
    knobs: Mapping[str, tuple[int, ...]]
    default: Choice
    problem: Callable[[Choice], str]
    keys: int = 0

    def check(self, choice: Mapping[str, object]) -> str:
        """Why a choice from elsewhere is not in this space, or ""."""
        for name, value in choice.items():
            if name not in self.knobs:
                return f"unknown knob {name}"
            if isinstance(value, bool) or value not in self.knobs[name]:
                return f"{name} is {value!r}, not one of {', '.join(map(str, self.knobs[name]))}"
        missing = [name for name in self.knobs if name not in choice]
        if missing:
            return f"{missing[0]} is missing"
        return self.problem({name: int(str(value)) for name, value in choice.items()})

    def choices(self) -> Iterator[dict[str, int]]:
        """Every choice that can be compiled."""
        for values in itertools.product(*self.knobs.values()):
            choice = dict(zip(self.knobs, values))
            if not self.problem(choice):
                yield choice


def with_default(knobs: Mapping[str, tuple[int, ...]], default: Choice) -> dict[str, tuple[int, ...]]:
    """The values of every knob, the default's among them."""
    return {name: tuple(sorted({*values, default[name]})) for name, values in knobs.items()}
