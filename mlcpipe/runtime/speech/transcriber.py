"""Sound to text: one bundle of a model that hears."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlcpipe.bundle.manifest import Manifest
from mlcpipe.bundle.memory import MOST_ANSWERS
from mlcpipe.bundle.model_info import SpeechInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.speech.decoding import TEMPERATURES, Heard, Limits, heard_text
from mlcpipe.runtime.speech.hearing import Floats, Hearing
from mlcpipe.runtime.speech.languages import language_code
from mlcpipe.runtime.speech.rules import TokenRules
from mlcpipe.runtime.speech.segments import FRAMES_PER_S, TIMESTAMP_S, Piece, pieces_of
from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.sound.decode import read_sound
from mlcpipe.sound.log_mel import RATE_HZ, log_mel
from mlcpipe.support.files import local_path
from mlcpipe.support.progress import Progress, SilentProgress

Task = Literal["transcribe", "translate"]
_RESET_ABOVE = 0.5  # temperature of an answer that the next window should not continue


@dataclass(frozen=True)
class Segment:
    """A stretch of speech; times in seconds. The other fields are those of the published program."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True)
class Transcript:
    """The text of a sound of `duration` seconds."""

    task: Task
    language: str
    duration: float
    text: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class SpeechParams:
    """How to transcribe.

    language         code such as en, or its English name; None: the most probable of the first window
    task             translate writes English
    timestamps       ask the model for times; without, a window is a segment
    prompt           text that stands before the first window's: names, spelling, style
    temperatures     tried one after the other while an answer is wrong by `limits`
    best_of          answers drawn at a temperature above 0
    carry_on         a window continues the text of the one before
    seed             of draws
    """

    language: str | None = None
    task: Task = "transcribe"
    timestamps: bool = True
    prompt: str = ""
    temperatures: tuple[float, ...] = TEMPERATURES
    best_of: int = 5
    carry_on: bool = True
    limits: Limits = field(default=Limits())
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.temperatures) <= 16 or not all(0 <= one <= 2 for one in self.temperatures):
            raise UsageError("temperatures", expected="1 to 16 numbers from 0 to 2", found=repr(self.temperatures)[:80])
        if not 1 <= self.best_of <= MOST_ANSWERS:
            raise UsageError("best_of", expected=f"1 to {MOST_ANSWERS}", found=self.best_of)
        if self.task not in ("transcribe", "translate"):
            raise UsageError("task", expected="transcribe or translate", found=repr(self.task)[:80])


