"""Split GGUF models: `name-00001-of-00003.gguf` and its siblings, as llama.cpp's gguf-split writes them."""

from __future__ import annotations

import re
from pathlib import Path

from mlcpipe.checkpoint.gguf.header import Header, read_header
from mlcpipe.checkpoint.safetensors_reader import MAX_TENSORS, TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_SHARDS = 1000


def shard_names(name: str) -> list[str]:
    """File names of all parts of the model that the file `name` belongs to; `[name]` if it is not split."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_SHARDS:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}{match[4]}" for number in range(1, int(match[3]) + 1)]


def read_shards(path: Path) -> tuple[Header, tuple[Path, ...]]:
    """The first part's metadata with the tensors of all parts, and the files. `path` may be any part.

    Raises CheckpointError for a missing part, and one of another model or another place.
    """
    files = tuple(path.with_name(name) for name in shard_names(path.name))
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None and len(files) > 1:
        raise CheckpointError(
            f"part {shown(missing.name)} of a split model is missing",
            where=shown_path(path.parent),
            expected=f"{len(files)} files",
            next_step="download the missing part",
        )
    first = read_header(files[0])
    tensors: dict[str, TensorInfo] = {}
    for number, file in enumerate(files):
        header = read_header(file) if number else first
        _check_part(file, header, number, len(files), first)
        for tensor in header.tensors:
            earlier = tensors.setdefault(tensor.name, tensor)
            if earlier is not tensor:
                raise _broken(file, f"tensor {shown(tensor.name)} of another part is stored again")
    total = first.metadata.integer(_TENSORS, len(tensors))
    if total != len(tensors):
        raise _broken(path, f"the parts have {len(tensors)} tensors", f"{total} ({_TENSORS})")
    if len(tensors) > MAX_TENSORS:
        raise _broken(path, f"the parts have {len(tensors)} tensors", f"at most {MAX_TENSORS}")
    return Header(first.metadata, tuple(tensors.values())), files


def _check_part(file: Path, header: Header, number: int, count: int, first: Header) -> None:
    """Check that a file says to be part `number` (from 0) of `count`, and agrees with the first one on the total."""
    metadata = header.metadata
    default = 1 if count == 1 else None  # a model in one file need not say so
    found = (metadata.integer(_NUMBER, default and 0), metadata.integer(_COUNT, default))
    if found[1] == 0:  # what llama.cpp writes for a model that is not split
        found = (found[0], 1)
    if found != (number, count):
        raise _broken(
            file, f"part {found[0] + 1} of {found[1]}", f"part {number + 1} of {count}, which the file's name says"
        )
    totals = [one.metadata.integer(_TENSORS, 0) for one in (header, first)]
    if totals[0] != totals[1]:
        raise _broken(file, f"a part of a model with {totals[0]} tensors", f"{totals[1]}, as in the first part")


def _broken(file: Path, found: str, expected: str | None = None) -> CheckpointError:
    return CheckpointError(
        "the parts of a split model do not fit together", where=shown_path(file), expected=expected, found=found,
        next_step="download all parts of one model again",
    )  # fmt: skip
