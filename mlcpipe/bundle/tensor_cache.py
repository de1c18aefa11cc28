"""`tensor-cache.json`: the index of the parameter shards, in the format MLC and TVM publish.

Format: `tvm.contrib.tvmjs.dump_tensor_cache` and TVM's `src/runtime/vm/tensor_cache_support.cc`. A bundle
narrows it: every record is `raw` and starts at a multiple of `ALIGNMENT`, so that shards can be mapped.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlcpipe.errors import BundleError

TENSOR_CACHE = "tensor-cache.json"
ALIGNMENT = 64
"""Bytes; what TVM's allocator promises compiled code (`kAllocAlignment`), and one x86 cache line."""

MAX_INDEX_BYTES = 64 << 20
"""200,000 records take 45 MB; anything larger is refused before it is parsed."""

ITEM_BYTES = {"float16": 2, "float32": 4, "uint32": 4, "int32": 4, "int8": 1, "uint8": 1}
"""Bytes per element of every dtype a shard may hold. Shards are little-endian."""

_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class _Strict(BaseModel):
    # Unknown keys are ignored, not refused: MLC's own writers add some, and no consumer acts on them.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class TensorRecord(_Strict):
    """One tensor: `nbytes` bytes, C order, at `byteOffset` of its shard."""

    name: str = Field(min_length=1, max_length=1000)
    shape: list[int] = Field(max_length=8)
    dtype: Literal["float16", "float32", "uint32", "int32", "int8", "uint8"]
    format: Literal["raw"]
    nbytes: int = Field(gt=0)
    byteOffset: int = Field(ge=0)


class ShardRecord(_Strict):
    """One shard file: `nbytes` is the exact length of the file."""

    dataPath: str
    format: Literal["raw-shard"]
    nbytes: int = Field(gt=0)
    md5sum: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    records: list[TensorRecord] = Field(min_length=1)


class TensorCache(_Strict):
    """The whole index."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    records: list[ShardRecord]


def read_tensor_cache(directory: Path) -> TensorCache:
    """Read and check `tensor-cache.json`, trusting nothing in it.

    Checked here: size, JSON, types, dtypes, shard names, shape x dtype = nbytes, alignment, bounds, overlap
    and duplicate names. The length of the shard files is checked by who opens them.

    Raises:
        BundleError: the index is missing, too large, not JSON, or breaks one of the rules above.
    """
    path = directory / TENSOR_CACHE
    raw = read_small_file(path, MAX_INDEX_BYTES)
    try:
        cache = TensorCache.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_json(path, error) from None
    names: set[str] = set()
    shards: set[str] = set()
    for shard in cache.records:
        if not _SHARD_NAME.fullmatch(shard.dataPath) or ".." in shard.dataPath:
            raise _broken(path, f"the shard name {_short(shard.dataPath)}", "a plain file name", None)
        # Case-folded: on Windows and macOS two names that differ in case are one file.
        if shard.dataPath.lower() in shards:
            raise _broken(path, f"the shard {shard.dataPath}", "one entry", "two")
        shards.add(shard.dataPath.lower())
        _check_shard(path, shard, names)
    return cache


def _check_shard(path: Path, shard: ShardRecord, names: set[str]) -> None:
    end = 0
    for record in sorted(shard.records, key=lambda r: r.byteOffset):
        what = f"the tensor {_short(record.name)}"
        if record.name in names:
            raise _broken(path, what, "one entry", "two")
        names.add(record.name)
        if any(extent <= 0 for extent in record.shape):
            raise _broken(path, what, "a shape of positive extents", record.shape)
        size = math.prod(record.shape) * ITEM_BYTES[record.dtype]
        if size != record.nbytes:
            raise _broken(
                path, what, f"nbytes of shape x {record.dtype}", f"{record.shape} and {record.nbytes}"
            )
        if record.byteOffset % ALIGNMENT:
            raise _broken(path, what, f"a byteOffset that is a multiple of {ALIGNMENT}", record.byteOffset)
        if record.byteOffset < end:
            raise _broken(path, what, f"a byteOffset of {end} or more (no overlap)", record.byteOffset)
        end = record.byteOffset + record.nbytes
        if end > shard.nbytes:
            raise _broken(path, what, f"an end within the {shard.nbytes} bytes of {shard.dataPath}", end)


def read_small_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        BundleError: missing, not a regular file, unreadable, or larger than `limit`.
    """
    try:
        if not path.is_file():
            found = "something else" if path.exists() else "nothing"
            raise BundleError(f"no file {path.name}", where=path.parent, found=found, next_step=RECOMPILE)
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise BundleError(f"cannot read {path.name}", where=path.parent, found=error.strerror) from error
    if len(raw) > limit:
        raise BundleError(
            f"{path.name} is too large",
            where=path.parent,
            expected=f"at most {limit} bytes",
            found=f"{path.stat().st_size}",
            next_step=RECOMPILE,
        )
    return raw


RECOMPILE = "recompile with: mlcpipe compile CHECKPOINT --output BUNDLE"


def invalid_json(path: Path, error: ValidationError) -> BundleError:
    """The first of pydantic's complaints as one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])[:120]
    what = f"{path.name} is not valid" + (f" at {field}" if field else "")
    found = "" if first["type"] == "json_invalid" else _short(first.get("input"))
    return BundleError(
        what, where=path.parent, expected=first["msg"], found=found or None, next_step=RECOMPILE
    )


def _broken(path: Path, what: str, expected: object, found: object) -> BundleError:
    return BundleError(
        f"{path.name}: {what}", where=path.parent, expected=expected, found=found, next_step=RECOMPILE
    )


def _short(value: object) -> str:
    # repr of hostile input: bounded, and control characters escaped.
    text = value if isinstance(value, str) else repr(value)
    return json.dumps(text[:80])
