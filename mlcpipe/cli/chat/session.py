"""A chat with one engine: messages, settings, and answering a question."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mlcpipe.cli.chat.interrupt import Interruptible
from mlcpipe.cli.chat.markdown import Renderer
from mlcpipe.cli.chat.settings import Settings
from mlcpipe.cli.chat.transcript import (
    Message,
    Transcript,
    load_transcript,
    save_transcript,
    transcript_of,
    well_formed,
)
from mlcpipe.errors import UsageError
from mlcpipe.runtime.chat_file import is_chat_file

if TYPE_CHECKING:
    from mlcpipe import Engine
    from mlcpipe.runtime.sampling_params import Chunk, Stats


@dataclass(frozen=True)
class Answer:
    """An answer: `finish_reason` is "stop", "length" or "interrupted" (then `stats` is None)."""

    text: str
    finish_reason: str
    stats: Stats | None
    context_full: bool


class Session:
    """The state of a chat. Every method leaves it usable, whatever is raised."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        *,
        system: str = "",
        raw: bool = False,
        model: str = "",
        allow_control_tokens: bool = False,
    ) -> None:
        self._engine = engine
        self._model = model
        self._raw = raw
        self._allow_control_tokens = allow_control_tokens
        self._turns: list[Message] = []
        self._attempt = 0
        self.settings = settings
        self.system = well_formed(system)
        self.last_stats: Stats | None = None

    @property
    def messages(self) -> list[Message]:
        """The messages that the model sees: the system message, if any, and all turns."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self._turns]

    def ask(self, question: str, renderer: Renderer) -> Answer:
        """Answer a question and remember both; a question without an answer is forgotten.

        Raises MlcpipeError, and KeyboardInterrupt if Ctrl-C came before the first token.
        """
        self._attempt = 0
        return self._answer(well_formed(question), renderer)

    def regenerate(self, renderer: Renderer) -> Answer:
        """Answer the last question again; a fixed seed moves by one. Raises UsageError if there is none."""
        if not self._turns:
            raise UsageError("there is no answer to try again", next_step="ask something first")
        turns = self._turns
        self._attempt += 1
        try:
            self._turns = turns[:-2]
            answer = self._answer(turns[-2]["content"], renderer)
        except BaseException:
            self._turns = turns
            raise
        if not answer.text and answer.finish_reason == "interrupted":
            self._turns = turns
        return answer

    def reset(self) -> None:
        """Forget all turns; system message and settings stay."""
        self._turns = []
        self._attempt = 0

    def save(self, path: Path) -> int:
        """Write the chat to a file, only its JSON if the name ends so -> the number of messages."""
        transcript = Transcript(tuple(self.messages), self.settings, self._model)
        if path.suffix == ".json":
            save_transcript(path, transcript)
        else:
            self._engine.save(path, chat=transcript.content())
        return len(self.messages)

    def load(self, path: Path) -> int:
        """Replace messages and settings by those of a saved chat, or change nothing and raise UsageError."""
        if is_chat_file(path):
            transcript = transcript_of(self._engine.load(path), path)
        else:
            transcript = load_transcript(path)
        messages = list(transcript.messages)
        self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        self._turns = messages
        self._attempt = 0
        self.settings = transcript.settings
        return len(transcript.messages)

    def resume(self, path: Path, settings: Mapping[str, float], system: str) -> None:
        """Continue the chat in a file, if it exists; these settings and system message replace its own.

        Raises UsageError, also if the file could not be written.
        """
        if path.exists():
            self.load(path)
            self.settings = self.settings.with_values(settings)
            self.system = well_formed(system) or self.system
        elif not path.parent.is_dir():
            raise UsageError("no folder for the chat", where=path, next_step="make it or give another name")

    def _answer(self, question: str, renderer: Renderer) -> Answer:
        turn = {"role": "user", "content": question}
        sampling, limit = self.settings.sampling_again(self._attempt), self.settings.max_tokens
        if self._raw:
            stream = self._engine.generate(question, sampling=sampling, max_tokens=limit, stream=True)
        else:
            messages = [*self.messages, turn]
            stream = self._engine.chat(
                messages,
                sampling=sampling,
                max_tokens=limit,
                allow_control_tokens=self._allow_control_tokens,
                stream=True,
            )
        answer = self._read(stream, renderer)
        self.last_stats = answer.stats
        if answer.text or answer.finish_reason != "interrupted":
            self._turns += [turn, {"role": "assistant", "content": answer.text}]
        return answer

    def _read(self, stream: Iterator[Chunk], renderer: Renderer) -> Answer:
        text, reason, stats = "", "interrupted", None
        try:
            with Interruptible() as interrupt, closing(cast("Generator[Chunk, None, None]", stream)):
                for chunk in stream:
                    interrupt.streaming()
                    text += chunk.text
                    renderer.feed(chunk.text)
                    if chunk.finish_reason is not None:
                        reason, stats = chunk.finish_reason, chunk.stats
                    if interrupt.stopped:
                        break
        except KeyboardInterrupt:
            if not text:
                raise
        finally:
            renderer.close()
        limit = self.settings.max_tokens
        full = reason == "length" and stats is not None and (limit is None or stats.completion_tokens < limit)
        return Answer(text, reason, stats, context_full=full)
