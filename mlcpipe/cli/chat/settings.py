"""Answer settings: the one table behind the options of `chat`, `/set` and saved chats.

SamplingParams checks the ranges; this module knows names, types and explanations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import MAX_SEED, SamplingParams
from mlcpipe.support.closest import closest
from mlcpipe.support.defaults import THINKING_EFFORTS


@dataclass(frozen=True)
class Knob:
    """One setting: how its text is read, and what it does."""

    kind: type[int] | type[float] | type[bool] | type[str]
    help: str
    optional: bool = False  # whether "none" is a value


KNOBS: Mapping[str, Knob] = {
    "temperature": Knob(float, "how freely tokens are drawn; 0 always takes the most likely one"),
    "top_p": Knob(float, "draw from the most likely tokens that add up to this probability"),
    "top_k": Knob(int, "draw from this many of the most likely tokens; 0 means all"),
    "min_p": Knob(float, "drop tokens below this fraction of the most likely one's probability"),
    "seed": Knob(int, "the same seed gives the same answer", optional=True),
    "max_tokens": Knob(int, "the longest answer, in tokens", optional=True),
    "repetition_penalty": Knob(float, "above 1: avoid tokens of the prompt and the answer"),
    "presence_penalty": Knob(float, "above 0: avoid tokens that the answer already has"),
    "frequency_penalty": Knob(float, "above 0: avoid tokens that the answer has often"),
    "block": Knob(int, "tokens that a model by diffusion denoises together", optional=True),
    "steps": Knob(int, "the most steps of a block, or of a whole answer", optional=True),
    "threshold": Knob(float, "keep tokens of a block that are more likely than this at once", optional=True),
    "editing_threshold": Knob(float, "replace kept tokens by others more likely than this; 1: none", optional=True),
    "max_post_steps": Knob(int, "the most steps of a block that only replace tokens", optional=True),
    "remasking": Knob(
        str, "which tokens of a whole answer are decided first, such as entropy or random", optional=True
    ),
    "alg_temp": Knob(float, "how freely Dream chooses the tokens that are decided first", optional=True),
    "think": Knob(bool, "whether the model thinks before it answers, if it can do both", optional=True),
}
_ELSEWHERE = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "thinking": "think"}
_SWITCH = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


@dataclass(frozen=True)
class Settings:
    """Answer settings; with `max_tokens` None an answer runs to its end or the end of the context.

    `think` is on, off or an effort; None leaves it to the chat template.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    think: bool | str | None = None

    def with_values(self, values: Mapping[str, object]) -> Settings:
        """These settings with some replaced. Raises UsageError on an unknown name or an illegal value."""
        for key in values:
            _knob(key)
        fields = dict(values)
        max_tokens = fields.pop("max_tokens", self.max_tokens)
        positive = isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens >= 1
        if max_tokens is not None and not positive:
            raise UsageError("max_tokens", expected="an integer >= 1 or none", found=repr(max_tokens)[:60])
        think = fields.pop("think", self.think)
        if think is not None and not isinstance(think, bool) and think not in THINKING_EFFORTS:
            names = ", ".join(THINKING_EFFORTS)
            raise UsageError("think", expected=f"on, off, {names} or none", found=repr(think)[:60])
        return Settings(replace(self.sampling, **fields), max_tokens if positive else None, think)  # type: ignore[arg-type]

    def with_text(self, assignments: str) -> Settings:
        """These settings after "key=value key value …", and Ollama's "parameter key value", "think" and "nothink".

        Raises UsageError if that cannot be understood.
        """
        settings, words = self, re.sub(r"\s*=\s*", "=", assignments).removeprefix("parameter ").split()
        while words:
            key, equals, text = words.pop(0).partition("=")
            if key == "nothink" and not equals:
                key, text = "think", "off"
            elif not equals and words and "=" not in words[0]:
                text = words.pop(0)
            elif key == "think" and not equals:
                text = "on"
            settings = settings._with(key, text)
        return settings

    def _with(self, key: str, text: str) -> Settings:
        knob = _knob(key)
        if not text:
            raise UsageError(f"/set has no value for {key!r}", expected="key=value", next_step="/set alone shows them")
        if knob.optional and text.lower() == "none":
            return self.with_values({key: None})
        if knob.kind is bool:
            return self.with_values({key: _SWITCH.get(text.lower(), text.lower())})
        try:
            return self.with_values({key: knob.kind(text)})
        except ValueError:
            kind = "an integer" if knob.kind is int else "a number"
            raise UsageError(key, expected=kind, found=repr(text)[:60]) from None

    def values(self) -> dict[str, float | int | str | None]:
        """All values by name, in the order of KNOBS."""
        own = {"max_tokens": self.max_tokens, "think": self.think}
        return {key: own[key] if key in own else getattr(self.sampling, key) for key in KNOBS}

    def sampling_again(self, attempt: int) -> SamplingParams:
        """The sampling of the `attempt`-th answer to one question: a fixed seed moves, so that it differs."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + attempt) % (MAX_SEED + 1))


def shown(value: float | str | None) -> str:
    """A setting's value as `/set` takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _knob(key: str) -> Knob:
    if key not in KNOBS:
        raise UsageError("there is no such setting", expected=closest(key, KNOBS, _ELSEWHERE), found=repr(key)[:60])
    return KNOBS[key]
