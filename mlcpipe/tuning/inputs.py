"""Realistic inputs to measure a kernel with, and the parameters that it writes.

Page tables, lengths and positions are those of one sequence; probabilities add up to one; ids are in range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import sym, tirx

from mlcpipe.tuned.kernels import parameters
from tir_schedules import step_layout as step
from tir_schedules.op import Op, op_of
from tir_schedules.paged import ATTENTION, PAGE, QUANTIZED
from tir_schedules.step import ATTEND

Array = NDArray[Any]
Value = Array | int | float
_Draw = np.random.Generator


@dataclass(frozen=True)
class Inputs:
    """A value for every parameter of a kernel; `outputs` are the indices that it writes, initially zeros.

    `cold`: it reads weights or KV cache pages, which are not in the CPU's caches when a model calls it.
    """

    values: tuple[Value, ...]
    outputs: tuple[int, ...]
    cold: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in self.values if isinstance(value, np.ndarray))


def inputs_of(func: tirx.PrimFunc, rows: int, keys: int = 0) -> Inputs:
    """Values for a tagged function: `rows` rows or queries, after `keys` cached tokens for attention."""
    op = op_of(func)
    kind = op.kind if op is not None else ""
    draw = np.random.default_rng(0)
    if op is not None and kind in ATTENTION:
        return _attention(func, op, rows, keys, draw)
    if op is not None and kind in ATTEND:
        return _attend(func, op, rows, keys, draw)
    if op is not None and kind in _SAMPLING:
        return _sampling(func, op, draw)
    return _plain(func, op, rows, draw)


def _plain(func: tirx.PrimFunc, op: Op | None, rows: int, draw: _Draw) -> Inputs:
    """Random code bits and sub-scales, positive scales and float16 weights, normal numbers, valid expert ids."""
    experts = int(op.facts.get("experts", 1)) if op is not None else 1
    values: list[Array] = []
    for sizes, dtype in parameters(func):
        shape = tuple(_size(size, {}, rows) for size in sizes)
        scale_format = op.facts.get("scale_format") if op is not None and len(values) > 1 else ""
        if dtype == "uint32" and scale_format:
            # After x and the codes: scales of a byte, e8m0 from 2**-15 to 0.5 or e4m3 from 128 to 448, or in bfloat16
            # from 2**-15 to 2**-13.
            mask, bits = (0x00FF00FF, 0x38003800) if scale_format == "bf16" else (0x0E0E0E0E, 0x70707070)
            values.append(_codes(draw, shape, 8) & np.uint32(mask) | np.uint32(bits))
        elif dtype == "uint32":
            values.append(_codes(draw, shape, op.int("bits") if op is not None else 4))
        elif dtype == "int32":
            values.append(draw.integers(0, experts, shape, np.int32))
        elif dtype == "float16":
            values.append(draw.uniform(0.001, 0.02, shape).astype(np.float16))
        else:
            values.append(draw.standard_normal(shape, np.float32).astype(dtype))
    count = 2 if op is not None and op.kind == "add_rms_norm" else 1
    for i in range(count):
        values[-1 - i] = np.zeros_like(values[-1 - i])
    cold = op is not None and "norm" not in op.kind
    return Inputs(tuple(values), tuple(range(len(values) - count, len(values))), cold)


def _codes(draw: _Draw, shape: tuple[int, ...], bits: int) -> Array:
    """Words of codes or, without codes, of pairs of float16 numbers between 0 and 0.03."""
    words = draw.integers(0, 1 << 32, shape, np.uint32)
    return words if bits else words & np.uint32(0x27FF27FF)


# The parameters of the cache's functions (tir_schedules/gpu/attention/scores.py).
_CACHED = ("pages", "indptr", "indices", "length", "k_position", "q_position")
_NUMBERS = ("rotary_mode", "rope_scale", "rope_theta", "scale")
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "decode": ("q", *_CACHED, "output", "lse", *_NUMBERS),
    "prefill_cached": ("q", "q_indptr", *_CACHED, "output", "lse", "causal", *_NUMBERS),
    "prefill_chunk": (
        "q", "q_indptr", "k", "v", "kv_indptr", "q_position", "k_position", "output", "lse", "causal", *_NUMBERS,
    ),
}  # fmt: skip


def _attention(func: tirx.PrimFunc, op: Op, rows: int, keys: int, draw: _Draw) -> Inputs:
    """One sequence of `keys` cached tokens; in `decode` the last is the query's own."""
    role = op.kind.removeprefix("kv_cache_").removesuffix("_sliding")
    names = _PARAMETERS[role]
    pages = -(-keys // PAGE)
    sizes = {"batch": 1, "num_pages": pages, "used_pages": pages}
    first = keys - 1 if role == "decode" else keys
    last = [(keys - 1) % PAGE + 1, 0, 0]  # TVM's length info; the others are for TVM's own windows
    integers = {
        "q_indptr": [0, rows], "kv_indptr": [0, rows], "indptr": [0, pages], "indices": list(draw.permutation(pages)),
        "length": last, "k_position": [0], "q_position": list(range(first, first + rows)),
    }  # fmt: skip
    numbers = {
        "causal": 1, "rotary_mode": 0, "rope_scale": 1.0, "rope_theta": 1e4, "scale": op.int("head_dim") ** -0.5,
    }  # fmt: skip
    values: list[Value] = []
    for name, (dims, dtype) in zip(names, parameters(func), strict=True):
        shape = tuple(_size(size, sizes, rows) for size in dims)
        if name in numbers:
            values.append(numbers[name])
        elif name in integers:
            values.append(np.array(integers[name][: math.prod(shape)], np.int32).reshape(shape))
        elif name in ("output", "lse"):
            values.append(np.zeros(shape, dtype))
        else:
            values.append(_numbers(draw, shape, dtype, op.str("dtype")))
    outputs = (names.index("output"), names.index("lse"))
    return Inputs(tuple(values), outputs, cold=bool(keys))


def _attend(func: tirx.PrimFunc, op: Op, rows: int, keys: int, draw: _Draw) -> Inputs:
    """One sequence in the runtime's pages: prefill rows after `keys` tokens, or decode rows that end with them."""
    first = keys - rows if op.kind == "attend_few" else keys
    integers = _step(first, rows, draw)
    sizes = {"n": rows, "k": len(integers), "num_pages": -(-(first + rows) // PAGE)}
    values: list[Value] = []
    optional = [name for fact, name in (("picked_rows", "rows"), ("sinks", "sinks")) if op.facts.get(fact)]
    inputs = ("qkv", "step", "pages", *optional)
    for name, (dims, dtype) in zip((*inputs, "out", "values", "sums"), parameters(func)):
        shape = tuple(_size(size, sizes, rows) for size in dims)
        if name == "step":
            values.append(integers)
        elif name == "rows":
            values.append(np.arange(rows, dtype=np.int32))
        else:
            filled = name in inputs
            values.append(_numbers(draw, shape, dtype, op.str("dtype")) if filled else np.zeros(shape, dtype))
    return Inputs(tuple(values), (len(inputs),), cold=bool(keys))


def _step(first: int, rows: int, draw: _Draw) -> Array:
    """The integers of a step with rows first ... first + rows - 1 of one sequence (tir_schedules/step_layout.py)."""
    end = first + rows
    positions, ids = np.arange(first, end), draw.permutation(-(-end // PAGE))
    arrays: Mapping[int, Any] = {
        step.POSITION: positions,
        step.PLACE: ids[positions // PAGE] * PAGE + positions % PAGE,
        step.ROW_BEGIN: [0, rows],
        step.KEYS: [end],
        step.TABLE_BEGIN: [0, len(ids)],
        step.TABLES: ids,
        step.ROPE_LENGTH: [end] * rows,
        step.SEQUENCE: [0] * rows,
        step.LAST_KEY: positions,
    }
    header = np.zeros(step.HEADER, np.int32)
    header[[step.SEQUENCES, step.ROWS]] = 1, rows
    header[list(arrays)] = step.HEADER + np.cumsum([0, *map(len, arrays.values())])[:-1]
    header[step.TABLES + 1 :] = header[step.TABLES]  # whatever the group of the kernel
    return np.concatenate([header, *arrays.values()]).astype(np.int32)


def _numbers(draw: _Draw, shape: tuple[int, ...], dtype: str, stored: str) -> Array:
    """Normal numbers; a byte tensor holds numbers of the dtype `stored`.

    q8 and q4: bytes from 32 to 47 are valid codes and, in pairs, float16 scales of 0.008 to 0.11.
    """
    if dtype != "int8":
        return draw.standard_normal(shape, np.float32).astype(dtype)
    if stored in QUANTIZED:
        return draw.integers(32, 48, shape, np.int8)
    size = np.dtype(stored).itemsize
    numbers: Array = draw.standard_normal(math.prod(shape) // size, np.float32).astype(stored)
    return numbers.view(np.int8).reshape(shape)


# The parameters of the sampling functions, outputs last, and the number of outputs.
_SAMPLING: Mapping[str, tuple[tuple[str, ...], int]] = {
    "sample": (("logits", "temperature", "top_p", "top_k", "min_p", "uniform", "token"), 1),
    "softmax_with_temperature": (("logits", "temperature", "probs"), 1),
    "argsort_probs": (("probs", "sorted", "ids"), 2),
    "sample_with_top_p": (("sorted", "ids", "uniform", "row", "top_p", "token"), 1),
}
SAMPLING = tuple(_SAMPLING)


def _sampling(func: tirx.PrimFunc, op: Op, draw: _Draw) -> Inputs:
    """One row of logits; usually a few dozen tokens have noticeable probability."""
    names, count = _SAMPLING[op.kind]
    logits = 4 * draw.standard_normal(op.int("vocab"), np.float32)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    known: Mapping[str, Callable[[], Any]] = {
        "logits": lambda: logits, "probs": lambda: probs, "sorted": lambda: probs[order], "ids": lambda: order,
        "temperature": lambda: 0.8, "top_p": lambda: 0.9, "min_p": lambda: 0.0, "uniform": lambda: 0.5,
        "top_k": lambda: 0, "row": lambda: 0,
    }  # fmt: skip
    values: list[Array] = []
    for index, (name, (dims, dtype)) in enumerate(zip(names, parameters(func), strict=True)):
        shape = tuple(_size(size, {}, 1) for size in dims)
        content = np.asarray(known[name]() if index < len(names) - count else 0, dtype)
        values.append(content.reshape(shape) if content.ndim else np.full(shape, content))
    return Inputs(tuple(values), tuple(range(len(names) - count, len(names))), cold=False)


def _size(size: Any, known: Mapping[str, int], rows: int) -> int:
    """A dimension, with variables from `known` by name, else `rows`."""
    if isinstance(size, (int, tirx.IntImm)):
        return int(size)
    analyzer = sym.Analyzer()
    for variable in tirx.analysis.undefined_vars(size):
        analyzer.bind(variable, tirx.const(known.get(variable.name, rows), str(variable.ty.dtype)))
    return int(analyzer.simplify(size))
