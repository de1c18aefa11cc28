"""A chat with one engine: messages, settings, and answering a question."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mlcpipe.cli.chat.interrupt import Interruptible
from mlcpipe.cli.chat.renderer import Renderer
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
from mlcpipe.runtime.text.reasoning import ReasoningSplitter
from mlcpipe.runtime.text.thinking import opens_thoughts, thinking_variables

if TYPE_CHECKING:
    from mlcpipe import Engine
    from mlcpipe.runtime.sampling_params import Chunk, Stats


SHOWN: Mapping[str, str] = {"pictures": "image", "videos": "video"}  # in turns, by paths -> a part's type
Shown = dict[str, list[str]]


@dataclass(frozen=True)
class Answer:
    """An answer, and the thoughts before it; `finish_reason` is "stop", "length" or "interrupted" (no `stats`)."""

    text: str
    thoughts: str
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
        self._shown: Shown = {}  # with the next question
        self._kept: list[Message] = []  # the turns that a file has
        self._file: Path | None = None
        self._attempt = 0
        self.settings = Settings()
        self.change(settings)
        self.system = well_formed(system)
        self.last_stats: Stats | None = None

    @property
    def messages(self) -> list[Message]:
        """The messages that the model sees: the system message, if any, and all turns."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self._turns]

    @property
    def last_turn(self) -> tuple[Message, Message] | None:
        """The last question and its answer."""
        return (self._turns[-2], self._turns[-1]) if self._turns else None

    @property
    def unsaved(self) -> bool:
        """Whether turns are lost when the chat ends."""
        return bool(self._turns) and self._file is None and self._turns != self._kept

    def context_tokens(self) -> tuple[int, int]:
        """The tokens of the messages, 0 without turns and for raw text, and those that the context has."""
        used, stats = 0, self.last_stats
        if stats is not None and any(kind in turn for turn in self._turns for kind in SHOWN):
            used = stats.prompt_tokens + stats.completion_tokens
        elif self._turns and not self._raw:
            variables = thinking_variables(self._engine.tokenizer.chat_template(), self.settings.think)
            used = len(self._engine.tokenizer.encode_chat(self.messages, add_generation_prompt=False, **variables))
        return used, self._engine.context_length

    def change(self, settings: Settings) -> None:
        """Answer with these settings from now on. Raises UsageError if the model cannot think so."""
        if settings.think is not None:
            if self._raw:
                raise UsageError("raw text has no thinking to switch", next_step="leave --raw or the setting out")
            thinking_variables(self._engine.tokenizer.chat_template(), settings.think)
        self.settings = settings

    def show(self, path: Path, kind: str = "pictures") -> None:
        """Show one of SHOWN with the next question. Raises UsageError for none, and for a model that sees none."""
        from mlcpipe.runtime.pictures import seen

        place = path.expanduser().absolute()
        vision = None if self._raw else self._engine.manifest.model.vision
        part = {**_part(kind, str(place)), "where": str(place)}
        seen([{"role": "user", "content": [part]}], vision, self._engine.context_length)
        self._shown.setdefault(kind, []).append(str(place))

    def ask(self, question: str, renderer: Renderer) -> Answer:
        """Answer a question and remember both; a question without an answer is forgotten.

        Raises MlcpipeError, and KeyboardInterrupt if Ctrl-C came before the first token.
        """
        self._attempt = 0
        answer = self._answer(well_formed(question), self._shown, renderer)
        self._shown = {}
        return answer

    def regenerate(self, renderer: Renderer, question: str | None = None) -> Answer:
        """Answer the last question again, where a fixed seed moves by one, or `question` in its place.

        Raises UsageError if there is none.
        """
        turns = self._turns
        asked = self._last("try again")[0]
        last, shown = asked["content"], {kind: asked[kind] for kind in SHOWN if kind in asked}
        self._attempt = self._attempt + 1 if question is None else 0
        try:
            self._turns = turns[:-2]
            answer = self._answer(last if question is None else well_formed(question), shown, renderer)
        except BaseException:
            self._turns = turns
            raise
        if self._turns == turns[:-2]:
            self._turns = turns
        return answer

    def undo(self) -> str:
        """Forget the last question and its answer -> the question. Raises UsageError if there is none."""
        question, _ = self._last("undo")
        self._turns = self._turns[:-2]
        self._attempt = 0
        return str(question["content"])

    def answer_to_copy(self) -> str:
        """The last answer. Raises UsageError if there is none."""
        return str(self._last("copy")[1]["content"])

    def reset(self) -> None:
        """Forget all turns; system message and settings stay."""
        self._turns, self._shown = [], {}
        self._attempt = 0

    def save(self, path: Path) -> int:
        """Write the chat to a file, only its JSON if the name ends so -> the number of messages."""
        transcript = Transcript(tuple(self.messages), self.settings, self._model)
        if path.suffix == ".json":
            save_transcript(path, transcript)
        else:
            self._engine.save(path, chat=transcript.content())
        self._kept = self._turns
        return len(self.messages)

    def load(self, path: Path) -> int:
        """Replace messages and settings by those of a saved chat, or change nothing and raise UsageError."""
        if is_chat_file(path):
            transcript = transcript_of(self._engine.load(path), path)
        else:
            transcript = load_transcript(path)
        messages = list(transcript.messages)
        self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        self._turns = self._kept = messages
        self._attempt = 0
        try:
            self.change(transcript.settings)
        except UsageError:  # of another model
            self.settings = replace(transcript.settings, think=None)
        return len(transcript.messages)

    def resume(self, path: Path, settings: Mapping[str, object], system: str) -> None:
        """Continue the chat in a file, if it exists; these settings and system message replace its own.

        Raises UsageError, also if the file could not be written.
        """
        if path.exists():
            self.load(path)
            self.change(self.settings.with_values(settings))
            self.system = well_formed(system) or self.system
        elif not path.parent.is_dir():
            raise UsageError("no folder for the chat", where=path, next_step="make it or give another name")
        self._file = path

    def _answer(self, question: str, shown: Shown, renderer: Renderer) -> Answer:
        turn: Message = {"role": "user", "content": question, **shown}
        sampling, limit = self.settings.sampling_again(self._attempt), self.settings.max_tokens
        if self._raw:
            stream = self._engine.generate(question, sampling=sampling, max_tokens=limit, stream=True)
            reader = _Reader(renderer, None)
        else:
            messages, think, tokenizer = [*self.messages, turn], self.settings.think, self._engine.tokenizer
            template = tokenizer.chat_template()
            texts = [_text_of(one) for one in messages]
            prompt = template.render(texts, **thinking_variables(template, think))
            reader = _Reader(renderer, ReasoningSplitter(open=opens_thoughts(template.source, prompt)))
            stream = self._engine.chat(
                [_with_shown(one) for one in messages],
                sampling=sampling,
                max_tokens=limit,
                allow_control_tokens=self._allow_control_tokens,
                thinking=think,
                stream=True,
            )
        reason, stats = self._read(stream, reader)
        self.last_stats = stats
        full = reason == "length" and stats is not None and (limit is None or stats.completion_tokens < limit)
        if reader.text or reader.thoughts or reason != "interrupted":
            thoughts = {"reasoning_content": reader.thoughts} if reader.thoughts else {}
            self._turns = [*self._turns, turn, {"role": "assistant", "content": reader.text, **thoughts}]
        return Answer(reader.text, reader.thoughts, reason, stats, context_full=full)

    def _read(self, stream: Iterator[Chunk], reader: _Reader) -> tuple[str, Stats | None]:
        reason, stats = "interrupted", None
        try:
            with Interruptible() as interrupt, closing(cast("Generator[Chunk, None, None]", stream)):
                for chunk in stream:
                    interrupt.streaming()
                    reader.push(chunk.text)
                    if chunk.finish_reason is not None:
                        reason, stats = chunk.finish_reason, chunk.stats
                    if interrupt.stopped:
                        break
        except KeyboardInterrupt:
            if not reader.begun:
                raise
        finally:
            reader.close()
        return reason, stats

    def _last(self, what: str) -> tuple[Message, Message]:
        if self.last_turn is None:
            raise UsageError(f"there is no answer to {what}", next_step="ask something first")
        return self.last_turn


