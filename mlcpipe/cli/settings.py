"""The knobs of an answer: one table that checks the options of `chat`, `/set key=value` and loaded files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mlcpipe.errors import UsageError

if TYPE_CHECKING:
    from mlcpipe import SamplingParams


@dataclass(frozen=True)
class Setting:
    """One knob: its type, the closed range of its values, and what it does in a few words."""

    kind: type[int] | type[float]
    low: float
    high: float
    help: str
    optional: bool = False  # whether "none" is a value

    @property
    def expected(self) -> str:
        """The legal values in words."""
        number = "an integer" if self.kind is int else "a number"
        upper = f"from {self.low:g} to {self.high:g}" if self.high < 2**31 - 1 else f"of at least {self.low:g}"
        return f"{number} {upper}{' or none' if self.optional else ''}"


SETTINGS: Mapping[str, Setting] = {
    "temperature": Setting(float, 0.0, 10.0, "how freely tokens are drawn; 0 takes the likeliest"),
    "top_p": Setting(float, 0.001, 1.0, "draw from the likeliest tokens that hold this share"),
    "top_k": Setting(int, 0, 2**31 - 1, "draw from this many tokens; 0 is all"),
    "min_p": Setting(float, 0.0, 1.0, "drop tokens below this share of the likeliest one"),
    "seed": Setting(int, 0, 2**63 - 1, "the same seed gives the same answer", optional=True),
    "max_tokens": Setting(int, 1, 2**31 - 1, "the longest answer, in tokens", optional=True),
    "repetition_penalty": Setting(float, 0.01, 10.0, "above 1 avoids tokens seen before"),
    "presence_penalty": Setting(float, -2.0, 2.0, "above 0 avoids tokens of this answer"),
    "frequency_penalty": Setting(float, -2.0, 2.0, "above 0 avoids frequent tokens of this answer"),
}


@dataclass(frozen=True)
class Settings:
    """Values for every name in SETTINGS; `None` leaves the choice to the engine."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def with_values(self, values: Mapping[str, object]) -> Settings:
        """These settings with some of them replaced. Raises UsageError on an unknown name or illegal value."""
        return replace(self, **{key: _checked(key, value) for key, value in values.items()})

    def with_text(self, assignment: str) -> Settings:
        """These settings after "key=value". Raises UsageError if that cannot be understood."""
        key, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals or not text:
            raise UsageError(
                f"/set cannot use {assignment!r}", expected="key=value", next_step="/set alone shows the keys"
            )
        return self.with_values({key: _parse(key, text)})

    def values(self) -> dict[str, float | int | None]:
        """All values by name, in the order of the table."""
        return asdict(self)

    def sampling(self, *, seed_offset: int = 0) -> SamplingParams:
        """What the engine takes; `seed_offset` moves a fixed seed, so that a second try is another one."""
        from mlcpipe import SamplingParams

        values = self.values()
        del values["max_tokens"]
        if self.seed is not None:
            values["seed"] = (self.seed + seed_offset) % 2**63
        return SamplingParams(**values)


def _parse(key: str, text: str) -> object:
    """A number from a word, or the word itself if it is none: `_checked` then says what was expected."""
    setting = _setting(key)
    if setting.optional and text.lower() == "none":
        return None
    try:
        return setting.kind(text)
    except ValueError:
        return text


def _checked(key: str, value: object) -> float | int | None:
    setting = _setting(key)
    if value is None and setting.optional:
        return None
    kinds = (int,) if setting.kind is int else (int, float)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not setting.low <= value <= setting.high:  # type: ignore[arg-type, operator]
        raise UsageError(f"{key} cannot have this value", expected=setting.expected, found=repr(value)[:60])
    return setting.kind(value)  # type: ignore[call-overload, no-any-return]


def _setting(key: str) -> Setting:
    if key not in SETTINGS:
        raise UsageError("there is no such setting", expected=", ".join(SETTINGS), found=repr(key)[:60])
    return SETTINGS[key]
