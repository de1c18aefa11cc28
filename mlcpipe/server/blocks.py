"""An answer as a sequence of blocks, as in the newer APIs: reasoning, text, calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mlcpipe.runtime.sampling_params import TokenLogprob
from mlcpipe.server.answers import Answers, Delta

Kind = Literal["reasoning", "text", "call", "custom"]


@dataclass
class Block:
    """One block with its growing `text`: for a call the arguments, for one of a custom tool the input.

    `logprobs` are of the tokens of a text.
    """

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class BlockEvent:
    """A block starts, continues with `text` and its tokens, or ends."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass
class Blocks:
    """Makes blocks of one answer. `made` are all started blocks; `last` is the answer's last delta."""

    made: list[Block] = field(default_factory=list)
    last: Delta | None = None
    _open: Block | None = None
    _tokens: list[TokenLogprob] = field(default_factory=list)  # of a text that has not come

    async def events(self, answers: Answers) -> AsyncIterator[BlockEvent]:
        """The events of the blocks. Raises ApiError."""
        async for delta in answers.deltas():
            for event in self.taken(delta):
                yield event
        for event in self.closed():
            yield event

    async def whole(self, answers: Answers) -> None:
        """Make all blocks. Raises ApiError."""
        async for _ in self.events(answers):
            pass

    def taken(self, delta: Delta) -> Iterator[BlockEvent]:
        """The events of one delta."""
        self._tokens += delta.logprobs
        if delta.reasoning:
            self._tokens = self._tokens if delta.text else []
            yield from self._grow("reasoning", delta.reasoning)
        if delta.text:
            yield from self._grow("text", delta.text)
        for piece in delta.calls:
            kind: Kind = "custom" if piece.custom else "call"
            if piece.name is not None:
                yield from self.closed()
                yield from self._begin(Block(len(self.made), kind, piece.id, piece.name))
            if piece.arguments:
                yield from self._grow(kind, piece.arguments)
        if delta.finish is not None:
            self.last = delta

    def _grow(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self.closed()
            yield from self._begin(Block(len(self.made), kind))
        block, tokens = self._open, tuple(self._tokens if kind == "text" else ())
        assert block is not None
        block.text += text
        block.logprobs += tokens
        self._tokens = []
        yield BlockEvent("delta", block, text, tokens)

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        self._open = block
        self.made.append(block)
        yield BlockEvent("start", block)

    def closed(self) -> Iterator[BlockEvent]:
        """The end of the block that is open, if any."""
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockEvent("stop", block)
