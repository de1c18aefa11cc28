"""Executes the weight table: converts checkpoint tensors to packed parameter shards, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mlcpipe.bundle import FileInfo, ParamInfo, ParamsWriter
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.errors import ResourceError
from mlcpipe.host.memory import free_memory
from mlcpipe.support.progress import Progress
from mlcpipe.targets import Target
from mlcpipe.weights.table import Tensors, Weight, load

# In memory at once: parts and the joined matrix, or the matrix and its repacked form.
_COPIES = 2
# 16 shards for 8 GB: few files to map. Targets whose hosts hold a whole shard in memory set a lower limit.
_SHARD_BYTES = 512 << 20


def quantized(weights: Sequence[Weight], checkpoint: Tensors, method: str) -> Iterator[tuple[str, NDArray[Any], int]]:
    """The items that `load` yields for each weight."""
    for weight in weights:
        yield from load(weight, checkpoint, method)


def convert_weights(
    weights: Sequence[Weight],
    arrays: Iterable[tuple[str, NDArray[Any], int]],
    checkpoint: Checkpoint,
    directory: Path,
    target: Target,
    progress: Progress,
) -> dict[str, FileInfo]:
    """Write `params_shard_*.bin` (size limited by `target`) and `tensor-cache.json`; return each file's size and hash.

    `arrays` are all items of `load` for the weights, in any order. Private memory use is theirs and a few copies of one
    logical weight (for joined projections, of the joined matrix).
    Raises CheckpointError for a wrong shape or values that the stored dtype cannot hold,
    ResourceError when the disk is full.
    """
    total = sum(checkpoint.tensors[s].nbytes for w in weights for group in w.sources for s in group)
    progress.bytes_total(total)
    with ParamsWriter(directory, max_shard_bytes=target.limits.get("max_shard_bytes", _SHARD_BYTES)) as writer:
        for name, array, read_bytes in arrays:
            writer.add(name, array)
            progress.advance(read_bytes)
        count = sum(_elements(weight) for weight in weights)
        return writer.finish(model_params=count)


def check_memory(weights: Sequence[Weight]) -> None:
    """Raise ResourceError if free memory is too small to convert the largest weight."""
    largest = max(weights, key=_slice_bytes)
    need, free = _COPIES * _slice_bytes(largest), free_memory()
    if need > free.nbytes:
        raise ResourceError(
            f"not enough memory to convert the weight {largest.name} {list(largest.shape)}",
            expected=f"{need / 2**20:,.0f} MiB free",
            found=free,
            next_step="close other programs or use a machine with more memory",
        )


def _slice_bytes(weight: Weight) -> int:
    """Float32 bytes read at once (a weight, or one expert), plus the stored bytes of all experts."""
    if weight.experts is None:
        return 4 * _elements(weight)
    return 4 * _elements(weight) // weight.experts + weight.nbytes // _COPIES


def _elements(weight: Weight) -> int:
    count = 1
    for extent in weight.shape:
        count *= extent
    return count


def param_infos(weights: Sequence[Weight]) -> list[ParamInfo]:
    """The manifest's list of parameters, in call order."""
    return [
        ParamInfo(
            name=name,
            shape=shape,
            dtype=dtype,
            sources=tuple(s for group in w.sources for s in group),
            scheme=None if w.scheme is None else w.scheme.name,
        )
        for w in weights
        for name, (shape, dtype) in w.arrays().items()
    ]
