"""Cached answers for questions that mean the same as an earlier one: `mlcpipe serve --semantic-cache`.

A question is the last message of a chat. All else of its request, the client's key included, must be equal. Its vector
is compared by cosine similarity with those of cached questions (exact search, one matrix-vector product). It pays where
many clients of one key ask the same in other words, and an answer to a similar question will do.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime.embedder import Embedder
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.server.answers import Answer, Answers, Delta, DeltaSource, Usage
from mlcpipe.server.bodies import CompletionFields
from mlcpipe.server.conversation import Conversation
from mlcpipe.server.embedding_service import EmbeddingEngine, EmbeddingService
from mlcpipe.server.errors import ApiError
from mlcpipe.server.service import Facts, Service

_MAX_QUEUE = 64  # questions waiting for their vectors; one more is answered without a lookup
# Fields about sending an answer, and clients' notes.
_NOT_COMPARED = {
    "messages", "stream", "stream_options", "store", "metadata", "prediction", "timings_per_token", "return_progress",
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """The last message of a request as f32[d] of length 1, and `space`, a digest of all else that must be equal."""

    space: bytes
    vector: NDArray[np.float32]


@dataclass(frozen=True)
class _CachedAnswer:
    space: bytes
    answer: Answer
    usage: Usage


class SemanticCache:
    """At most `entries` answers; the least recently used one is evicted.

    Raises UsageError for an encoder that scores pairs of texts.
    """

    def __init__(self, embedder: Embedder, threshold: float, entries: int) -> None:
        if embedder.info.task != "embed":
            raise UsageError(
                "--semantic-cache", where=embedder.path, expected="a model that embeds", found="a reranker"
            )
        self._service = EmbeddingService(EmbeddingEngine(embedder), Facts(("",)), _MAX_QUEUE)
        self._embedder, self._threshold = embedder, threshold
        self._vectors = np.zeros((entries, embedder.info.dimensions), np.float32)
        self._kept: OrderedDict[int, _CachedAnswer] = OrderedDict()  # by row of the vectors, the latest used one last

    def close(self) -> None:
        """End the encoder's thread."""
        self._service.close()

    async def question(
        self, request: Request, body: CompletionFields, conversation: Conversation, adapter: Adapter | None
    ) -> Question | None:
        """The question to the model or an adapter; None if its answer is not cached.

        Not cached: several answers at once, log-probabilities, or a last message that is not a user's text or that
        the encoder cannot take.
        """
        messages = conversation.messages
        last = messages[-1] if messages else None
        if not isinstance(last, dict) or last.get("role") != "user" or not isinstance(last.get("content"), str):
            return None
        if conversation.n != 1 or (conversation.logprobs, conversation.prompt_logprobs) != (None, None):
            return None
        text = last["content"]
        who = [request.headers.get(name, "") for name in ("authorization", "x-api-key", "api-key")]
        serial = None if adapter is None else adapter.serial
        user = (getattr(body, "metadata", None) or {}).get("user_id")  # as Anthropic's clients request it
        rest = (who, user, serial, *messages[:-1], {**last, "content": ""})
        try:
            rows, _ = await self._service.rows([text], self._embedder.encode, self._embedder.finished)
            space = await self._service.apart(partial(_digest, body, rest))
        except ApiError:  # too long, or too many at once
            return None
        return Question(space, rows[0] / max(float(np.linalg.norm(rows[0])), 1e-12))

    def find(self, question: Question) -> DeltaSource | None:
        """The cached answer to the most similar question, if it is similar enough."""
        rows = [row for row, kept in self._kept.items() if kept.space == question.space]
        if not rows:
            return None
        similar = self._vectors[rows] @ question.vector
        best = int(similar.argmax())
        if not similar[best] >= self._threshold:
            return None
        self._kept.move_to_end(rows[best])
        kept = self._kept[rows[best]]
        return _Repeated(kept.answer, replace(kept.usage, prompt_s=0.0, answer_s=0.0))

    def keep(self, question: Question, answer: Answer, usage: Usage) -> None:
        """Cache an answer, if it ended with `stop` and calls no tool."""
        if answer.finish != "stop" or answer.calls:
            return
        row = len(self._kept)
        if row == len(self._vectors):
            row, _ = self._kept.popitem(last=False)
        self._vectors[row] = question.vector
        self._kept[row] = _CachedAnswer(question.space, answer, replace(usage))


class CachingService(Service):
    """A service with a cache for chats; the arguments are those of `Service`."""

    def __init__(self, cache: SemanticCache, *service: Any) -> None:
        super().__init__(*service)
        self.semantic_cache = cache

    def close(self) -> None:
        """End the engine, the encoder and the threads."""
        self.semantic_cache.close()
        super().close()


def _digest(body: CompletionFields, rest: Sequence[object]) -> bytes:
    same = body.model_dump(mode="json", exclude=_NOT_COMPARED)
    return hashlib.sha256(json.dumps([same, rest], sort_keys=True).encode()).digest()


class _Repeated(DeltaSource):
    """A cached answer."""

    def __init__(self, answer: Answer, usage: Usage) -> None:
        super().__init__(usage)
        self._answer = answer

    def close(self) -> None:
        """Nothing to cancel."""

    async def deltas(self) -> AsyncIterator[Delta]:
        """All of it at once."""
        yield Delta(0, self._answer.text, self._answer.reasoning)
        yield Delta(0, finish=self._answer.finish)


class Keeping(DeltaSource):
    """A running answer, which `cache` stores when it ends."""

    def __init__(self, answers: Answers, cache: SemanticCache, question: Question) -> None:
        super().__init__(answers.usage)
        self._answers, self._cache, self._question = answers, cache, question

    def close(self) -> None:
        """Cancel unfinished answers."""
        self._answers.close()

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes."""
        answer = Answer()
        async for delta in self._answers.deltas():
            answer.add(delta)
            yield delta
        self._cache.keep(self._question, answer, self._answers.usage)
