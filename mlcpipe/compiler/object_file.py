"""An object file with facts about its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlcpipe.compiler.scratch import Allocations


@dataclass(frozen=True)
class ObjectFile:
    """An object file, its functions, and the scratch memory of a call of each."""

    code: bytes
    names: tuple[str, ...]
    allocations: Mapping[str, Allocations] = field(default_factory=dict)

    def to_entry(self) -> tuple[Any, bytes]:
        """What the store of kernels holds: all but the code as JSON, and the code."""
        return [self.names, {name: one.to_json() for name, one in self.allocations.items()}], self.code

    @classmethod
    def from_entry(cls, facts: Any, code: bytes) -> ObjectFile:
        """The same again. Raises ValueError for other facts."""
        names, found = facts
        return cls(code, tuple(names), {name: Allocations.from_json(one) for name, one in found.items()})
