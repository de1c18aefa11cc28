"""Schedule rules, whatever the target: what a rule takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx

from tir_schedules.op import Op, scheduled

Knobs = Mapping[str, "int | str"]  # the [schedule] of a target, with a tuning record's choices in their place


@dataclass(frozen=True)
class Declined:
    """A rule's answer when it does not apply, with the reason that `mlcpipe inspect` shows."""

    reason: str


class Rule(Protocol):
    """Schedules a PrimFunc or declines; `op` is None for a function that is not tagged."""

    def __call__(self, func: tirx.PrimFunc, op: Op | None, knobs: Knobs, /) -> tirx.PrimFunc | Declined: ...


# Name, the kinds of operation that it is for (none: any), rule. They are asked in their order.
Rules = tuple[tuple[str, tuple[str, ...], Rule], ...]


def hand_written(make: Callable[[tirx.PrimFunc, Op, Knobs], tirx.PrimFunc | Declined]) -> Rule:
    """A rule that replaces a tagged definition by a hand-written kernel."""

    def rule(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
        if op is None:
            return Declined("not tagged")
        kernel = make(func, op, knobs)
        return kernel if isinstance(kernel, Declined) else scheduled(kernel, func)

    return rule
