"""What TensorIR has no operator for: subgroups, dot products of packed int8, arithmetic that is rounded each time.

They are calls of external functions by name, which pass TVM's lowering as they are, and which the code generator for
Vulkan knows (`mlcpipe/compiler/spirv/intrinsics.py`). Those of subgroups are opaque to TVM, which neither moves nor
merges them: invocations that take part are those that come to the same place. The lane of an invocation in its
subgroup is `lane()`, in practice threadIdx.x modulo the size, which is sure after `require_size`. Matrices are of a
subgroup (SPV_KHR_cooperative_matrix, Metal's simdgroup_matrix): which lane has which of their numbers only the device
knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

Expr = Any
_PREFIX = "mlcpipe."


def _dtype(x: Expr) -> str:
    return str(x.ty.dtype)


def _opaque(dtype: str, name: str, *args: Expr) -> Expr:
    return tirx.call_extern(dtype, _PREFIX + name, *args)


def subgroup_add(x: Expr, cluster: int = 0) -> Expr:
    """The sum over the subgroup, or over `cluster` neighbouring lanes, a power of two."""
    return _reduced("add", x, cluster)


def subgroup_min(x: Expr, cluster: int = 0) -> Expr:
    """The smallest of the subgroup."""
    return _reduced("min", x, cluster)


def subgroup_max(x: Expr, cluster: int = 0) -> Expr:
    """The largest of the subgroup."""
    return _reduced("max", x, cluster)


def _reduced(name: str, x: Expr, cluster: int) -> Expr:
    if cluster:
        return _opaque(_dtype(x), f"subgroup_cluster_{name}", x, tirx.const(cluster, "int32"))
    return _opaque(_dtype(x), f"subgroup_{name}", x)


def subgroup_inclusive_add(x: Expr) -> Expr:
    """The sum over the lanes up to one's own."""
    return _opaque(_dtype(x), "subgroup_inclusive_add", x)


def subgroup_exclusive_add(x: Expr) -> Expr:
    """The sum over the lanes before one's own."""
    return _opaque(_dtype(x), "subgroup_exclusive_add", x)


def subgroup_shuffle(x: Expr, lane: Expr) -> Expr:
    """`x` of another lane."""
    return _opaque(_dtype(x), "subgroup_shuffle", x, lane)


def subgroup_shuffle_xor(x: Expr, mask: Expr) -> Expr:
    """`x` of the lane whose number is one's own xor `mask`."""
    return _opaque(_dtype(x), "subgroup_shuffle_xor", x, mask)


def subgroup_shuffle_down(x: Expr, delta: Expr) -> Expr:
    """`x` of the lane `delta` further."""
    return _opaque(_dtype(x), "subgroup_shuffle_down", x, delta)


def subgroup_shuffle_up(x: Expr, delta: Expr) -> Expr:
    """`x` of the lane `delta` before."""
    return _opaque(_dtype(x), "subgroup_shuffle_up", x, delta)


def subgroup_broadcast(x: Expr, lane: Expr) -> Expr:
    """`x` of one lane, the same for all."""
    return _opaque(_dtype(x), "subgroup_broadcast", x, lane)


def subgroup_any(condition: Expr) -> Expr:
    """Whether it holds in one lane."""
    return _opaque("bool", "subgroup_any", condition)


def subgroup_all(condition: Expr) -> Expr:
    """Whether it holds in every lane."""
    return _opaque("bool", "subgroup_all", condition)


def subgroup_size() -> Expr:
    """Lanes of a subgroup, int32."""
    return _opaque("int32", "subgroup_size")


def lane() -> Expr:
    """The number of the invocation in its subgroup, int32."""
    return _opaque("int32", "subgroup_lane")


def subgroup_id() -> Expr:
    """The number of the subgroup in its workgroup, int32."""
    return _opaque("int32", "subgroup_id")


def require_size(lanes: int) -> Expr:
    """A statement: the kernel is launched with subgroups of so many lanes, all of them in use, or refused."""
    return _opaque("int32", "require_subgroup_size", tirx.const(lanes, "int32"))