def _text_of(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in SHOWN}


def _with_shown(message: Message) -> Message:
    """A message as `Engine.chat` takes it: pictures and videos, then the text."""
    parts = [_part(kind, path) for kind in SHOWN for path in message.get(kind, ())]
    content = [*parts, {"type": "text", "text": message["content"]}] if parts else message["content"]
    return {**_text_of(message), "content": content}


def _part(kind: str, path: str) -> Message:
    return {"type": SHOWN[kind], SHOWN[kind]: Path(path)}


class _Reader:
    """Shows an answer while it streams, and collects its text and thoughts; without `splitter` all is text."""

    def __init__(self, renderer: Renderer, splitter: ReasoningSplitter | None) -> None:
        self._renderer = renderer
        self._splitter = splitter
        self.text = self.thoughts = ""
        self.begun = False

    def push(self, text: str) -> None:
        """More of the answer."""
        self.begun = self.begun or bool(text)
        self._show(*(("", text) if self._splitter is None else self._splitter.push(text)))

    def close(self) -> None:
        """The answer is over."""
        if self._splitter is not None:
            self._show(*self._splitter.finish())
        self._renderer.close()

    def _show(self, thoughts: str, text: str) -> None:
        self.thoughts += thoughts
        self.text += text
        if thoughts:
            self._renderer.think(thoughts)
        if text:
            self._renderer.feed(text)
