"""TE definitions of the compiled operations, each tagged so that schedule rules recognize it.

A definition is the reference and the fallback; `tir_schedules` replaces it with a kernel where a rule applies.
`m` is the symbolic number of rows (tokens); each function states its shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import te, tirx

from mlcpipe.quantization.layout import Layout
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.quantization.te import dequantize_element
from tir_schedules.activation import ACTIVATIONS
from tir_schedules.op import tag


def _rows(name: str = "m") -> tirx.Var:
    return tirx.Var(name, "int64")


def _packed_inputs(scheme: Scheme, layout: Layout, n: int, k: int, experts: int | None = None) -> list[te.Tensor]:
    return [
        te.placeholder(shape, dtype, name=name) for name, (shape, dtype) in layout.shapes(scheme, n, k, experts).items()
    ]


def _facts(scheme: Scheme, layout: Layout, n: int, k: int) -> dict[str, int | float | str]:
    facts: dict[str, int | float | str] = {
        "n": n,
        "k": k,
        "bits": scheme.bits,
        "group_size": scheme.group(k),
        "codes_per_word": scheme.codes_per_word,
        "zero_point": scheme.zero_point,
        "dtype": scheme.model_dtype,
        "layout": layout.name,
    }
    if scheme.kept:
        facts |= {"scheme": scheme.name, "super_size": scheme.super_size, "minima": int(scheme.minima)}
        facts |= {"table": " ".join(map(str, scheme.table)), "unit": scheme.unit, "scale_format": scheme.scale_format}
        facts |= {"zeros": int(scheme.zeros), "blocked": int(scheme.blocked)}
    return facts


def _element(
    scheme: Scheme, layout: Layout, packed: list[te.Tensor], indices: tuple[tirx.PrimExpr, ...], dtype: str
) -> tirx.PrimExpr:
    scale, sub = (packed[i] if len(packed) > i else None for i in (1, 2))
    return dequantize_element(scheme, layout, packed[0], scale, indices, dtype, sub)


def dequantize(scheme: Scheme, layout: Layout, n: int, k: int, dtype: str, experts: int | None = None) -> tirx.PrimFunc:
    """Packed arrays -> w dtype[n, k], or [experts, n, k]."""
    packed = _packed_inputs(scheme, layout, n, k, experts)
    shape = (n, k) if experts is None else (experts, n, k)
    w = te.compute(shape, lambda *i: _element(scheme, layout, packed, i, dtype), name="dequantize")
    return tag(te.create_prim_func([*packed, w]), "dequantize", **_facts(scheme, layout, n, k))


def matmul(scheme: Scheme, layout: Layout, n: int, k: int, dtype: str) -> tirx.PrimFunc:
    """x dtype[m, k], packed w [n, k] -> x w^T dtype[m, n]."""
    inputs, y = _product(scheme, layout, n, k, dtype)
    return tag(te.create_prim_func([*inputs, y]), "matmul", **_facts(scheme, layout, n, k))


def gated_matmul(scheme: Scheme, layout: Layout, n: int, k: int, activation: str, dtype: str) -> tirx.PrimFunc:
    """x dtype[m, k], packed w [n, k], gate rows, then as many up rows -> act(x gate^T) * (x up^T) dtype[m, n / 2]."""
    inputs, h = _product(scheme, layout, n, k, dtype)
    act, width = ACTIVATIONS[activation], n // 2
    y = te.compute((h.shape[0], width), lambda i, j: act(h(i, j)) * h(i, j + width), name="gated")
    facts = _facts(scheme, layout, n, k) | {"activation": activation}
    return tag(te.create_prim_func([*inputs, y]), "gated_matmul", **facts)


def gate(width: int, activation: str, dtype: str) -> tirx.PrimFunc:
    """h dtype[m, 2 * width], gate columns, then up columns -> act(gate) * up dtype[m, width]."""
    h, act = te.placeholder((_rows(), 2 * width), dtype, name="h"), ACTIVATIONS[activation]
    y = te.compute((h.shape[0], width), lambda i, j: act(h(i, j)) * h(i, j + width), name="gate")
    return tag(te.create_prim_func([h, y]), "gate", width=width, activation=activation, dtype=dtype)


def _product(scheme: Scheme, layout: Layout, n: int, k: int, dtype: str) -> tuple[list[te.Tensor], te.Tensor]:
    """The inputs x and packed w, and x w^T."""
    x = te.placeholder((_rows(), k), dtype, name="x")
    packed = _packed_inputs(scheme, layout, n, k)
    w = te.compute((n, k), lambda i, j: _element(scheme, layout, packed, (i, j), dtype), name="w")
    r = te.reduce_axis((0, k), "r")
    y = te.compute((x.shape[0], n), lambda i, j: te.sum(x[i, r] * w[j, r], axis=r), name="matmul")
    return [x, *packed], y


def take(scheme: Scheme, layout: Layout, n: int, k: int, dtype: str) -> tirx.PrimFunc:
    """Packed table [n, k], ids i32[m] -> rows dtype[m, k]; ids are clamped to the table."""
    packed = _packed_inputs(scheme, layout, n, k)
    ids = te.placeholder((_rows(),), "int32", name="ids")

    def row(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return _element(scheme, layout, packed, (_clamped(ids[i], n), j), dtype)

    y = te.compute((ids.shape[0], k), row, name="take")
    return tag(te.create_prim_func([*packed, ids, y]), "take", **_facts(scheme, layout, n, k))


def rows(scheme: Scheme, layout: Layout, k: int, dtype: str) -> tirx.PrimFunc:
    """Packed rows [m, k] in layout `row_words` -> dtype[m, k]."""
    m = _rows()
    shapes = layout.shapes(scheme, 1, k)
    packed = [te.placeholder((m, *shape[1:]), array, name=name) for name, (shape, array) in shapes.items()]
    y = te.compute((m, k), lambda i, j: _element(scheme, layout, packed, (i, j), dtype), name="rows")
    return tag(te.create_prim_func([*packed, y]), "rows", **_facts(scheme, layout, 1, k))


def expert_matmul(
    scheme: Scheme, layout: Layout, experts: int, n: int, k: int, top: int, shared: bool, dtype: str
) -> tirx.PrimFunc:
    """x [m, k] (`shared`: the experts of a token read the same row) or [m * top, k]; packed w [experts, n, k];
    ids i32[m, top] -> y dtype[m * top, n] with y[i * top + t] = x' w[ids[i, t]]^T.
    """
    m = _rows()
    x = te.placeholder((m if shared else m * top, k), dtype, name="x")
    packed = _packed_inputs(scheme, layout, n, k, experts)
    ids = te.placeholder((m, top), "int32", name="ids")
    r = te.reduce_axis((0, k), "r")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        expert = _clamped(ids[i // top, i % top], experts)
        row = i // top if shared else i
        return te.sum(x[row, r] * _element(scheme, layout, packed, (expert, j, r), dtype), axis=r)

    y = te.compute((m * top, n), element, name="expert_matmul")
    facts = _facts(scheme, layout, n, k) | {"experts": experts, "top": top, "shared": int(shared)}
    return tag(te.create_prim_func([x, *packed, ids, y]), "expert_matmul", **facts)


def head_matmul(scheme: Scheme, layout: Layout, heads: int, n: int, k: int, columns: int, dtype: str) -> tirx.PrimFunc:
    """x dtype[m, heads, columns >= k], packed w [heads * n, k] -> y dtype[m, heads, n]: the products of each head."""
    m = _rows()
    x = te.placeholder((m, heads, columns), dtype, name="x")
    packed = _packed_inputs(scheme, layout, heads * n, k)
    r = te.reduce_axis((0, k), "r")

    def element(i: tirx.Var, h: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return te.sum(x[i, h, r] * _element(scheme, layout, packed, (h * n + j, r), dtype), axis=r)

    y = te.compute((m, heads, n), element, name="head_matmul")
    facts = _facts(scheme, layout, heads * n, k) | {"heads": heads, "columns": columns}
    return tag(te.create_prim_func([x, *packed, y]), "head_matmul", **facts)


def expert_columns(experts: int, k: int, top: int, shared: bool, dtype: str) -> tirx.PrimFunc:
    """x as `expert_matmul` reads it, columns i32[experts, k], ids i32[m, top] -> x dtype[m * top, k], the columns of
    each row in the order of its expert's. Untagged: an elementwise function.
    """
    m = _rows()
    x = te.placeholder((m if shared else m * top, k), dtype, name="x")
    columns = te.placeholder((experts, k), "int32", name="columns")
    ids = te.placeholder((m, top), "int32", name="ids")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        expert = _clamped(ids[i // top, i % top], experts)
        return x[i // top if shared else i, _clamped(columns[expert, j], k)]

    return te.create_prim_func([x, columns, ids, te.compute((m * top, k), element, name="expert_columns")])


def _clamped(index: tirx.PrimExpr, size: int) -> tirx.PrimExpr:
    return tirx.min(tirx.max(index, tirx.const(0, "int32")), tirx.const(size - 1, "int32"))


def _mean_square(x: te.Tensor, size: int, eps: float) -> te.Tensor:
    r = te.reduce_axis((0, size), "r")
    square = te.compute(
        (x.shape[0],), lambda i: te.sum(x[i, r].astype("float32") * x[i, r].astype("float32"), axis=r), name="square"
    )
    return te.compute(
        (x.shape[0],), lambda i: tirx.rsqrt(square[i] / float(size) + tirx.const(eps, "float32")), name="rsqrt"
    )


def rms_norm(size: int, eps: float, dtype: str, weight_dtype: str) -> tirx.PrimFunc:
    """x dtype[m, size], weight [size] -> x / rms(x) * weight, computed in float32 (Zhang & Sennrich 2019)."""
    x = te.placeholder((_rows(), size), dtype, name="x")
    w = te.placeholder((size,), weight_dtype, name="weight")
    scale = _mean_square(x, size, eps)
    y = te.compute(
        x.shape,
        lambda i, j: (x[i, j].astype("float32") * scale[i] * w[j].astype("float32")).astype(dtype),
        name="rms_norm",
    )
    return tag(te.create_prim_func([x, w, y]), "rms_norm", size=size, eps=eps, dtype=dtype, weight_dtype=weight_dtype)


def add_rms_norm(size: int, eps: float, dtype: str, weight_dtype: str) -> tirx.PrimFunc:
    """a, b dtype[m, size], weight [size] -> (a + b, rms_norm(a + b))."""
    a = te.placeholder((_rows(), size), dtype, name="a")
    b = te.placeholder(a.shape, dtype, name="b")
    w = te.placeholder((size,), weight_dtype, name="weight")
    x = te.compute(a.shape, lambda i, j: a[i, j] + b[i, j], name="sum")
    scale = _mean_square(x, size, eps)
    y = te.compute(
        x.shape,
        lambda i, j: (x[i, j].astype("float32") * scale[i] * w[j].astype("float32")).astype(dtype),
        name="rms_norm",
    )
    func = te.create_prim_func([a, b, w, x, y])
    return tag(func, "add_rms_norm", size=size, eps=eps, dtype=dtype, weight_dtype=weight_dtype)


def layer_norm(size: int, eps: float, dtype: str, weight_dtype: str, *, biased: bool, residual: bool) -> tirx.PrimFunc:
    """x dtype[m, size], weight and, if `biased`, bias [size] -> (x - mean) / sqrt(variance + eps) * weight + bias.

    With `residual`: a, b dtype[m, size], weight, bias -> (a + b, its norm). Computed in float32 (Ba et al. 2016).
    """
    a, b = (te.placeholder((m, size), dtype, name=name) for m in (_rows(),) for name in "ab")
    vectors = [te.placeholder((size,), weight_dtype, name=name) for name in ("weight", "bias")[: 1 + biased]]
    x = te.compute(a.shape, lambda i, j: a[i, j] + b[i, j], name="sum") if residual else a
    r, s = te.reduce_axis((0, size), "r"), te.reduce_axis((0, size), "s")
    total = te.compute((x.shape[0],), lambda i: te.sum(x[i, r].astype("float32"), axis=r), name="total")

    def centred(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return x[i, j].astype("float32") - total[i] / float(size)

    square = te.compute((x.shape[0],), lambda i: te.sum(centred(i, s) * centred(i, s), axis=s), name="square")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        scale = tirx.rsqrt(square[i] / float(size) + tirx.const(eps, "float32"))
        weight, *bias = (vector[j].astype("float32") for vector in vectors)
        return sum(bias, centred(i, j) * scale * weight).astype(dtype)

    y = te.compute(x.shape, element, name="layer_norm")
    func = te.create_prim_func([a, b, *vectors, x, y] if residual else [a, *vectors, y])
    facts: dict[str, int | float | str] = {"size": size, "eps": eps, "dtype": dtype, "weight_dtype": weight_dtype}
    facts["biased"] = int(biased)
    return tag(func, "add_layer_norm" if residual else "layer_norm", **facts)


def apply_rope(heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: str, kv_dtype: str) -> tirx.PrimFunc:
    """q dtype[m, heads, D], k and v dtype[m, kv_heads, D] unless `kv_heads` is 0, cos and sin f32[m, rotary_dim / 2]
    -> qkv kv_dtype[m, heads + 2 kv_heads, D].

    The first `rotary_dim` elements of each q and k head are rotated, halves paired (Su et al. 2021, in the order
    of GPT-NeoX: element i with element i + rotary_dim / 2); the rest and v pass through.
    """
    m = _rows()
    q = te.placeholder((m, heads, head_dim), dtype, name="q")
    kv = [te.placeholder((m, kv_heads, head_dim), dtype, name=name) for name in ("kv" if kv_heads else "")]
    rotation = _Rotation(m, rotary_dim, head_dim)

    def element(i: tirx.Var, h: tirx.Var, d: tirx.Var) -> tirx.PrimExpr:
        query = rotation.of(lambda j: q[i, h, j].astype("float32"), i, d)
        if not kv:
            return query.astype(kv_dtype)
        k, v = kv
        value = tirx.if_then_else(
            h < heads,
            query,
            tirx.if_then_else(
                h < heads + kv_heads,
                rotation.of(lambda j: k[i, h - heads, j].astype("float32"), i, d),
                v[i, h - heads - kv_heads, d].astype("float32"),
            ),
        )
        return value.astype(kv_dtype)

    qkv = te.compute((m, heads + 2 * kv_heads, head_dim), element, name="rope")
    facts = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": rotary_dim}
    func = te.create_prim_func([q, *kv, rotation.cos, rotation.sin, qkv])
    return tag(func, "rope", **facts, dtype=dtype, kv_dtype=kv_dtype)


def make_room(heads: int, room: int, kv_heads: int, head_dim: int, dtype: str) -> tirx.PrimFunc:
    """qkv dtype[m, heads + 2 kv_heads, D] -> dtype[m, heads + room + 2 kv_heads, D], with zeros after the queries.
    Untagged: an elementwise function.
    """
    m = _rows()
    qkv = te.placeholder((m, heads + 2 * kv_heads, head_dim), dtype, name="qkv")

    def element(i: tirx.Var, h: tirx.Var, d: tirx.Var) -> tirx.PrimExpr:
        rest = tirx.if_then_else(h < heads + room, tirx.const(0, dtype), qkv[i, tirx.max(h - room, heads), d])
        return tirx.if_then_else(h < heads, qkv[i, h, d], rest)

    out = te.compute((m, heads + room + 2 * kv_heads, head_dim), element, name="make_room")
    return te.create_prim_func([qkv, out]).without_attr("global_symbol")


def count_sinks(heads: int, room: int, head_dim: int, dtype: str) -> tirx.PrimFunc:
    """attended dtype[m, heads + room, D] without sinks, sinks f32[heads] -> dtype[m, heads D] with them.

    The last heads say the sums of weights, as `scores.store_sum` of the GPU's kernels wrote them; a sink adds its own
    weight to the sum, and nothing to the values (Xiao et al. 2023; gpt-oss). Untagged: an elementwise function.
    """
    m = _rows()
    attended = te.placeholder((m, heads + room, head_dim), dtype, name="attended")
    sinks = te.placeholder((heads,), "float32", name="sinks")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        h, d = j // head_dim, j % head_dim
        first, at = heads + h // head_dim, h % head_dim
        sum_ = attended[i, first, at].astype("float32") + attended[i, first + room // 2, at].astype("float32")
        beyond = tirx.min(sinks[h] * tirx.const(math.log2(math.e), "float32") - sum_, tirx.const(126, "float32"))
        return (attended[i, h, d].astype("float32") / (1 + tirx.exp2(beyond))).astype(dtype)

    out = te.compute((m, heads * head_dim), element, name="count_sinks")
    return te.create_prim_func([attended, sinks, out]).without_attr("global_symbol")


def apply_rope_to_projection(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: str, kv_dtype: str, bias_dtype: str
) -> tirx.PrimFunc:
    """`apply_rope` of a joined projection dtype[m, (heads + 2 kv_heads) D], to which biases of `bias_dtype` are added.

    Arguments: the projection, cos, sin; unless `bias_dtype` is "", the biases of q, k and v.
    """
    m, every = _rows(), heads + 2 * kv_heads
    x = te.placeholder((m, every * head_dim), dtype, name="projection")
    sizes = (heads, kv_heads, kv_heads) if bias_dtype else ()
    biases = [te.placeholder((n * head_dim,), bias_dtype, name=f"{of}_bias") for n, of in zip(sizes, "qkv")]
    rotation = _Rotation(m, rotary_dim, head_dim)

    def bias(h: tirx.Var, j: tirx.PrimExpr) -> tirx.PrimExpr:
        q, k, v = biases
        of_v = v[(h - heads - kv_heads) * head_dim + j]
        of_kv = tirx.if_then_else(h < heads + kv_heads, k[(h - heads) * head_dim + j], of_v)
        return tirx.if_then_else(h < heads, q[h * head_dim + j], of_kv)

    def element(i: tirx.Var, h: tirx.Var, d: tirx.Var) -> tirx.PrimExpr:
        def at(j: tirx.PrimExpr) -> tirx.PrimExpr:
            value = x[i, h * head_dim + j]
            return (value + bias(h, j).astype(dtype) if biases else value).astype("float32")

        return tirx.if_then_else(h < heads + kv_heads, rotation.of(at, i, d), at(d)).astype(kv_dtype)

    qkv = te.compute((m, every, head_dim), element, name="rope")
    facts = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": rotary_dim}
    func = te.create_prim_func([x, rotation.cos, rotation.sin, *biases, qkv])
    return tag(func, "rope_of_projection", **facts, dtype=dtype, kv_dtype=kv_dtype, bias_dtype=bias_dtype)


class _Rotation:
    """The rotation of heads by `cos` and `sin` f32[m, rotary_dim / 2]."""

    def __init__(self, m: tirx.Var, rotary_dim: int, head_dim: int) -> None:
        self.half, self.whole = rotary_dim // 2, rotary_dim == head_dim
        self.cos = te.placeholder((m, self.half), "float32", name="cos")
        self.sin = te.placeholder((m, self.half), "float32", name="sin")

    def of(self, at: Callable[[tirx.PrimExpr], tirx.PrimExpr], i: tirx.Var, d: tirx.Var) -> tirx.PrimExpr:
        """Element d of a head of row i, whose element j is at(j)."""
        half, cos, sin = self.half, self.cos, self.sin
        low = at(d) * cos[i, d] - at(d + half) * sin[i, d]
        high = at(d) * cos[i, d - half] + at(d - half) * sin[i, d - half]
        rotated = tirx.if_then_else(d < half, low, high)
        return rotated if self.whole else tirx.if_then_else(d < 2 * half, rotated, at(d))
