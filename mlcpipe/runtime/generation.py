"""One answer: the tokens of a generation, their text, and its statistics."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.sampler import Row, token_logprob
from mlcpipe.runtime.sampling_params import Chunk, Completion, Stats, TokenLogprob
from mlcpipe.runtime.serving.context_shift import tokens_to_drop, without_dropped
from mlcpipe.runtime.text.harmony import HarmonyText
from mlcpipe.runtime.text.streaming import TextStream
from mlcpipe.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Generation:
    """Generates at most `max_tokens` tokens after `prompt`.

    With `shifts` the answer continues when the context is full; `prompt` lacks the first `dropped` dropped tokens.
    `text` turns tokens into text and finds where to stop, `tokenizer` names alternatives; both are None for a bundle
    without a tokenizer.
    """

    model: LoadedModel
    prompt: list[int]
    row: Row
    max_tokens: int
    text: TextStream | HarmonyText | None
    tokenizer: Tokenizer | None
    shifts: bool = False
    dropped: int = 0

    def stream(self, load_s: float) -> Generator[Chunk, None, None]:
        """The chunks, the last with statistics. Time that the caller spends between chunks is not counted."""
        cached = self.model.reusable(self.prompt)
        sequence = _Text(self.prompt, self.model.bundle.context_length if self.shifts else sys.maxsize)
        chunks, kv_tokens = self._chunks(sequence), 0
        seconds: list[float] = []
        while True:
            began = time.perf_counter()
            with self.model.exclusive():
                chunk = next(chunks)
                kv_tokens += self.model.length if seconds else 0
            seconds.append(time.perf_counter() - began)
            if chunk.finish_reason is not None:
                stats = self._stats(cached, seconds, load_s, kv_tokens)
                yield replace(chunk, stats=replace(stats, dropped_tokens=self.dropped + sequence.dropped))
                return
            yield chunk

    def _chunks(self, sequence: _Text) -> Iterator[Chunk]:
        """One chunk per token; the last has a finish reason."""
        model, row = self.model, self.row
        token = model.prefill(sequence.tokens, row)
        for count in itertools.count(1):
            revision = model.revision
            chunk = self._chunk(token, count)
            yield chunk
            if chunk.finish_reason is not None:
                return
            shifted = sequence.push(token)
            if shifted:
                model.reset()
            if model.revision == revision:
                token = model.step(token, row)
            else:  # shifted, or another call used the cache meanwhile
                token = model.prefill(sequence.tokens, row, sequence.dropped)

    def _chunk(self, token: int, count: int) -> Chunk:
        logprobs = None
        if self.tokenizer is not None and self.row.params.logprobs:
            logprobs = [token_logprob(self.model.read_logits(), token, self.row.params, self.tokenizer)]
        text, stopped = "", False
        if self.text is not None:
            text, stopped = self.text.push(token), self.text.stopped is not None
        if not stopped and count < self.max_tokens:
            return Chunk(text, [token], logprobs)
        if self.text is not None:
            text += self.text.flush()
        return Chunk(text, [token], logprobs, "stop" if stopped else "length")

    def _stats(self, cached: int, seconds: list[float], load_s: float, kv_tokens: int) -> Stats:
        """Statistics of tokens that took `seconds` each; decode steps read `kv_tokens` keys in each layer."""
        plan, steps = self.model.bundle.manifest.memory_plan, len(seconds) - 1
        return Stats(
            prompt_tokens=len(self.prompt),
            cached_tokens=cached,
            completion_tokens=len(seconds),
            prefill_s=seconds[0],
            decode_s=sum(seconds[1:]),
            load_s=load_s,
            decode_bytes=steps * plan.weights_read + kv_tokens * self.model.bundle.manifest.kv_bytes_per_token,
        )


class _Text:
    """The tokens of prompt and answer that are still in a context of `context` tokens."""

    def __init__(self, prompt: list[int], context: int) -> None:
        self.tokens, self.dropped, self._context = list(prompt), 0, context

    def push(self, token: int) -> bool:
        """Append a token -> whether others were dropped for it."""
        self.tokens.append(token)
        dropped = tokens_to_drop(len(self.tokens), self._context)
        if dropped:
            self.tokens = without_dropped(self.tokens, dropped)
            self.dropped += dropped
        return bool(dropped)


def complete(chunks: Iterator[Chunk]) -> Completion:
    """All chunks of an answer as one."""
    parts = list(chunks)
    last = parts[-1]
    assert last.stats is not None and last.finish_reason is not None
    logprobs: list[TokenLogprob] | None = [p for c in parts for p in c.logprobs or []] or None
    tokens = [token for c in parts for token in c.token_ids]
    return Completion("".join(c.text for c in parts), tokens, last.finish_reason, logprobs, last.stats)
