"""The shape of a projection's adapters, for which kernels are made."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm import tirx

from tir_schedules.builder import Expr, Tensor
from tir_schedules.op import Op
from tir_schedules.step import step_argument
from tir_schedules.step_layout import RANK


@dataclass(frozen=True)
class AdapterShape:
    """y[m, sum(parts)] += B A x with x [m, k], for a low-rank adapter of each part of the columns (Hu et al. 2021).

    An adapter is a number of blocks of RANK ranks, whose products add up. `dtype` is that of A and B: float32, float16
    or uint8, where 128 stands for 0.
    """

    k: int
    parts: tuple[int, ...]
    dtype: str

    @property
    def columns(self) -> int:
        """N, the columns of y."""
        return sum(self.parts)

    @property
    def multiple(self) -> int:
        """The largest power of two, up to 64, that divides k and all parts."""
        return gcd(64, self.k, *self.parts)

    @property
    def facts(self) -> dict[str, int | float | str]:
        """Its facts for the tags of kernels."""
        return {"adapter_k": self.k, "adapter_parts": " ".join(map(str, self.parts)), "adapter_dtype": self.dtype}

    def arrays(self, blocks: Expr) -> dict[str, tuple[tuple[Expr, ...], str]]:
        """Name -> (shape, dtype): A as [block, part, k, rank], B as [block, N / 16, rank, 16 columns].

        In uint8 four k or ranks lie side by side, as integer dot products take them: A as [block, part, k / 4,
        4 * rank], where even k come before odd ones in every eight, B as [block, N / 16, rank / 4, 4 * 16 columns].
        `scale` multiplies A x, for each rank; that of the first is 0 in parts without ranks in a block.
        """
        parts, four = len(self.parts), 4 if self.dtype == "uint8" else 1
        return {
            "a": ((blocks, parts, self.k // four, RANK * four), self.dtype),
            "b": ((blocks, self.columns // 16, RANK // four, 16 * four), self.dtype),
            "scale": ((blocks, parts, RANK), "float32"),
        }

    def arguments(self) -> tuple[dict[str, Tensor], Expr, Expr]:
        """The arguments (x f32[m, k], step, a, b, scale, y f32[m, N]) of a kernel, m, and the number of blocks."""
        m, size, blocks = (tirx.Var(name, "int64") for name in ("m", "size", "blocks"))
        arrays = {name: Tensor(shape, dtype) for name, (shape, dtype) in self.arrays(blocks).items()}
        x, y = (Tensor((m, columns), "float32") for columns in (self.k, self.columns))
        return {"x": x, "step": step_argument(size), **arrays, "y": y}, m, blocks

    def part_of(self, column: Expr) -> Expr:
        """The part of a column."""
        ends = [sum(self.parts[: i + 1]) for i in range(len(self.parts) - 1)]
        return sum(((column >= end).astype("int64") for end in ends), column * 0)


def adapters_of(op: Op) -> AdapterShape | None:
    """The adapters of a tagged kernel, None where it has none."""
    if "adapter_parts" not in op.facts:
        return None
    parts = tuple(map(int, op.str("adapter_parts").split()))
    return AdapterShape(op.int("adapter_k"), parts, op.str("adapter_dtype"))
