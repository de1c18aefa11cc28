"""RMS norm for CPUs, with or without the residual addition before it: one pass to sum squares, one to scale."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.macro import macro
from tir_schedules.op import Declined, Op


@macro
def _scale_row(X, W, Y, row, size, lanes, eps):
    """Y[row] = X[row] / sqrt(mean(X[row]^2) + eps) * W, with `lanes` partial sums."""
    partial = T.alloc_buffer((1, lanes), "float32")
    scale = T.alloc_buffer((1,), "float32")
    partial[0, T.ramp(0, 1, lanes)] = T.broadcast(T.float32(0), lanes)
    for i in T.serial(size // lanes):
        partial[0, T.ramp(0, 1, lanes)] = (
            partial[0, T.ramp(0, 1, lanes)] + X[row, T.ramp(i * lanes, 1, lanes)] * X[row, T.ramp(i * lanes, 1, lanes)]
        )
    scale[0] = T.float32(0)
    for i in T.serial(lanes):
        scale[0] = scale[0] + partial[0, i]
    scale[0] = T.float32(1) / T.sqrt(scale[0] / T.float32(size) + T.float32(eps))
    for i in T.serial(size // lanes):
        Y[row, T.ramp(i * lanes, 1, lanes)] = (
            X[row, T.ramp(i * lanes, 1, lanes)]
            * T.broadcast(scale[0], lanes)
            * T.cast(W[T.ramp(i * lanes, 1, lanes)], f"float32x{lanes}")
        )


def norm(op: Op) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `rms_norm` or `add_rms_norm` in float32."""
    size, eps, weight_dtype = op.int("size"), float(op.facts["eps"]), op.str("weight_dtype")
    if op.str("dtype") != "float32":
        return Declined(f"activations are {op.str('dtype')}")
    lanes = next((n for n in (16, 8, 4, 2) if size % n == 0), 0)
    if not lanes:
        return Declined(f"size {size} is odd")

    @T.prim_func(s_tir=True)
    def rms_norm(x_handle: T.handle, w_handle: T.handle, y_handle: T.handle):
        m = T.int64()
        X = T.match_buffer(x_handle, (m, size), "float32")
        W = T.match_buffer(w_handle, (size,), weight_dtype)
        Y = T.match_buffer(y_handle, (m, size), "float32")
        if m * size <= T.int64(8192):
            for row in T.serial(m):
                _scale_row(X, W, Y, row, size, lanes, eps)
        else:
            for row in T.parallel(m):
                _scale_row(X, W, Y, row, size, lanes, eps)

    @T.prim_func(s_tir=True)
    def add_rms_norm(
        a_handle: T.handle, b_handle: T.handle, w_handle: T.handle, x_handle: T.handle, y_handle: T.handle
    ):
        m = T.int64()
        A = T.match_buffer(a_handle, (m, size), "float32")
        B = T.match_buffer(b_handle, (m, size), "float32")
        W = T.match_buffer(w_handle, (size,), weight_dtype)
        X = T.match_buffer(x_handle, (m, size), "float32")
        Y = T.match_buffer(y_handle, (m, size), "float32")
        if m * size <= T.int64(8192):
            for row in T.serial(m):
                for i in T.serial(size // lanes):
                    X[row, T.ramp(i * lanes, 1, lanes)] = (
                        A[row, T.ramp(i * lanes, 1, lanes)] + B[row, T.ramp(i * lanes, 1, lanes)]
                    )
                _scale_row(X, W, Y, row, size, lanes, eps)
        else:
            for row in T.parallel(m):
                for i in T.serial(size // lanes):
                    X[row, T.ramp(i * lanes, 1, lanes)] = (
                        A[row, T.ramp(i * lanes, 1, lanes)] + B[row, T.ramp(i * lanes, 1, lanes)]
                    )
                _scale_row(X, W, Y, row, size, lanes, eps)

    return rms_norm if op.kind == "rms_norm" else add_rms_norm