class Transcriber:
    """One bundle of a model that hears. Threads may call it together; their windows take turns.

    `threads` and `device` are those of `Engine`. Raises BundleError, TargetError or ResourceError; UsageError for a
    bundle of a model that hears nothing.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        threads: int | None = None,
        device: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        path = local_path(bundle)
        if path is None:
            raise UsageError("no folder of a bundle", found=bundle, next_step="compile the model first")
        began = time.perf_counter()
        self.path = path
        self._bundle = load_bundle(path, None, threads, device, progress or SilentProgress())
        info = self.manifest.model.speech
        if info is None:
            raise UsageError("the model hears nothing", where=path, expected="a model such as Whisper")
        self.info: SpeechInfo = info
        self.hearing = Hearing(self._bundle, info)
        self.load_s = time.perf_counter() - began

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self._bundle.manifest

    @property
    def device(self) -> str:
        """Where the kernels run, for people."""
        return self._bundle.device.description

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer."""
        return open_tokenizer(self.path, decodes=False)

    def transcribe(
        self, sound: Any, params: SpeechParams = SpeechParams(), *, progress: Progress | None = None
    ) -> Transcript:
        """The text of a sound: a path or the bytes of a file, or f32[n] at 16 kHz from -1 to 1.

        The progress advances by seconds of sound. Raises UsageError for a sound that cannot be read, for a language
        that the model does not know, and ComputeError.
        """
        progress = progress or SilentProgress()
        self.check(params)
        samples = read_sound(sound)
        segments: list[Segment] = []
        done, language = 0.0, "en"
        progress.stage("transcribe seconds of sound")
        progress.steps_total(round(len(samples) / RATE_HZ))
        for language, found, heard_s in self.heard(samples, params):  # noqa: B007 (the last one is used)
            segments += found
            progress.advance(round(heard_s) - round(done))
            done = heard_s
        return self.finished(segments, params, language, len(samples) / RATE_HZ)

    @staticmethod
    def finished(segments: Sequence[Segment], params: SpeechParams, language: str, duration: float) -> Transcript:
        """The whole of some segments."""
        text = "".join(one.text for one in segments).strip()
        return Transcript(params.task, language, duration, text, tuple(segments))

    def check(self, params: SpeechParams) -> None:
        """Raises UsageError for what the model cannot do."""
        if params.task == "translate" and not self.info.languages:
            raise UsageError(
                "the model does not translate", found="a model of one language", expected="task transcribe"
            )
        if params.language is not None:
            self.language(params.language)

    def language(self, name: str) -> str:
        """The code of a language that the model knows. Raises UsageError."""
        known = self.info.languages or {"en": 0}
        code = language_code(name)
        if code not in known:
            few = ", ".join(list(known)[:8])
            raise UsageError("language", expected=f"one that the model knows, such as {few}", found=repr(name)[:80])
        return code

    def detect_language(self, sound: Any) -> str:
        """The code of the most probable language of a sound's first window. Raises what `transcribe` raises."""
        return self._language(log_mel(read_sound(sound), self.info.mels))

    def _language(self, features: Floats, stopped: Callable[[], bool] = bool) -> str:
        codes = list(self.info.languages)
        if not codes:
            return "en"
        with self.hearing.lock:
            self.hearing.stopped = stopped
            self.hearing.listen(self._window(features, 0))
            logits = self.hearing.begin([self.info.start], [0])[0]
            return codes[int(logits[[self.info.languages[code] for code in codes]].argmax())]

    def heard(
        self, samples: Floats, params: SpeechParams, *, stopped: Callable[[], bool] = bool
    ) -> Iterator[tuple[str, list[Segment], float]]:
        """The language, the segments of one window after the other, and the seconds that were heard until then.

        Raises Stopped at the next step where `stopped` is true.
        """
        features, rng = log_mel(samples, self.info.mels), np.random.default_rng(params.seed)
        language = self._language(features, stopped) if params.language is None else self.language(params.language)
        rules = TokenRules(self.info, timestamps=params.timestamps)
        text = self._text(params.prompt)
        known, frame, count = list(text), 0, 0
        while frame < len(features):
            frames = min(2 * self.info.rows, len(features) - frame)
            prompt, start = self._prompt(known, params, language)
            with self.hearing.lock:
                self.hearing.stopped = stopped
                self.hearing.listen(self._window(features, frame))
                heard = heard_text(
                    self.hearing, prompt, start, rules, self.hearing.context_length // 2, params.temperatures,
                    params.limits, self._decoded, rng, params.best_of,
                )  # fmt: skip
            found: list[Segment] = []
            step = frames
            if not params.limits.is_silence(heard):
                pieces, step = pieces_of(heard.tokens, self.info.timestamps, frame, frames)
                found = [self._segment(count + i, frame, piece, heard) for i, piece in enumerate(pieces)]
                count += len(found)
                known += [token for one in found for token in one.tokens]
                if not params.carry_on or heard.temperature > _RESET_ABOVE:
                    known = []
            frame += step or frames  # a window that ends where it began would be heard for ever
            yield language, found, min(frame, len(features)) / FRAMES_PER_S

    def _window(self, features: Floats, frame: int) -> Floats:
        """The frames of a window f32[2 * rows, mels], zeros after the end of the sound."""
        window = np.zeros((2 * self.info.rows, self.info.mels), np.float32)
        part = features[frame : frame + len(window)]
        window[: len(part)] = part
        return window

    def _prompt(self, known: Sequence[int], params: SpeechParams, language: str) -> tuple[list[int], int]:
        """The tokens before an answer, and the index of the one that begins it: earlier text, language, task."""
        info = self.info
        begin = [info.start]
        if info.languages:
            task = info.translate if params.task == "translate" else info.transcribe
            begin += [info.languages[language], *([] if task is None else [task])]
        begin += [] if params.timestamps else [info.no_timestamps]
        room = self.hearing.context_length // 2 - 1
        before = [info.previous, *known[-room:]] if known and info.previous is not None else []
        return [*before, *begin], len(before)

    def _text(self, prompt: str) -> list[int]:
        """The tokens of a prompt: written as text, whatever it says."""
        prompt = prompt.strip()
        return [one for one in self.tokenizer.encode(f" {prompt}") if one < self.info.end] if prompt else []

    def _segment(self, number: int, frame: int, piece: Piece, heard: Heard) -> Segment:
        """The segment of a piece; one without length or words has no text, and its tokens are not continued."""
        text = self._decoded(piece.tokens)
        empty = piece.end - piece.start < TIMESTAMP_S / 2 or not text.strip()
        return Segment(
            number, frame, piece.start, piece.end, "" if empty else text, () if empty else piece.tokens,
            heard.temperature, heard.avg_logprob, heard.compression_ratio, heard.no_speech_prob,
        )  # fmt: skip

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([one for one in tokens if one < self.info.end])
