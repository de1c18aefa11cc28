"""An engine that answers from a script: for what a test must decide exactly, such as when Ctrl-C comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import Chunk, SamplingParams, Stats
from mlcpipe.runtime.text.chat_template import ChatTemplate


@dataclass
class FakeEngine:
    """Streams `answers` one after the other in pieces of `piece` characters; keeps what it was asked."""

    answers: list[str]
    piece: int = 3
    context_length: int = 4096
    threads: int = 2
    device: str = "CPU"
    on_host: bool = True
    delay: float = 0.0
    finish_reason: str = "stop"
    before_chunk: Callable[[int], None] = lambda number: None
    asked: list[tuple[Any, SamplingParams, int | None]] = field(default_factory=list)
    closed: int = 0
    template: str = "{% for m in messages %}{{ m.content }}{% endfor %}"

    @property
    def tokenizer(self) -> Any:
        """As much of a tokenizer as the chat uses; a token is a character."""
        template = ChatTemplate(self.template)
        return SimpleNamespace(chat_template=lambda: template, encode_chat=template.render)

    @property
    def manifest(self) -> Any:
        """As much of a manifest as the chat shows."""
        return SimpleNamespace(
            quantization="q4f16_1",
            model=SimpleNamespace(model_type="fake"),
            memory_plan=SimpleNamespace(weights_bytes=10**9),
            kv_bytes_per_token=1000,
        )

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        sampling: SamplingParams,
        max_tokens: int | None,
        allow_control_tokens: bool,
        thinking: bool | str | None,
        stream: bool,
    ) -> Iterator[Chunk]:
        """The next answer."""
        assert stream
        self.asked.append((list(messages), sampling, max_tokens))
        self.allowed, self.thinking = allow_control_tokens, thinking
        return self._stream(sum(len(message["content"]) for message in messages))

    def generate(
        self, prompt: str, *, sampling: SamplingParams, max_tokens: int | None, stream: bool
    ) -> Iterator[Chunk]:
        """The next answer, to a text without template."""
        assert stream
        self.asked.append((prompt, sampling, max_tokens))
        return self._stream(len(prompt))

    def _stream(self, prompt_tokens: int) -> Iterator[Chunk]:
        if prompt_tokens > self.context_length:
            raise UsageError("the prompt is longer than the context", found=prompt_tokens)
        text = self.answers.pop(0)
        pieces = [text[i : i + self.piece] for i in range(0, len(text), self.piece)]
        try:
            for number, piece in enumerate(pieces):
                self.before_chunk(number)
                time.sleep(self.delay)
                yield Chunk(piece, [number])
            yield Chunk("", [], None, self.finish_reason, Stats(prompt_tokens, 0, len(pieces), 0.1, 0.5, 0.0, 10**9))
        finally:
            self.closed += 1
