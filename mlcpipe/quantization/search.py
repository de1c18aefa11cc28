"""Group quantization with the scales of least error: MLC's arrays, other numbers in them.

Where `groups.pack` divides the largest magnitude by the zero point, all 2^bits codes are used here, scales may be
negative, and each is the one of least squared error, see `tir_schedules/cpu/scale_search.py`. Statistics of a matrix's
inputs weight the error of its columns. MLC's kernels decode the result unchanged: (code - zero_point) * scale.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from mlcpipe.quantization.inputs import Inputs, importance_of
from mlcpipe.quantization.limits import check_magnitude
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.support.defaults import LOCAL_TARGET
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from tir_schedules.cpu.scale_search import Levels, scale_search

Array = NDArray[Any]

CHUNK = 1 << 22  # elements at a time: 16 MiB of float32


def searchable(scheme: Scheme) -> bool:
    """Whether a search applies: up to 4 bits, in block formats 6. 8-bit kernels do not accept the highest code."""
    return 0 < scheme.bits <= (6 if scheme.kept else 4) and scheme.group_size > 0


def pack(scheme: Scheme, w: Array, name: str, inputs: Inputs | None = None) -> dict[str, Array]:
    """w float32[N, K] -> q_weight uint32[N, padded(K) / codes_per_word], q_scale model_dtype[N, groups(K)].

    Raises CheckpointError for numbers that are not finite or do not fit the dtype.
    """
    n, k = w.shape
    padded, groups, size = scheme.padded(k), scheme.groups(k), scheme.group_size
    q_weight = np.empty((n, padded // scheme.codes_per_word), np.uint32)
    q_scale = np.empty((n, groups), scheme.model_dtype)
    importance = importance_of(inputs, k, padded, size)
    step = max(1, CHUNK // padded)
    for start in range(0, n, step):
        rows = w[start : start + step]
        check_magnitude(np.maximum(rows.max(axis=1), -rows.min(axis=1)), scheme.model_dtype, name)
        x = np.zeros((len(rows), padded), np.float32)
        x[:, :k] = rows
        codes, scales = search_scales(scheme, x.reshape(-1, size), importance)
        q_weight[start : start + step] = codes.reshape(len(rows), -1)
        q_scale[start : start + step] = scales.reshape(len(rows), -1)
    _clear(scheme, q_weight, k)
    return {"q_weight": q_weight, "q_scale": q_scale}


def search_scales(scheme: Scheme, x: Array, importance: Array) -> tuple[Array, Array]:
    """Words and scales of x float32[groups, group size]; `importance` float32[c, group size] weights columns."""
    words = np.zeros((len(x), scheme.group_size // scheme.codes_per_word), np.uint32)
    scales = np.zeros(len(x), scheme.model_dtype)
    arrays = [tvm.runtime.tensor(array) for array in (x, importance, words, scales)]
    _compiled(scheme)(*arrays)
    return arrays[2].numpy(), arrays[3].numpy()


def _clear(scheme: Scheme, q_weight: Array, k: int) -> None:
    """Set padding codes to 0, as the format has them."""
    for column in range(k, scheme.padded(k)):
        word, j = divmod(column, scheme.codes_per_word)
        q_weight[:, word] &= np.uint32(~(((1 << scheme.bits) - 1) << (j * scheme.bits)) & 0xFFFFFFFF)


@functools.cache
def _compiled(scheme: Scheme) -> Any:
    levels = Levels(
        scheme.bits, scheme.zero_point, scheme.group_size, scheme.codes_per_word, scheme.model_dtype,
        float(np.finfo(scheme.model_dtype).max) / (1 << (scheme.bits - 1)),
    )  # fmt: skip
    return host_kernel(scale_search(levels))


def host_kernel(func: tvm.tirx.PrimFunc) -> Any:
    """A scheduled PrimFunc, compiled for this machine's CPU."""
    target = load_target(LOCAL_TARGET)
    built = tvm.compile(tvm.IRModule({"kernel": func}), tvm_target(target, compiled_variants(target)[0]))
    return built[str(func.attrs["global_symbol"])]
