"""An answer as a sequence of blocks, as in the newer APIs: reasoning, text, calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mlcpipe.server.answers import Answers, Delta

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """One block with its growing `text`; for a call, the arguments."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    text: str = ""


@dataclass(frozen=True)
class BlockEvent:
    """A block starts, continues with `text`, or ends."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


@dataclass
class Blocks:
    """Makes blocks of one answer. `made` are all started blocks; `last` is the answer's last delta."""

    made: list[Block] = field(default_factory=list)
    last: Delta | None = None
    _open: Block | None = None

    async def events(self, answers: Answers) -> AsyncIterator[BlockEvent]:
        """The events of the blocks. Raises ApiError."""
        async for delta in answers.deltas():
            for event in self._add(delta):
                yield event
            if delta.finish is not None:
                self.last = delta
        for event in self._close():
            yield event

    async def whole(self, answers: Answers) -> None:
        """Make all blocks. Raises ApiError."""
        async for _ in self.events(answers):
            pass

    def _add(self, delta: Delta) -> Iterator[BlockEvent]:
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.text:
            yield from self._grow("text", delta.text)
        for piece in delta.calls:
            if piece.name is not None:
                yield from self._close()
                yield from self._begin(Block(len(self.made), "call", piece.id, piece.name))
            if piece.arguments:
                yield from self._grow("call", piece.arguments)

    def _grow(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            yield from self._begin(Block(len(self.made), kind))
        block = self._open
        assert block is not None
        block.text += text
        yield BlockEvent("delta", block, text)

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        self._open = block
        self.made.append(block)
        yield BlockEvent("start", block)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockEvent("stop", block)
