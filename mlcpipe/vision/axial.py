"""Rotary positions of patches, some frequencies of which turn with the row and others with the column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.encoder_layer import Rotation

COLUMN_BITS = 16  # of a place, which has the row above its column


def axial_rotation(
    places: Tensor, first: Sequence[float], second: Sequence[float], *, columns_first: bool = False
) -> Rotation:
    """places i32[m] -> cos and sin f32[m, first + second] of rows times `first`, then columns times `second`; or with
    `columns_first` of columns, then rows.
    """
    inv = Tensor.from_const(np.array([*first, *second], np.float32))
    count, split = len(first) + len(second), len(first)

    def tables(at: te.Tensor, frequency: te.Tensor) -> list[te.Tensor]:
        def angle(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
            of_row = j >= split if columns_first else j < split
            place = tirx.if_then_else(of_row, at[i] >> COLUMN_BITS, at[i] & (1 << COLUMN_BITS) - 1)
            return place.astype("float32") * frequency[j]

        angles = te.compute((at.shape[0], count), angle, name="angle")
        cos = te.compute(angles.shape, lambda i, j: tirx.cos(angles[i, j]), name="cos")
        return [cos, te.compute(angles.shape, lambda i, j: tirx.sin(angles[i, j]), name="sin")]

    cos, sin = op.tensor_expr_op(tables, "axial_rotation", [places, inv])
    return cos, sin
