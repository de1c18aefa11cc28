"""What a register tile leaves in y."""

from __future__ import annotations

from tvm.script import tirx as T

from tir_schedules.macro import macro


@macro
def store_rows(Y, total, row, row_end, block, rows, blocks, n, lanes, add=False, index=None):
    """Y[row : row + rows, 16 * block :] (+)= total[r * vectors + v], as far as rows lie before `row_end` and columns
    exist; vectors have `lanes` numbers, `blocks` blocks of 16 columns of them stand side by side. With `index` the
    rows of Y are index[row : row + rows].
    """
    per_block, vectors = T.meta_var((16 // lanes, blocks * (16 // lanes)))
    for r in T.unroll(rows):
        if row + r < row_end:
            y = T.meta_var(row + r if index is None else index[row + r])
            for v in T.unroll(vectors):
                column = T.meta_var((block + v // per_block) * 16 + v % per_block * lanes)
                if block + v // per_block < n // 16:
                    if add:
                        total[r * vectors + v, T.ramp(0, 1, lanes)] = (
                            total[r * vectors + v, T.ramp(0, 1, lanes)] + Y[y, T.ramp(column, 1, lanes)]
                        )
                    Y[y, T.ramp(column, 1, lanes)] = total[r * vectors + v, T.ramp(0, 1, lanes)]
                else:
                    for lane in T.serial(lanes):
                        if column + lane < n:
                            if add:
                                total[r * vectors + v, lane] = total[r * vectors + v, lane] + Y[y, column + lane]
                            Y[y, column + lane] = total[r * vectors + v, lane]
