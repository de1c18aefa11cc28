"""act(gate) * up of a projection whose first half of columns is gate and whose second half is up."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import ACTIVATIONS
from tir_schedules.builder import Buffer, Expr, Tensor, function
from tir_schedules.cpu.vectors import value
from tir_schedules.op import Op
from tir_schedules.rule import Declined, NamedRule, hand_written


@dataclass(frozen=True)
class Gate:
    """`activation` is a name of ACTIVATIONS; the projection has 2 * `width` columns."""

    activation: str
    width: int

    def __call__(self, gate: Expr, up: Expr) -> Expr:
        """act(gate) * up, float32 scalars or vectors."""
        return ACTIVATIONS[self.activation](gate) * up


def gate_of(op: Op) -> Gate | None:
    """The gate of a tagged product; None where it has none."""
    return Gate(op.str("activation"), op.int("n") // 2) if "activation" in op.facts else None


def ungated(gate: Gate | None, Y: Buffer, m: Expr | int) -> Buffer:
    """Where a kernel leaves its m rows: Y, or f32[m, 2 * width] that `apply_gate` takes up."""
    return Y if gate is None else I.alloc_buffer((m, 2 * gate.width), "float32")


def apply_gate(gate: Gate | None, H: Buffer, Y: Buffer, m: Expr | int) -> None:
    """Emit Y[:m] = act(H[:, :width]) * H[:, width:]; nothing without a gate."""
    if gate is None:
        return
    with I.serial(0, m) if isinstance(m, int) else I.parallel(0, m) as row:
        gate_row(gate, (H, row, 0), (H, row, gate.width), (Y, row, 0), gate.width)


def gate_row(
    gate: Gate,
    gates: tuple[Buffer, Expr, Expr],
    ups: tuple[Buffer, Expr, Expr],
    y: tuple[Buffer, Expr, Expr],
    size: int,
) -> None:
    """Emit y = act(gates) * ups for `size` numbers; each begins at (buffer, row, column)."""
    lanes = next(n for n in (16, 8, 4, 2, 1) if size % n == 0)

    def index(row: Expr, first: Expr, i: Expr) -> list[Expr]:
        return [row, first + i if lanes == 1 else I.ramp(first + i * lanes, 1, lanes)]

    with I.serial(0, size // lanes) as i:
        factors = [value(buffer[tuple(index(row, first, i))]) for buffer, row, first in (gates, ups)]
        I.buffer_store(y[0], gate(*factors), index(*y[1:], i))


def gate_alone(op: Op) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `gate`, whose arithmetic is that of a `gated_matmul`."""
    if op.str("dtype") != "float32":
        return Declined(f"activations are {op.str('dtype')}")
    m, gate = tirx.Var("m", "int64"), Gate(op.str("activation"), op.int("width"))
    arguments = {"h": Tensor((m, 2 * gate.width), "float32"), "y": Tensor((m, gate.width), "float32")}
    return function("gate", arguments, lambda H, Y: apply_gate(gate, H, Y, m))


RULES = (NamedRule("cpu.gate", ("gate",), hand_written(lambda _, op, knobs: gate_alone(op))),)
