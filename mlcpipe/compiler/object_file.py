"""An object file with what is known of its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlcpipe.compiler.scratch import Allocations


@dataclass(frozen=True)
class ObjectFile:
    """An object file, the functions in it, and the memory that each takes for the time of a call."""

    code: bytes
    names: tuple[str, ...]
    allocations: Mapping[str, Allocations] = field(default_factory=dict)
