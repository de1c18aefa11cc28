"""Tuning records: knobs measured to be faster for a kernel on a device. Validated data, never code.

`tir_schedules/tuned/<target>.json` ships with mlcpipe. A user's records take precedence and go to the cache folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mlcpipe.errors import ConfigError
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.json_files import Items, OnlyKnown, Table, read_json_object, validated
from mlcpipe.support.resources import tuned_path
from mlcpipe.targets import Target

VERSION = 1
MAX_BYTES = 1 << 20
MAX_RECORDS = 10_000


def _day(text: str) -> str:
    date.fromisoformat(text)
    return text


Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,79}$")]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Positive = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]
Value = Annotated[int, Field(ge=0, le=1 << 30)]


class Record(OnlyKnown, BaseModel):
    """Knobs that won for one row range (`bucket`) of one kernel on one device; times in microseconds.

    `kernel` is its hash (`kernels.kernel_hash`), `name` is readable. `quartile` is the lower quartile of the
    ratios default / tuned over `pairs` adjacent measurements.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    kernel: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    name: Text
    rule: Word
    bucket: Word
    variant: Word
    device: Text
    knobs: Annotated[Table[Word, Value], Field(min_length=1, max_length=32)]
    default_us: Positive
    tuned_us: Positive
    quartile: Positive
    pairs: Annotated[int, Field(ge=1, le=100_000)]
    date: Annotated[str, Field(max_length=10), AfterValidator(_day)]

    @property
    def key(self) -> tuple[str, ...]:
        """The record's identity: a newer record with the same key replaces it."""
        return (self.device, self.variant, self.name, self.kernel, self.rule, self.bucket)

    @property
    def title(self) -> str:
        """A short description, as `inspect` shows it."""
        return f"{self.bucket} {self.default_us / self.tuned_us:.2f}x on {self.device}, {self.date}"


class RecordFile(OnlyKnown, BaseModel):
    """All records of a target."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: int
    records: Annotated[Items[Record], Field(max_length=MAX_RECORDS)]


def read_records(path: Path) -> tuple[Record, ...]:
    """The records of a file, () if it does not exist. Raises ConfigError for an invalid file."""
    if not path.exists():
        return ()
    advice = "remove the file, or tune again"
    content = read_json_object(path, limit=MAX_BYTES, error=ConfigError, what="tuning records", next_step=advice)
    version = content.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(
            "unsupported version of tuning records", where=path, expected=VERSION,
             found=repr(version)[:80], next_step=advice
        )  # fmt: skip
    what = "the file of tuning records"
    return validated(RecordFile, content, what=what, where=path, error=ConfigError, next_step=advice).records


def merged(*layers: Iterable[Record]) -> tuple[Record, ...]:
    """All records, sorted; among equal keys the last layer wins."""
    by_key = {record.key: record for layer in layers for record in layer}
    return tuple(by_key[key] for key in sorted(by_key))


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records sorted, three lines each, for readable diffs; without records, remove the file."""
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
    """The records that apply to one target on one device."""

    device: str = ""
    records: tuple[Record, ...] = ()

    def of(self, kernel: str, rule: str, variant: str) -> list[Record]:
        """The records of a kernel, at most one per row range."""
        return [r for r in self.records if (r.kernel, r.rule, r.variant) == (kernel, rule, variant)]


def files_of(target: Target, cache: Path | None) -> Sequence[Path]:
    """A target's record files, highest precedence last; new records go to the last."""
    name = f"{target.tuned}.json"
    shipped = tuned_path() / name
    return (shipped,) if cache is None else (shipped, cache / "tuned" / name)


def tuned_for(target: Target, device: str, cache: Path | None) -> Tuned:
    """The records of a target for a device. Raises ConfigError for a broken file."""
    records = merged(*(read_records(path) for path in files_of(target, cache)))
    return Tuned(device, tuple(record for record in records if record.device == device))
