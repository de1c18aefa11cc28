"""The stream of an answer, for `for` and `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from types import TracebackType

from mlcpipe.runtime.sampling_params import Chunk


class ChunkStream(Iterator[Chunk], AsyncIterator[Chunk]):
    """Chunks as they are made; the last has `finish_reason` and `stats`.

    `close`, or the end of a `with` statement, ends the answer.
    `async for` computes in a thread, so that the event loop stays free.
    """

    def __init__(self, chunks: Generator[Chunk, None, None]) -> None:
        self._chunks = chunks

    def __iter__(self) -> ChunkStream:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __aiter__(self) -> ChunkStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await asyncio.to_thread(next, self._chunks, None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def throw(self, error: BaseException | type[BaseException]) -> Chunk:
        """Raise an error where the next token would be computed; see `generator.throw`."""
        return self._chunks.throw(error)

    def close(self) -> None:
        """End the answer."""
        self._chunks.close()

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
