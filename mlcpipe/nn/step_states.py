"""A step as layers see it: its integers, and the states that the runtime owns, as plain tensors.

`tir_schedules/step_layout.py` describes the integers; TVM's cache object, for hosts that have it, is in `kv_cache.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op, spec

from mlcpipe.bundle.states import State, windows_of
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.mrope import Layout
from tir_schedules import step_layout as layout


class StepStates:
    """The states inside a model function. A layer replaces a state that it changes with its value after the step.

    `step` is i32[k], `tensors[i]` the one of table[i]. `prefill_rows`: rows are of prompts, else each has decode's
    arithmetic. `bidirectional`: rows also attend to the keys after them, `ahead`: to those of their picture, in the
    layers that `VisionInfo.ahead` says.
    """

    def __init__(
        self,
        model: LanguageModel,
        table: Sequence[State],
        step: Tensor,
        tensors: list[Tensor],
        prefill_rows: bool,
        bidirectional: bool = False,
        ahead: str = "",
    ) -> None:
        self.step, self.tensors, self.prefill_rows = step, tensors, prefill_rows
        self.rows: Tensor | None = None  # of the step, where it is not all of them
        self.biases: Tensor | None = None  # of scores by head and distance, as `tir_schedules.paged.Heads` has them
        self.moved = False  # RoPE may have rows elsewhere than their keys are, after pictures
        self.layout: Layout | None = None  # RoPE has three positions of each row
        self._model, self._table, self._bidirectional, self._ahead = model, table, bidirectional, ahead
        self._windows = windows_of(table) if model.stage is None else model.stage.windows

    @property
    def kernels(self) -> str:
        """The folder of tir_schedules with the kernels."""
        return self._model.kernels

    def place(self, name: str) -> int:
        """The index of a state in `tensors`."""
        return next(index for index, state in enumerate(self._table) if state.name == name)

    def attend(self, layer: int, of: AttentionSpec, qkv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store k and v of qkv [m, heads + 2 kv_heads, D] in the layer's pages and attend: -> [m, heads * v_dim].

        Rows of v are padded to D; if it is `latent`, there are none. A layer that reads another's pages has queries
        alone in `qkv`, and stores nothing. `sinks` are f32[heads] if `of` says that heads have them.
        """
        kept = layer if of.reads is None else of.reads
        own = next(i for i, state in enumerate(self._table) if state.kind == "pages" and kept in state.layers)
        picked = self.rows is not None
        shape = self._model.attention_shape(of, self._windows.index(self._table[own].window), picked_rows=picked)
        ahead = self._ahead == "all" or (self._ahead == "windows" and of.window is not None)
        functions = _functions(self.kernels, shape, of.score_scale, of.window or 0, self._bidirectional, ahead)
        m, pages = qkv.shape[0], self.tensors[own]
        if "rotate_qkv" in functions:
            qkv = op.tensor_ir_inplace_op(functions["rotate_qkv"], "rotate_qkv", [qkv], 0, qkv)
        if "store_pages" in functions:
            kind = Tensor.placeholder(pages.shape, "int8")
            pages = op.tensor_ir_inplace_op(functions["store_pages"], "store_pages", [qkv, self.step, pages], 2, kind)
            self.tensors[own] = pages
        name = "attend_many" if self.prefill_rows else "attend_few"
        out = Tensor.placeholder((m, of.num_heads, of.v_dim), qkv.dtype)
        workspace = () if self.prefill_rows else shape.workspace
        outputs = [out, *(Tensor.placeholder((size,), "float32") for size in workspace)]
        biases = self.biases if of.distances else None
        optional = [one for one in (self.rows, sinks, biases) if one is not None]
        attended = op.tensor_ir_op(functions[name], name, [qkv, self.step, pages, *optional], outputs)
        attended = attended if isinstance(attended, Tensor) else attended[0]
        if "rotate_out" in functions:
            attended = op.tensor_ir_inplace_op(functions["rotate_out"], "rotate_out", [attended], 0, out)
        return op.reshape(attended, (m, of.num_heads * of.v_dim))

    def keep(self, layer: int, of: AttentionSpec, kv: Tensor) -> None:
        """Store k and v of kv [m, 2 kv_heads, D], which other steps attend to, in the layer's pages."""
        own = next(i for i, state in enumerate(self._table) if state.kind == "pages" and layer in state.layers)
        shape = self._model.attention_shape(
            replace(of, num_heads=0, reads=None), self._windows.index(self._table[own].window)
        )
        functions: dict[str, tirx.PrimFunc] = _attention(self.kernels).keep_functions(shape)
        if "rotate_qkv" in functions:
            kv = op.tensor_ir_inplace_op(functions["rotate_qkv"], "rotate_qkv", [kv], 0, kv)
        kind = Tensor.placeholder(self.tensors[own].shape, "int8")
        arguments = [kv, self.step, self.tensors[own]]
        self.tensors[own] = op.tensor_ir_inplace_op(functions["store_pages"], "store_pages", arguments, 2, kind)

    def of_rows(self, rows: Tensor) -> StepStates:
        """The states for some rows i32[r] of the step, in layers that store nothing; with decode's arithmetic."""
        states = StepStates(self._model, self._table, self.step, self.tensors, prefill_rows=False)
        states.rows, states.moved, states.layout = rows, self.moved, self.layout
        return states

    def second(self) -> StepStates:
        """The same states in the step that follows in the same tensor."""

        def values(step: te.Tensor) -> te.Tensor:
            def number(i: tirx.Var) -> tirx.PrimExpr:
                at = step[layout.SECOND].astype("int64") + i
                return tirx.if_then_else(at < step.shape[0], step[tirx.min(at, step.shape[0] - 1)], 0)

            return te.compute(step.shape, number, name="second")

        step = op.tensor_expr_op(values, "second", [self.step])
        return StepStates(self._model, self._table, step, self.tensors, self.prefill_rows, self._bidirectional)

    def update(
        self, name: str, func: tirx.PrimFunc, kernel: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Call func(inputs..., step, state, outputs...), which changes the named state in place -> its outputs.

        They have the shapes and dtypes of `outputs`.
        """
        own = self.place(name)
        made = [Tensor.placeholder(one.shape, one.dtype) for one in (self.tensors[own], *outputs)]
        arguments, places = [*inputs, self.step, self.tensors[own]], [len(inputs) + 1, *(-1 for _ in outputs)]
        found: list[Tensor]
        self.tensors[own], *found = op.tensor_ir_inplace_op(func, kernel, arguments, places, made)
        return found

    def positions(self, rows: tirx.Expr) -> Tensor:
        """Positions i32[rows] of this forward's tokens in their sequences."""
        return self._of_rows(layout.POSITION, rows, "positions")

    def rope_positions(self, rows: tirx.Expr) -> Tensor:
        """Positions that RoPE has of this forward's tokens: i32[rows], or with a `layout` i32[3, rows]."""
        if not self.moved:
            return self.positions(rows)
        flat = self.layout is None

        def values(step: te.Tensor, *picked: te.Tensor) -> te.Tensor:
            def number(*at: tirx.Var) -> tirx.PrimExpr:
                row = (picked[0][at[-1]] if picked else at[-1]).astype("int64")
                begin, count = step[layout.ROPE_POSITION].astype("int64"), step[layout.ROWS].astype("int64")
                apart = step[begin + row if flat else begin + at[0] * count + row]
                return tirx.if_then_else(begin > 0, apart, step[step[layout.POSITION].astype("int64") + row])

            return te.compute((rows,) if flat else (3, rows), number, name="rope_positions")

        return op.tensor_expr_op(values, "rope_positions", [self.step, *([] if self.rows is None else [self.rows])])

    def rope_lengths(self, rows: tirx.Expr) -> Tensor:
        """The length of each row's whole sequence, i32[rows]."""
        return self._of_rows(layout.ROPE_LENGTH, rows, "rope_lengths")

    def _of_rows(self, field: int, rows: tirx.Expr, name: str) -> Tensor:
        def values(step: te.Tensor, *picked: te.Tensor) -> te.Tensor:
            def number(i: tirx.Var) -> tirx.PrimExpr:
                return step[step[field].astype("int64") + (picked[0][i].astype("int64") if picked else i)]

            return te.compute((rows,), number, name=name)

        return op.tensor_expr_op(values, name, [self.step, *([] if self.rows is None else [self.rows])])


def argument(table: Sequence[State], windows: Sequence[int] = ()) -> list[spec.Tensor]:
    """The argument `states` of functions: the numbers of units of a kind and group are one symbol.

    `windows` are those of the groups, by default of the table.
    """
    windows = windows or windows_of(table)
    return [
        spec.Tensor(["Z" if s.kind == "slot" else f"P{windows.index(s.window) or ''}", s.unit_items], s.dtype)
        for s in table
    ]


def copy_pages(model: LanguageModel, pairs: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    """In all states of group g, page pairs[g][i, 1] = page pairs[g][i, 0] (i32[c, 2])."""
    table, windows, copied = model.states(), model.windows(), []
    for state, tensor in zip(table, states):
        if state.kind == "pages":
            func = _attention(model.kernels).copy_pages(state.unit_bytes)
            of, out = pairs[windows.index(state.window)], Tensor.placeholder(tensor.shape, "int8")
            tensor = op.tensor_ir_inplace_op(func, "copy_pages", [of, tensor], 1, out)
        copied.append(tensor)
    return copied


def pairs_argument(windows: Sequence[int]) -> list[spec.Tensor]:
    """The argument `pairs` of `copy_pages`, one tensor per group."""
    return [spec.Tensor([f"c{group or ''}", 2], "int32") for group in range(len(windows))]


def _functions(
    kernels: str, shape: Any, scale: float, window: int, bidirectional: bool, ahead: bool
) -> dict[str, tirx.PrimFunc]:
    """All page functions of the kernels' folder, by role."""
    made: dict[str, tirx.PrimFunc] = _attention(kernels).page_functions(
        shape, scale, window, bidirectional, **({"ahead": True} if ahead else {})
    )
    return made


def _attention(kernels: str) -> Any:
    """The attention of the kernels' folder."""
    return importlib.import_module(f"tir_schedules.{kernels}.attention")
