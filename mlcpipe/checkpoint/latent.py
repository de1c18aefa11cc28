"""Splits the matrices of multi-head latent attention into the two that are multiplied apart.

`kv_b_proj` [heads * (nope + value), rank] has for each head the rows of its keys, then those of its values. Attention
multiplies q with the keys' rows transposed, `k_b_proj` [heads * rank, nope], and latent vectors with `v_b_proj`
[heads * value, rank]. Codes of the latter stay as they are. Groups of the former would lie across its rows, so it is
kept as float16, made of the exact numbers: 2 bytes a number, and no second rounding to codes. (For GLM 4.7 Flash that
is 3.9 MB a layer, where 4 bits are 1.1.) A scheme for unquantized checkpoints rounds it once, as all others. GGUF files
with `attn_k_b` have it that way round, and keep its codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.checkpoint.matrix import FLOAT_DTYPES, Matrix
from mlcpipe.checkpoint.quantized import QuantizedCheckpoint
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

_WHOLE = ".kv_b_proj.weight"


def split_latent(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with these. Raises CheckpointError for a matrix that config.json does not fit."""
    if not any(name.endswith(_WHOLE) for name in checkpoint.tensors):
        return checkpoint
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in checkpoint.tensors.items():
        parts = _parts(checkpoint, tensor) if name.endswith(_WHOLE) else (tensor,)
        for part in parts:
            if part.name in tensors or (part is not tensor and part.name in checkpoint.tensors):
                raise CheckpointError(f"tensor {shown(part.name)} is stored twice", where=shown_path(part.file))
            tensors[part.name] = part
    ordered = MappingProxyType(dict(sorted(tensors.items())))
    if type(checkpoint) is not Checkpoint:
        return replace(checkpoint, tensors=ordered)
    return QuantizedCheckpoint(
        checkpoint.path, checkpoint.config, checkpoint.generation_config, ordered, checkpoint.weight_files, method=""
    )


def _parts(checkpoint: Checkpoint, tensor: TensorInfo) -> Iterator[Matrix]:
    heads, nope = (_size(checkpoint, name) for name in ("num_attention_heads", "qk_nope_head_dim"))
    shape = tensor.shape
    if not heads or not nope or len(shape) != 2 or shape[0] % heads or shape[0] // heads <= nope:
        raise CheckpointError(
            f"tensor {shown(tensor.name)} does not fit config.json", where=shown_path(tensor.file),
            expected="a matrix with the same number of rows for each head, more than qk_nope_head_dim",
            found=list(shape),
        )  # fmt: skip
    stem, rank = tensor.name.removesuffix(_WHOLE), shape[1]
    rows = np.arange(shape[0]).reshape(heads, -1)
    of_keys, of_values = rows[:, :nope], rows[:, nope:].reshape(-1)

    def keys() -> NDArray[np.float32]:
        found = checkpoint.read(tensor.name)[of_keys]
        return np.ascontiguousarray(found.swapaxes(1, 2)).reshape(heads * rank, nope)

    def values() -> NDArray[np.float32]:
        return checkpoint.read(tensor.name)[of_values]

    dtype = tensor.dtype if tensor.dtype in FLOAT_DTYPES else "float16"
    place = (tensor.file, tensor.offset)
    nbytes = tensor.nbytes * of_keys.size // shape[0]
    yield Matrix(f"{stem}.k_b_proj.weight", (heads * rank, nope), dtype, *place, nbytes, _no_codes, values=keys)
    codes: Callable[[], Parts] = functools.partial(checkpoint.read_parts, tensor.name)
    codes = tensor.parts if isinstance(tensor, Matrix) else codes
    coded = isinstance(tensor, Matrix) and tensor.dtype not in FLOAT_DTYPES and tensor.values is None
    yield Matrix(
        f"{stem}.v_b_proj.weight", (len(of_values), rank), tensor.dtype, *place, tensor.nbytes - nbytes,
        lambda: codes().map(lambda part: part[of_values]), getattr(tensor, "zero", 0), None if coded else values,
        getattr(tensor, "columns", None),
    )  # fmt: skip


def _size(checkpoint: Checkpoint, name: str) -> int:
    """A positive integer of config.json, else 0."""
    found = checkpoint.config.get(name)
    return found if type(found) is int and found > 0 else 0


def _no_codes() -> Parts:
    raise CheckpointError("a matrix of floats has no codes")
