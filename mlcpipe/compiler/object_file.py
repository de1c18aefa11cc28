"""An object file with facts about its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlcpipe.compiler.scratch import Allocations


@dataclass(frozen=True)
class ObjectFile:
    """An object file, its functions, and the scratch memory of a call of each."""

    code: bytes
    names: tuple[str, ...]
    allocations: Mapping[str, Allocations] = field(default_factory=dict)
