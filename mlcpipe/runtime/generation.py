"""One answer from the events of its stream: text, log-probabilities, statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from mlcpipe.bundle import Manifest
from mlcpipe.runtime.answer_reader import CallingText
from mlcpipe.runtime.sampler import named_logprob
from mlcpipe.runtime.sampling_params import Chunk, Completion, Stats, TokenLogprob, ToolCall, add_pieces
from mlcpipe.runtime.serving.interface import TokenEvent
from mlcpipe.runtime.text.harmony import HarmonyText
from mlcpipe.runtime.text.streaming import TextStream
from mlcpipe.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Generation:
    """How the tokens of an answer become chunks.

    `text` turns them into text and finds where to stop, `tokenizer` names alternatives; both are None for a bundle
    without a tokenizer. `prompt_tokens` are those that the context has.
    """

    manifest: Manifest
    prompt_tokens: int
    text: TextStream | HarmonyText | CallingText | None
    tokenizer: Tokenizer | None
    load_s: float

    def chunks(
        self, steps: Generator[list[TokenEvent], None, None], begin: Callable[[], None] = lambda: None
    ) -> Generator[Chunk, None, None]:
        """A chunk for each token, the last with statistics; `steps` yields the events of each step, and is closed.

        `begin` is called at the first chunk. Time that the caller spends between chunks is not counted. Raises the
        error of an event.
        """
        seconds: list[float] = []
        count = kv_tokens = 0
        try:
            begin()
            while True:
                began = time.perf_counter()
                events = next(steps)
                kv_tokens += self.prompt_tokens + count if seconds else 0
                seconds.append(time.perf_counter() - began)
                for event in events:
                    if event.error is not None:
                        raise event.error
                    count += event.token is not None
                    text, reason = self._push(event)
                    calls = self.text.take_calls() if isinstance(self.text, CallingText) else ()
                    if reason is None:
                        yield Chunk(text, _ids(event), self._logprobs(event), tool_calls=calls)
                        continue
                    steps.close()
                    stats = self._stats(event, count, seconds, kv_tokens)
                    yield Chunk(text, _ids(event), self._logprobs(event), reason, stats, calls)
                    return
        finally:
            steps.close()

    def _push(self, event: TokenEvent) -> tuple[str, str | None]:
        """The text that an event adds, and the reason if the answer ends with it."""
        text = ""
        reason: str | None = event.finish_reason
        if self.text is not None:
            if event.token is not None:
                text = self.text.push(event.token)
            if self.text.stopped is not None:
                reason = "stop"
            if reason is not None:
                text += self.text.flush()
                reason = self.text.finish_reason(reason) if isinstance(self.text, CallingText) else reason
        return text, reason

    def _logprobs(self, event: TokenEvent) -> list[TokenLogprob] | None:
        if self.tokenizer is None or event.token is None or event.logprob is None:
            return None
        return [named_logprob(self.tokenizer, event.token, event.logprob, event.top)]

    def _stats(self, last: TokenEvent, count: int, seconds: list[float], kv_tokens: int) -> Stats:
        """Statistics of steps that took `seconds` each; those of decode read `kv_tokens` keys in each layer."""
        plan, steps = self.manifest.memory_plan, len(seconds) - 1
        return Stats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=last.cached_tokens,
            completion_tokens=count,
            prefill_s=seconds[0],
            decode_s=sum(seconds[1:]),
            load_s=self.load_s,
            decode_bytes=steps * plan.weights_read + kv_tokens * self.manifest.kv_bytes_per_token,
            dropped_tokens=last.dropped,
            cache_miss=last.cache_miss,
        )


def _ids(event: TokenEvent) -> list[int]:
    return [] if event.token is None else [event.token]


def complete(chunks: Iterator[Chunk]) -> Completion:
    """All chunks of an answer as one."""
    parts = list(chunks)
    last = parts[-1]
    assert last.stats is not None and last.finish_reason is not None
    logprobs: list[TokenLogprob] | None = [p for c in parts for p in c.logprobs or []] or None
    tokens = [token for c in parts for token in c.token_ids]
    calls: list[ToolCall] = []
    add_pieces(calls, (piece for c in parts for piece in c.tool_calls))
    return Completion("".join(c.text for c in parts), tokens, last.finish_reason, logprobs, last.stats, calls)
