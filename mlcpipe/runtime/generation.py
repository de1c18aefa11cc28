"""One answer: the tokens of a generation, their text, and its statistics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.sampler import Row, token_logprob
from mlcpipe.runtime.sampling_params import Chunk, Completion, Stats, TokenLogprob
from mlcpipe.runtime.text.streaming import TextStream
from mlcpipe.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Generation:
    """What to generate, and with what: at most `max_tokens` tokens after `prompt`.

    `text` turns tokens into text and knows where to stop, `tokenizer` names alternatives; both are None for a bundle
    without a tokenizer.
    """

    model: LoadedModel
    prompt: list[int]
    row: Row
    max_tokens: int
    text: TextStream | None
    tokenizer: Tokenizer | None

    def stream(self, load_s: float) -> Generator[Chunk, None, None]:
        """The chunks, the last with statistics. Time that the caller spends between chunks is not counted."""
        cached = self.model.reusable(self.prompt)
        chunks, seconds = self._chunks(), []
        while True:
            began = time.perf_counter()
            with self.model.exclusive():
                chunk = next(chunks)
            seconds.append(time.perf_counter() - began)
            if chunk.finish_reason is not None:
                yield replace(chunk, stats=self._stats(cached, seconds, load_s))
                return
            yield chunk

    def _chunks(self) -> Iterator[Chunk]:
        """One chunk a token; the last has a finish reason."""
        model, row, tokens = self.model, self.row, list(self.prompt)
        token = model.prefill(tokens, row)
        for count in itertools.count(1):
            revision = model.revision
            chunk = self._chunk(token, count)
            yield chunk
            if chunk.finish_reason is not None:
                return
            tokens.append(token)
            if model.revision == revision:
                token = model.step(token, row)
            else:  # another call used the cache meanwhile
                token = model.prefill(tokens, row)

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

    def _stats(self, cached: int, seconds: list[float], load_s: float) -> Stats:
        """Statistics of tokens that took so many seconds each."""
        plan, prompt, steps = self.model.bundle.manifest.memory_plan, len(self.prompt), len(seconds) - 1
        # Step i of n reads the keys and values of prompt + i tokens.
        kv_tokens = steps * prompt + steps * (steps + 1) // 2
        return Stats(
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=len(seconds),
            prefill_s=seconds[0],
            decode_s=sum(seconds[1:]),
            load_s=load_s,
            decode_bytes=steps * plan.weights_read + kv_tokens * plan.kv_bytes_per_token,
        )


def complete(chunks: Iterator[Chunk]) -> Completion:
    """All chunks of an answer as one."""
    parts = list(chunks)
    last = parts[-1]
    assert last.stats is not None and last.finish_reason is not None
    logprobs: list[TokenLogprob] | None = [p for c in parts for p in c.logprobs or []] or None
    tokens = [token for c in parts for token in c.token_ids]
    return Completion("".join(c.text for c in parts), tokens, last.finish_reason, logprobs, last.stats)
