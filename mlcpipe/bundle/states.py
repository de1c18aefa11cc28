"""The state table: the tensors of a model that outlive a step, and their sizes.

A block declares its states next to its parameters, the manifest lists them in the order of the library's argument, and
runtimes allocate bytes, hand out ids and copy units, without knowing what is in them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mlcpipe.bundle.schema import Count, Frozen, Name, Positive
from mlcpipe.support.json_files import Items
from tir_schedules.step_layout import MAX_GROUPS, PAGE

_ITEM_BYTES = {"float32": 4, "float16": 2, "int8": 1}
_MAX_UNIT_BYTES = 1 << 40

Dtype = Literal["float32", "float16", "int8"]


class Part(Frozen):
    """An array in a unit of a state, such as the keys of a head."""

    name: Name
    dtype: Dtype
    shape: Annotated[Items[Positive], Field(min_length=1, max_length=8)]
    token_axis: Count | None = Field(default=None, description="the axis of a page's tokens; None in a slot")

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class State(Frozen):
    """A tensor dtype[units, unit_bytes / itemsize] that layers keep. Layers may share one.

    A unit has all `parts`, one after another, `copies` times. It is a page of 16 tokens, or a slot: the state of a
    sequence of any length.
    """

    name: Name
    kind: Literal["pages", "slot"]
    parts: Annotated[Items[Part], Field(min_length=1, max_length=64)]
    copies: Positive = Field(default=1, description="such as KV heads")
    window: Count = Field(default=0, description="tokens that a query sees, itself included; 0: all")
    dtype: Dtype = Field(default="int8", description="of the library's argument")
    layers: Items[Count]

    @model_validator(mode="after")
    def _check(self) -> State:
        if self.unit_bytes > _MAX_UNIT_BYTES or self.unit_bytes % _ITEM_BYTES[self.dtype]:
            raise ValueError(f"a state of at most {_MAX_UNIT_BYTES} bytes, whole numbers of {self.dtype}")
        if self.kind == "slot" and (self.window or any(part.token_axis is not None for part in self.parts)):
            raise ValueError("a slot without tokens or a window")
        for part in self.parts if self.kind == "pages" else ():
            axis = part.token_axis
            if axis is None or axis >= len(part.shape) or part.shape[axis] != PAGE:
                raise ValueError(f"pages with an axis of {PAGE} tokens")
        return self

    @property
    def unit_bytes(self) -> int:
        """Bytes of a page or a slot."""
        return self.copies * sum(part.nbytes for part in self.parts)

    @property
    def unit_items(self) -> int:
        """Numbers of `dtype` in a unit."""
        return self.unit_bytes // _ITEM_BYTES[self.dtype]


States = Annotated[Items[State], Field(max_length=10_000)]


def windows_of(states: Sequence[State]) -> tuple[int, ...]:
    """The window of each group of pages, 0 (all tokens) first. There is always a group."""
    return tuple(sorted({state.window for state in states if state.kind == "pages"} or {0}))


def group_of(states: Sequence[State], state: State) -> int:
    """The group of a state in pages."""
    return windows_of(states).index(state.window)


def first_page(window: int, position: int) -> int:
    """The first page that a query at this position, or a later one, needs of a group with this window.

    The last full page is always needed: in the prefix tree, later pages are its children.
    """
    return max(0, position + 1 - max(window, 2 * PAGE)) // PAGE if window else 0


def check_states(states: tuple[State, ...]) -> tuple[State, ...]:
    """The checked table. Raises ValueError for one that no runtime could serve."""
    if len({state.name for state in states}) < len(states):
        raise ValueError("states with names of their own")
    if len(windows_of(states)) > MAX_GROUPS:
        raise ValueError(f"at most {MAX_GROUPS} windows")
    return states


def kv_bytes_per_token(states: Sequence[State]) -> int:
    """Bytes of a token in the pages of all states."""
    return sum(state.unit_bytes for state in states if state.kind == "pages") // PAGE


def slot_bytes(states: Sequence[State]) -> int:
    """Bytes of a slot of all states."""
    return sum(state.unit_bytes for state in states if state.kind == "slot")


def states_hash(states: Sequence[State]) -> str:
    """SHA-256 of a line per state, which tells saved chats of different layouts apart."""
    lines = []
    for state in states:
        parts = (
            f" {part.name}:{part.dtype}:{'x'.join(map(str, part.shape))}:"
            f"{'-' if part.token_axis is None else part.token_axis}"
            for part in state.parts
        )
        head = f"{state.name} {state.kind} {state.window} {state.dtype} {state.copies}"
        lines.append("".join((head, *parts, "\n")))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