def dot4_i8(a: Expr, b: Expr, c: Expr) -> Expr:
    """a . b + c, int32, of four int8 in each of two 32-bit words."""
    return tirx.call_pure_extern("int32", _PREFIX + "dot4_i8", a, b, c)


def dot4_u8(a: Expr, b: Expr, c: Expr) -> Expr:
    """a . b + c, uint32, of four uint8 in each of two 32-bit words."""
    return tirx.call_pure_extern("uint32", _PREFIX + "dot4_u8", a, b, c)


def dot4_i8u8(a: Expr, b: Expr, c: Expr) -> Expr:
    """a . b + c, int32, of four int8 in a word and four uint8 in another."""
    return tirx.call_pure_extern("int32", _PREFIX + "dot4_i8u8", a, b, c)


def exact(x: Expr) -> Expr:
    """`x` with every sum and product in it rounded: none are contracted to a fused multiply-add."""
    return tirx.call_pure_extern(_dtype(x), _PREFIX + "exact", x)


def half_pair(low: Expr, high: Expr) -> Expr:
    """Two float32 rounded to float16, in a uint32."""
    return tirx.call_pure_extern("uint32", _PREFIX + "half_pair", low, high)


def low_halves(low: Expr, high: Expr) -> Expr:
    """The lower 16 bits of two words in one, uint32."""
    return tirx.call_pure_extern("uint32", _PREFIX + "low_halves", low, high)


def high_halves(low: Expr, high: Expr) -> Expr:
    """The upper 16 bits of two words in one, uint32."""
    return tirx.call_pure_extern("uint32", _PREFIX + "high_halves", low, high)


def mma(sums: Any, at: int, left: Sequence[Expr], right: Sequence[Expr]) -> None:
    """A statement: sums[at : at + 4] += 16 x 16 float16 by 16 x 8, of a subgroup of 32 (see `mma_matmul.py`).

    `left`: four words of two float16: rows g and g + 8 of columns 2t and 2t + 1, then of 2t + 8 and 2t + 9;
    `right`: two words, of row g, in the same columns.
    """
    I.evaluate(_opaque("int32", "mma", I.address_of(sums[at]), *left, *right))


LEFT, RIGHT, SUM = range(3)  # uses of a matrix: float16, float16, float32


@dataclass(frozen=True)
class Matrix:
    """Numbers that a subgroup has together: a left or right factor, or a sum. `number` is its own in a kernel."""

    number: int
    use: int
    rows: int
    columns: int

    @property
    def facts(self) -> tuple[Expr, ...]:
        """What a call is told of it."""
        return tuple(tirx.const(x, "int32") for x in (self.number, self.use, self.rows, self.columns))


def matrix_clear(matrix: Matrix) -> None:
    """A statement: a sum is 0."""
    I.evaluate(_opaque("int32", "matrix_clear", *matrix.facts))


def matrix_load(matrix: Matrix, words: Any, index: Expr, stride: int, *, by_columns: bool) -> None:
    """A statement: a factor from memory of uint32, two float16 in each, whose rows or columns are `stride` apart."""
    place = (I.address_of(words[index]), tirx.const(stride, "int32"), tirx.const(int(by_columns), "int32"))
    I.evaluate(_opaque("int32", "matrix_load", *matrix.facts, *place))


def matrix_multiply(total: Matrix, left: Matrix, right: Matrix) -> None:
    """A statement: total += left . right."""
    I.evaluate(_opaque("int32", "matrix_multiply", *total.facts, *left.facts, *right.facts))


def matrix_store(matrix: Matrix, words: Any, index: Expr, stride: int) -> None:
    """A statement: a sum as float32 to memory of uint32, its rows `stride` apart."""
    place = (I.address_of(words[index]), tirx.const(stride, "int32"))
    I.evaluate(_opaque("int32", "matrix_store", *matrix.facts, *place))
