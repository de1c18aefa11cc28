"""Attention over pages that the runtime owns: keys and values are plain tensors, and a step's integers one more.

`tir_schedules/step_layout.py` describes `step`; TVM's cache object, for hosts that bring it along, is in `kv_cache.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op

from tir_schedules import step_layout as layout


@dataclass
class PagedAttention:
    """What layers see of the cache inside a model function, as they see a `PagedKVCache`.

    `kernels` names the folder of tir_schedules with the kernels, `spec` is its AttentionShape, `windows[i]` the sliding
    window of layer i or None. `step` is i32[k], `pages[i]` int8[P, page_bytes] of layer i, which `attend` replaces by
    what it is after this step; an encoder, which keeps nothing, has one for all layers. `many`: the rows are those of
    prompts, else each has decode's numerics. `bidirectional`: they see the keys after them, too.
    """

    kernels: str
    spec: Any
    windows: Sequence[int | None]
    step: Tensor
    pages: list[Tensor]
    many: bool
    bidirectional: bool = False

    def attend(self, layer: int, qkv: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Store k and v of qkv [m, heads + 2 kv_heads, D] and attend: -> [m, heads * D].

        `sinks` are f32[heads] where `spec` says that heads have them.
        """
        functions = _functions(self.kernels, self.spec, scale, self.windows[layer] or 0, self.bidirectional)
        own, m = layer % len(self.pages), qkv.shape[0]
        if "rotate_qkv" in functions:
            qkv = op.tensor_ir_inplace_op(functions["rotate_qkv"], "rotate_qkv", [qkv], 0, qkv)
        pages = self.pages[own]
        pages = op.tensor_ir_inplace_op(
            functions["store_pages"], "store_pages", [qkv, self.step, pages], 2, Tensor.placeholder(pages.shape, "int8")
        )
        self.pages[own] = pages
        name = "attend_many" if self.many else "attend_few"
        out = Tensor.placeholder((m, self.spec.num_heads, self.spec.head_dim), qkv.dtype)
        workspace = () if self.many else self.spec.workspace
        outputs = [out, *(Tensor.placeholder((size,), "float32") for size in workspace)]
        attended = op.tensor_ir_op(
            functions[name], name, [qkv, self.step, pages, *([] if sinks is None else [sinks])], outputs
        )
        attended = attended if isinstance(attended, Tensor) else attended[0]
        if "rotate_out" in functions:
            attended = op.tensor_ir_inplace_op(functions["rotate_out"], "rotate_out", [attended], 0, out)
        return op.reshape(attended, (m, self.spec.num_heads * self.spec.head_dim))

    def positions(self, rows: tirx.Expr) -> Tensor:
        """Positions i32[rows] of this forward's tokens in their sequences."""
        return self._of_rows(layout.POSITION, rows, "positions")

    def rope_lengths(self, rows: tirx.Expr) -> Tensor:
        """For each row the length i32[rows] of its whole sequence."""
        return self._of_rows(layout.ROPE_LENGTH, rows, "rope_lengths")

    def _of_rows(self, field: int, rows: tirx.Expr, name: str) -> Tensor:
        def values(step: te.Tensor) -> te.Tensor:
            return te.compute((rows,), lambda i: step[step[field].astype("int64") + i], name=name)

        return op.tensor_expr_op(values, name, [self.step])


def copy_pages(kernels: str, spec: Any, pairs: Sequence[Tensor], pages: Sequence[Tensor]) -> list[Tensor]:
    """In the pages of each layer, page pairs[i, 1] = page pairs[i, 0] (i32[c, 2], one for each layer)."""
    func = _functions(kernels, spec, 1.0, 0)["copy_pages"]
    return [
        op.tensor_ir_inplace_op(func, "copy_pages", [of, layer], 1, Tensor.placeholder(layer.shape, "int8"))
        for of, layer in zip(pairs, pages)
    ]


def _functions(
    kernels: str, spec: Any, scale: float, window: int, bidirectional: bool = False
) -> dict[str, tirx.PrimFunc]:
    """Every function over pages of the kernels' folder, by its role."""
    made: dict[str, tirx.PrimFunc] = importlib.import_module(f"tir_schedules.{kernels}.attention").page_functions(
        spec, scale, window, bidirectional
    )
    return made
