"""Records: which knobs were measured to be faster for a kernel on a device. Data that is checked, never code.

`tir_schedules/tuned/<target>.json` comes with mlcpipe; what a user measures goes beside his other caches unless mlcpipe
runs from a source tree that he may write to, and wins over what came along.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mlcpipe.atomic import atomic_write
from mlcpipe.errors import ConfigError
from mlcpipe.resources import tuned_path
from mlcpipe.targets import Target

VERSION = 1
MAX_BYTES = 1 << 20
MAX_RECORDS = 10_000


def _day(text: str) -> str:
    date.fromisoformat(text)
    return text


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,79}$")]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
Value = Annotated[int, Field(ge=0, le=1 << 30)]


class Record(BaseModel):
    """Knobs of one range of rows (`bucket`) of one kernel that won on one device; times in microseconds.

    `kernel` is its hash (`kernels.kernel_hash`), `name` what it is, for people. `quartile` is the lower quartile of the
    ratios default / tuned of `pairs` measurements one after the other.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    kernel: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    name: Text
    rule: Word
    bucket: Word
    variant: Word
    device: Text
    knobs: Annotated[dict[Word, Value], Field(min_length=1, max_length=32)]
    default_us: Positive
    tuned_us: Positive
    quartile: Positive
    pairs: Annotated[int, Field(ge=1, le=100_000)]
    date: Annotated[str, Field(max_length=10), AfterValidator(_day)]

    @property
    def key(self) -> tuple[str, ...]:
        """What it is a record of: a newer one of the same key takes its place."""
        return (self.device, self.variant, self.name, self.kernel, self.rule, self.bucket)

    @property
    def title(self) -> str:
        """The record in a few words, as `inspect` shows it."""
        return f"{self.bucket} {self.default_us / self.tuned_us:.2f}x on {self.device}, {self.date}"


class RecordFile(BaseModel):
    """All records of a target."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: int
    records: Annotated[tuple[Record, ...], BeforeValidator(_as_tuple), Field(max_length=MAX_RECORDS)]


def read_records(path: Path) -> tuple[Record, ...]:
    """The records of a file, () where there is none. Raises ConfigError for anything that is not whole."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError("tuning records cannot be read", where=path, found=error.strerror) from error
    advice = "remove the file, or tune again"
    if len(raw) > MAX_BYTES:
        raise ConfigError("tuning records are too large", where=path, expected=f"{MAX_BYTES} bytes", next_step=advice)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError("tuning records are not JSON", where=path, found=str(error)[:80], next_step=advice) from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(
            "tuning records of another version", where=path, expected=VERSION,
             found=repr(version)[:80], next_step=advice
        )  # fmt: skip
    try:
        return RecordFile.model_validate_json(raw).records
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise ConfigError(
            "tuning records", where=f"{path}: {place}", found=first["msg"][:200], next_step=advice
        ) from None


def merged(*layers: Iterable[Record]) -> tuple[Record, ...]:
    """All records, sorted; of those with one key the one of the last layer."""
    found = {record.key: record for layer in layers for record in layer}
    return tuple(found[key] for key in sorted(found))


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a file: sorted, three lines a record, so that a diff can be read. No records, no file."""
    chosen = merged(records)
    if not chosen:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(map(_lines, chosen))
    atomic_write(path, f'{{\n "version": {VERSION},\n "records": [\n{text}\n ]\n}}\n'.encode())


def _lines(record: Record) -> str:
    values = record.model_dump(mode="json")
    groups = (
        ("name", "bucket", "kernel", "rule"),
        ("device", "variant", "date"),
        ("knobs", "default_us", "tuned_us", "quartile", "pairs"),
    )
    parts = {key: f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in values.items()}
    lines = (", ".join(parts[key] for key in keys) for keys in groups)
    return "  {" + ",\n   ".join(lines) + "}"


@dataclass(frozen=True)
class Tuned:
    """The records that hold for one target on one device."""

    device: str = ""
    records: tuple[Record, ...] = ()

    def of(self, kernel: str, rule: str, variant: str) -> list[Record]:
        """The records of a kernel, one for each range of rows at most."""
        return [r for r in self.records if (r.kernel, r.rule, r.variant) == (kernel, rule, variant)]


def files_of(target: Target, cache: Path) -> Sequence[Path]:
    """The files with a target's records, those that win last; the last is where new ones go."""
    name = f"{target.tuned}.json"
    shipped = tuned_path() / name
    return (shipped,) if in_source_tree() else (shipped, cache / "tuned" / name)


def in_source_tree() -> bool:
    """Whether mlcpipe runs from a source tree where records can be made that come along."""
    root = tuned_path().parents[1]
    folder = tuned_path() if tuned_path().is_dir() else root / "tir_schedules"
    return (root / "pyproject.toml").is_file() and os.access(folder, os.W_OK)


def tuned_for(target: Target, device: str, cache: Path) -> Tuned:
    """What was measured for a target on a device. Raises ConfigError for a broken file."""
    every = merged(*(read_records(path) for path in files_of(target, cache)))
    return Tuned(device, tuple(record for record in every if record.device == device))
