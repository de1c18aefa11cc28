"""Schedule rules, for every target: the interface of a rule, and the order in which rules are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
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


@dataclass(frozen=True)
class NamedRule:
    """A rule, the kinds of operation that it is for (none: any), and the more general rule that it comes `before`."""

    name: str
    kinds: tuple[str, ...]
    rule: Rule
    before: str = ""


Rules = tuple[NamedRule, ...]


@cache
def rules_in(kernels: str) -> Rules:
    """The `RULES` of all modules of the package tir_schedules.<kernels>, in the order in which they are asked.

    Rules for any kind of operation come last.
    """
    package = import_module(f"tir_schedules.{kernels}")
    modules = [import_module(found.name) for found in walk_packages(package.__path__, f"{package.__name__}.")]
    rules: list[NamedRule] = [rule for module in modules for rule in getattr(module, "RULES", ())]
    named = {rule.name: rule for rule in rules}

    def rank(rule: NamedRule) -> int:
        return rank(named[rule.before]) - 1 if rule.before else int(not rule.kinds)

    return tuple(sorted(rules, key=lambda rule: (rank(rule), rule.name)))


def hand_written(make: Callable[[tirx.PrimFunc, Op, Knobs], tirx.PrimFunc | Declined]) -> Rule:
    """A rule that replaces a tagged definition by a hand-written kernel."""

    def rule(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
        if op is None:
            return Declined("not tagged")
        kernel = make(func, op, knobs)
        return kernel if isinstance(kernel, Declined) else scheduled(kernel, func)

    return rule


def with_output_dtype(make: Callable[[Op, str, Knobs], tirx.PrimFunc | Declined]) -> Rule:
    """The rule of a hand-written kernel whose maker takes the dtype of its output."""
    return hand_written(lambda func, op, knobs: make(op, str(func.params[-1].ty.dtype), knobs))
