"""Shared by `/v1/embeddings` and `/v1/rerank`: an encoder, computed in one thread, with names and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.embedder import Embedder
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.runtime.serving.interface import EngineStats
from mlcpipe.runtime.text.text_pairs import EncodedText
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.metrics import Metrics
from mlcpipe.server.off_loop import OffLoop
from mlcpipe.server.service import Facts, limit_chars

_T = TypeVar("_T")
_Text = TypeVar("_Text")


class EmbeddingEngine:
    """The server's engine interface, for an engine without state between requests."""

    fault = ""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self.tokenizer = embedder.tokenizer  # a bundle without one is refused before the first request
        self.context_length = embedder.max_tokens
        self.vocab_size = embedder.manifest.model.vocab_size
        self.requests = self.tokens = self.ended = 0

    def stats(self) -> EngineStats:
        """Counts since the server began."""
        return EngineStats(running=self.requests, prompt=self.tokens, finished={"stop": self.ended})

    def close(self, drain_s: float = 0.0) -> None:
        """Nothing to end: nothing runs between requests."""


class EmbeddingService(OffLoop):
    """An encoder's service. Requests take turns by steps, so that a long one does not block a short one.

    It limits the length of texts for the tokenizer.
    """

    adapters: Mapping[str, Adapter] = {}

    def __init__(self, engine: EmbeddingEngine, facts: Facts, max_queue: int) -> None:
        super().__init__()
        self.engine, self.facts, self.embedder = engine, facts, engine.embedder
        self.tokenizer = engine.tokenizer
        limit_chars(self.tokenizer, engine.context_length)
        self.kind = self.embedder.info.task
        self.created = int(time.time())
        self.metrics = Metrics(engine.stats)
        self.meta = {"embedding": self.embedder.info.model_dump(mode="json"), **facts.about}
        self._max_queue = max_queue
        # The compiled library's threads serve one caller at a time.
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="mlcpipe-embeddings")

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.facts.names[0]

    def close(self) -> None:
        """End the threads."""
        self._steps.shutdown(wait=False, cancel_futures=True)
        super().close()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        self.facts.check(name)

    async def _step(self, work: Callable[[], _T]) -> _T:
        """Compute in the library's thread. Raises ApiError for the errors of mlcpipe."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._steps, work)
        except MlcpipeError as error:
            raise refused(error) from None

    async def rows(
        self,
        texts: Sequence[_Text],
        encode: Callable[[_Text], EncodedText],
        finish: Callable[[NDArray[np.float32]], NDArray[np.float32]],
        compute: Callable[[Sequence[EncodedText]], NDArray[np.float32]] | None = None,
    ) -> tuple[NDArray[np.float32], int]:
        """The results of `finish` for the rows of the texts of `encode`, and their token count. Raises ApiError.

        `compute` makes the rows of one of the embedder's batches; None is the embedder's own.
        """
        if self.engine.requests >= self._max_queue:
            message = f"{self.engine.requests} requests are waiting; try again later"
            raise ApiError(503, message, code="overloaded", retry_after_s=1.0)
        self.engine.requests += 1
        try:
            encoded: list[EncodedText] = []
            while len(encoded) < len(texts):
                encoded += await self.apart(partial(_some_encoded, texts, len(encoded), encode))
            batches = self.embedder.batches(encoded)
            parts = [await self._step(partial(compute or self.embedder.rows, batch)) for batch in batches]
            made, tokens = await self.apart(lambda: finish(np.concatenate(parts))), sum(len(one.ids) for one in encoded)
        finally:
            self.engine.requests -= 1
        self.engine.tokens += tokens
        self.engine.ended += 1
        return made, tokens


def _some_encoded(
    texts: Sequence[_Text], begin: int, encode: Callable[[_Text], EncodedText], turn_s: float = 0.05
) -> list[EncodedText]:
    """The texts of one turn, as many as its time allows; then another request has its turn."""
    end_s, made = time.monotonic() + turn_s, [encode(texts[begin])]
    while begin + len(made) < len(texts) and time.monotonic() < end_s:
        made.append(encode(texts[begin + len(made)]))
    return made
