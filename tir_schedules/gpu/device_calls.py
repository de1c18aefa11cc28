"""Calls for operations that TensorIR lacks: subgroups, pairs of float16 in a word, matrix units.

These are calls of external functions by name, which TVM's lowering leaves alone and code generators implement (Vulkan:
`mlcpipe/compiler/backends/spirv/intrinsics.py`). Calls of subgroups are opaque to TVM, which neither moves nor merges
them. All invocations that reach a call take part in it. `lane()` is the lane of an invocation in its subgroup: in
practice threadIdx.x modulo the size, which `require_size` guarantees. A matrix belongs to a subgroup
(SPV_KHR_cooperative_matrix, Metal's simdgroup_matrix); only the device knows which lane has which number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Expr

_PREFIX = "mlcpipe."


def _dtype(x: Expr) -> str:
    return str(x.ty.dtype)


def _opaque(dtype: str, name: str, *args: Expr) -> Expr:
    return tirx.call_extern(dtype, _PREFIX + name, *args)


def subgroup_add(x: Expr, cluster: int = 0) -> Expr:
    """The sum over the subgroup, or over `cluster` neighbouring lanes, a power of two."""
    return _reduced("add", x, cluster)


def subgroup_max(x: Expr, cluster: int = 0) -> Expr:
    """The maximum over the subgroup, or over `cluster` neighbouring lanes."""
    return _reduced("max", x, cluster)


def _reduced(name: str, x: Expr, cluster: int) -> Expr:
    if cluster:
        return _opaque(_dtype(x), f"subgroup_cluster_{name}", x, tirx.const(cluster, "int32"))
    return _opaque(_dtype(x), f"subgroup_{name}", x)


def subgroup_inclusive_add(x: Expr) -> Expr:
    """The sum over the lanes up to and including this one."""
    return _opaque(_dtype(x), "subgroup_inclusive_add", x)


def subgroup_exclusive_add(x: Expr) -> Expr:
    """The sum over the lanes before this one."""
    return _opaque(_dtype(x), "subgroup_exclusive_add", x)


def subgroup_shuffle(x: Expr, lane: Expr) -> Expr:
    """`x` of another lane."""
    return _opaque(_dtype(x), "subgroup_shuffle", x, lane)


def subgroup_shuffle_xor(x: Expr, mask: Expr) -> Expr:
    """`x` of the lane whose number is this lane's xor `mask`."""
    return _opaque(_dtype(x), "subgroup_shuffle_xor", x, mask)


def subgroup_broadcast(x: Expr, lane: Expr) -> Expr:
    """`x` of one lane, for all lanes."""
    return _opaque(_dtype(x), "subgroup_broadcast", x, lane)


def lane() -> Expr:
    """The number of the invocation in its subgroup, int32."""
    return _opaque("int32", "subgroup_lane")


def subgroup_id() -> Expr:
    """The number of the subgroup in its workgroup, int32."""
    return _opaque("int32", "subgroup_id")


def require_size(lanes: int) -> Expr:
    """A statement: the kernel needs full subgroups of `lanes`; devices without them refuse it."""
    return _opaque("int32", "require_subgroup_size", tirx.const(lanes, "int32"))


def half_pair(low: Expr, high: Expr) -> Expr:
    """Two float32 rounded to float16, in a uint32."""
    return tirx.call_pure_extern("uint32", _PREFIX + "half_pair", low, high)


def low_halves(low: Expr, high: Expr) -> Expr:
    """The lower 16 bits of two words, in one uint32."""
    return tirx.call_pure_extern("uint32", _PREFIX + "low_halves", low, high)


def high_halves(low: Expr, high: Expr) -> Expr:
    """The upper 16 bits of two words, in one uint32."""
    return tirx.call_pure_extern("uint32", _PREFIX + "high_halves", low, high)


def permute_bytes(low: Expr, high: Expr, which: Expr) -> Expr:
    """Four of the bytes of two words, in one uint32: a digit of `which` for each, from 0, the lowest of `low`, to 7."""
    digits = tirx.const(which, "uint32") if isinstance(which, int) else which
    return tirx.call_pure_extern("uint32", _PREFIX + "permute_bytes", low, high, digits)


def set_bits(word: Expr, mask: int, bits: int) -> Expr:
    """The bits of a word that `mask` has, and `bits`, by one instruction."""
    constants = (tirx.const(mask, "uint32"), tirx.const(bits, "uint32"))
    return tirx.call_pure_extern("uint32", _PREFIX + "set_bits", word, *constants)


def half_fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a b + c of two float16 in each uint32, rounded once."""
    return tirx.call_pure_extern("uint32", _PREFIX + "half_fma", a, b, c)


def half_multiply(a: Expr, b: Expr) -> Expr:
    """a b of two float16 in each uint32."""
    return tirx.call_pure_extern("uint32", _PREFIX + "half_multiply", a, b)


def low_half(word: Expr) -> Expr:
    """The float16 in the lower 16 bits of a word, as float32."""
    return tirx.call_pure_extern("float32", _PREFIX + "low_half", word)


def high_half(word: Expr) -> Expr:
    """The float16 in the upper 16 bits of a word, as float32."""
    return tirx.call_pure_extern("float32", _PREFIX + "high_half", word)


def resident(threads: int) -> Expr:
    """A statement: registers are to suffice for so many threads of a multiprocessor."""
    return _opaque("int32", "resident", tirx.const(threads, "int32"))


def copy_async(to: Any, at: Expr, words: Any, index: Expr) -> None:
    """A statement: 16 bytes of device memory, from words[index] on, will be in shared memory, from to[at] on."""
    I.evaluate(_opaque("int32", "copy_async", I.address_of(to[at]), I.address_of(words[index])))


def copies_commit() -> None:
    """A statement: this invocation's copies since the last such statement are a group."""
    I.evaluate(_opaque("int32", "copies_commit"))


def copies_wait(groups: int) -> None:
    """A statement: wait until at most `groups` groups of this invocation are unfinished, the latest ones."""
    I.evaluate(_opaque("int32", "copies_wait", tirx.const(groups, "int32")))


def mma(sums: Any, at: int, left: Sequence[Expr], right: Sequence[Expr]) -> None:
    """A statement: sums[at : at + 4] += 16 x 16 float16 by 16 x 8, of a subgroup of 32 (see `matmul/mma.py`).

    `left`: four words of two float16: rows g and g + 8 of columns 2t and 2t + 1, then of 2t + 8 and 2t + 9;
    `right`: two words, of row g, in the same columns.
    """
    I.evaluate(_opaque("int32", "mma", I.address_of(sums[at]), *left, *right))


def mma_from(sums: Any, at: int, start: Any, left: Sequence[Expr], right: Sequence[Expr]) -> None:
    """A statement: sums[at : at + 4] = start[0 : 4] + the product that `mma` adds."""
    I.evaluate(_opaque("int32", "mma_from", I.address_of(sums[at]), I.address_of(start[0]), *left, *right))


LEFT, RIGHT, SUM = range(3)  # uses of a matrix: float16, float16, float32


@dataclass(frozen=True)
class Matrix:
    """A matrix held by a subgroup: a left or right factor, or a sum. `number` is unique in a kernel."""

    number: int
    use: int
    rows: int
    columns: int

    @property
    def facts(self) -> tuple[Expr, ...]:
        """The arguments that describe it in a call."""
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
