"""`tensor-cache.json`: the index of the parameter shards, in the format MLC and TVM publish.

Format: `tvm.contrib.tvmjs.dump_tensor_cache` and TVM's `src/runtime/vm/tensor_cache_support.cc`. A bundle
is stricter: every record is `raw` and starts at a multiple of `ALIGNMENT`, so that shards can be mapped.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from mlcpipe.errors import BundleError
from mlcpipe.support.json_files import read_json_object, validated

TENSOR_CACHE = "tensor-cache.json"
RECOMPILE = "recompile with: mlcpipe compile CHECKPOINT --output BUNDLE"
ALIGNMENT = 64
"""Bytes; TVM's allocator guarantees it to compiled code (`kAllocAlignment`), and it is one x86 cache line."""

MAX_INDEX_BYTES = 16 << 20
"""40,000 records take 16 MB; larger files are refused before parsing."""

ITEM_BYTES = {"float16": 2, "float32": 4, "uint32": 4, "int32": 4, "int8": 1, "uint8": 1}
"""Bytes per element of every dtype a shard may hold. Shards are little-endian."""

_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class _Strict(BaseModel):
    # Unknown keys are ignored: MLC's writers add some, and no consumer uses them.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class TensorRecord(_Strict):
    """One tensor: `nbytes` bytes, C order, at `byteOffset` of its shard."""

    name: str = Field(min_length=1, max_length=1000)
    shape: Annotated[list[int], FailFast(), Field(max_length=8)]
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
    records: Annotated[list[TensorRecord], FailFast(), Field(min_length=1)]


class TensorCache(_Strict):
    """The whole index."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    records: Annotated[list[ShardRecord], FailFast()]


def read_tensor_cache(directory: Path) -> TensorCache:
    """Read and check `tensor-cache.json`, trusting nothing in it.

    Checked here: size, JSON, types, dtypes, shard names, shape x dtype = nbytes, alignment, bounds, overlap
    and duplicate names. `open_params` checks the length of the shard files.

    Raises:
        BundleError: the index is missing, too large, not JSON, or breaks one of the rules above.
    """
    path = directory / TENSOR_CACHE
    content = read_json_object(path, limit=MAX_INDEX_BYTES, error=BundleError, next_step=RECOMPILE)
    cache = validated(TensorCache, content, what=TENSOR_CACHE, where=directory, error=BundleError, next_step=RECOMPILE)
    names: set[str] = set()
    shards: set[str] = set()
    for shard in cache.records:
        if not _SHARD_NAME.fullmatch(shard.dataPath) or ".." in shard.dataPath:
            raise _broken(path, f"the shard name {_short(shard.dataPath)}", "a plain file name", None)
        # Case-folded: names that differ only in case are the same file on Windows and macOS.
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
            raise _broken(path, what, f"nbytes of shape x {record.dtype}", f"{record.shape} and {record.nbytes}")
        if record.byteOffset % ALIGNMENT:
            raise _broken(path, what, f"a byteOffset that is a multiple of {ALIGNMENT}", record.byteOffset)
        if record.byteOffset < end:
            raise _broken(path, what, f"a byteOffset of {end} or more (no overlap)", record.byteOffset)
        end = record.byteOffset + record.nbytes
        if end > shard.nbytes:
            raise _broken(path, what, f"an end within the {shard.nbytes} bytes of {shard.dataPath}", end)


def _broken(path: Path, what: str, expected: object, found: object) -> BundleError:
    return BundleError(f"{path.name}: {what}", where=path.parent, expected=expected, found=found, next_step=RECOMPILE)


def _short(value: object) -> str:
    # Hostile input: bounded, with control characters escaped.
    text = value if isinstance(value, str) else repr(value)
    return json.dumps(text[:80])
