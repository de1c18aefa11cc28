"""Answer settings: the one table behind the options of `chat`, `/set key=value` and saved chats.

SamplingParams checks the ranges; this module knows names, types and explanations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import MAX_SEED, SamplingParams


@dataclass(frozen=True)
class Knob:
    """One setting: how its text is read, and what it does."""

    kind: type[int] | type[float]
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
}


@dataclass(frozen=True)
class Settings:
    """Answer settings; with `max_tokens` None an answer runs to its end or the end of the context."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None

    def with_values(self, values: Mapping[str, object]) -> Settings:
        """These settings with some replaced. Raises UsageError on an unknown name or an illegal value."""
        for key in values:
            _knob(key)
        fields = dict(values)
        max_tokens = fields.pop("max_tokens", self.max_tokens)
        positive = isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens >= 1
        if max_tokens is not None and not positive:
            raise UsageError("max_tokens", expected="an integer >= 1 or none", found=repr(max_tokens)[:60])
        return Settings(replace(self.sampling, **fields), max_tokens if positive else None)  # type: ignore[arg-type]

    def with_text(self, assignment: str) -> Settings:
        """These settings after "key=value". Raises UsageError if that cannot be understood."""
        key, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals or not text:
            raise UsageError(
                f"/set cannot use {assignment!r}", expected="key=value", next_step="/set alone shows the keys"
            )
        knob = _knob(key)
        if knob.optional and text.lower() == "none":
            return self.with_values({key: None})
        try:
            return self.with_values({key: knob.kind(text)})
        except ValueError:
            kind = "an integer" if knob.kind is int else "a number"
            raise UsageError(key, expected=kind, found=repr(text)[:60]) from None

    def values(self) -> dict[str, float | int | None]:
        """All values by name, in the order of KNOBS."""
        return {key: self.max_tokens if key == "max_tokens" else getattr(self.sampling, key) for key in KNOBS}

    def sampling_again(self, attempt: int) -> SamplingParams:
        """The sampling of the `attempt`-th answer to one question: a fixed seed moves, so that it differs."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + attempt) % (MAX_SEED + 1))


def _knob(key: str) -> Knob:
    if key not in KNOBS:
        raise UsageError("there is no such setting", expected=", ".join(KNOBS), found=repr(key)[:60])
    return KNOBS[key]
