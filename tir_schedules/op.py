"""The tag that states the operation of a PrimFunc, so that a schedule rule need not guess it from loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import tirx

_KIND = "mlcpipe.op"
_FACTS = "mlcpipe.facts"
_BY_HAND = "mlcpipe.by_hand"


@dataclass(frozen=True)
class Op:
    """What a PrimFunc computes: a kind (`matmul`, `rms_norm`, ...) and its static facts."""

    kind: str
    facts: Mapping[str, int | float | str]

    def int(self, name: str) -> int:
        """An integer fact. Raises KeyError when the definition did not state it."""
        return int(self.facts[name])

    def str(self, name: str) -> str:
        """A text fact. Raises KeyError when the definition did not state it."""
        return str(self.facts[name])

    @property
    def many_rows(self) -> bool:
        """Whether the rows are prefill rows (`rows="many"`); otherwise they are decode rows and rows of logits."""
        return self.facts.get("rows") == "many"

    @property
    def may_be_few(self) -> bool:
        """Whether the rows may be decode rows: if the definition does not say, their number decides."""
        return not self.many_rows

    @property
    def may_be_many(self) -> bool:
        """Whether the rows may be prefill rows."""
        return self.facts.get("rows") != "few"


_OPAQUE = 8  # TVM's OpPatternKind: FuseOps leaves the function whole


def tag(func: tirx.PrimFunc, kind: str, **facts: int | float | str) -> tirx.PrimFunc:
    """Return `func` with its operation stated."""
    return func.without_attr("global_symbol").with_attr(
        {_KIND: kind, _FACTS: dict(facts), "op_pattern": _OPAQUE, "tirx.noalias": True}
    )


def with_facts(func: tirx.PrimFunc, **facts: int | float | str) -> tirx.PrimFunc:
    """A tagged function with more facts."""
    return func.with_attr(_FACTS, {**func.attrs[_FACTS], **facts})


def by_hand(
    functions: Mapping[str, tirx.PrimFunc], prefix: str = "", **facts: int | float | str
) -> dict[str, tirx.PrimFunc]:
    """Functions that were written with their schedules, tagged with their names."""
    attrs = {"tirx.is_scheduled": True, _BY_HAND: True}
    return {name: tag(func, prefix + name, **facts).with_attr(attrs) for name, func in functions.items()}


def is_by_hand(func: tirx.PrimFunc) -> bool:
    """Whether a function came with its schedule, or a rule replaced such a function."""
    return func.attrs is not None and _BY_HAND in func.attrs


def op_of(func: tirx.PrimFunc) -> Op | None:
    """The operation that `func` was tagged with, or None for a function that fusion made."""
    if func.attrs is None or _KIND not in func.attrs:
        return None
    facts = {str(k): v for k, v in func.attrs[_FACTS].items()}
    return Op(str(func.attrs[_KIND]), {k: getattr(v, "value", v) for k, v in facts.items()})


def scheduled(kernel: tirx.PrimFunc, definition: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give a hand-scheduled kernel the tag of the definition that it replaces."""
    attrs = {k: definition.attrs[k] for k in (_KIND, _FACTS, _BY_HAND) if k in definition.attrs}
    return kernel.with_attr(attrs | {"tirx.is_scheduled": True, "tirx.noalias": True, "op_pattern": _OPAQUE})
