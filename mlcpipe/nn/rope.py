"""Rotary position embeddings (Su et al. 2021) and their extensions to longer contexts.

Frequencies follow transformers' `modeling_rope_utils.py`: linear (Chen et al. 2023), dynamic NTK, YaRN (Peng
et al. 2023), llama3 and longrope (Ding et al. 2024). Types that depend on the prompt length (dynamic,
longrope) read the length of each row's sequence, i32[m]. With TVM's cache all rows are of one sequence, whose length
follows from the highest position of the forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from tir_schedules.op import tag

Floats = NDArray[np.float32]
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Rope:
    """One set of frequencies: `inv_freq` f32[rotary_dim / 2]; `scale` multiplies cos and sin.

    `long_inv_freq` replaces `inv_freq` above `switch_length` (longrope); `dynamic_factor` > 0 stretches theta
    above `switch_length` (dynamic NTK). `reach` is the number of positions that the type supports; 0
    means the model's own.
    """

    rotary_dim: int
    theta: float
    inv_freq: tuple[float, ...]
    scale: float = 1.0
    switch_length: int = 0
    long_inv_freq: tuple[float, ...] = ()
    dynamic_factor: float = 0.0
    reach: int = 0

    @property
    def depends_on_length(self) -> bool:
        """True if frequencies change with the length of the prompt."""
        return self.switch_length > 0


def read_rope(
    table: Mapping[str, Any],
    head_dim: int,
    positions: int,
    *,
    theta: float,
    original: int | None = None,
    partial: float = 1.0,
    kinds: Sequence[str] = KINDS,
) -> Rope:
    """The frequencies that a checkpoint's rope dictionary specifies.

    `table` is `rope_scaling` or `rope_parameters` of config.json; `theta` and `partial` (the rotated
    fraction of each head) are its defaults. `positions` is `max_position_embeddings`, `original` overrides the
    table's `original_max_position_embeddings`, and `kinds` are the types that the family accepts.
    Raises ConfigError for an unsupported type or value.
    """
    fields = Fields(table, "config.json rope_scaling")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in kinds:
        raise ConfigError("rope_type is not supported", where=fields.where, expected=", ".join(kinds), found=repr(kind))
    theta = fields.number("rope_theta", theta, low=1.0)
    part = fields.number("partial_rotary_factor", partial, low=0.0, high=1.0)
    dim = head_dim if kind == "proportional" else int(head_dim * part)
    smallest = 4 if kind == "dynamic" else 2
    if dim < smallest or dim % 2:
        expected = f"an even number of at least {smallest}"
        raise ConfigError("rotary dimension", where=fields.where, expected=expected, found=dim)
    power = _powers(theta, dim)
    inv = (np.float32(1) / power).astype(np.float32)
    if kind == "default":
        return Rope(dim, theta, _tuple(inv))
    if kind == "proportional":  # whole heads, of which this part has angles that are not 0
        inv[int(part * dim // 2) :] = 0
        return Rope(dim, theta, _tuple(inv / np.float32(fields.number("factor", 1.0, low=1e-6))))
    if kind == "linear":
        return Rope(dim, theta, _tuple(inv / np.float32(fields.number("factor", low=1e-6))))
    if kind == "dynamic":
        factor = fields.number("factor", low=1.0)
        reach = int(factor * positions)
        return Rope(dim, theta, _tuple(inv), switch_length=positions, dynamic_factor=factor, reach=reach)
    if original is None:
        original = fields.integer("original_max_position_embeddings", positions, low=2)
    if kind == "llama3":
        return Rope(dim, theta, _tuple(_llama3(fields, inv, original)))
    if kind == "yarn":
        return _yarn(fields, dim, theta, power, original, positions)
    return _longrope(fields, dim, theta, power, original, positions)


def no_rope(head_dim: int) -> Rope:
    """The frequencies of layers without rotary positions: cosines of 1 and sines of 0 change nothing."""
    return Rope(head_dim, 1.0, (0.0,) * (head_dim // 2))


def _powers(theta: float, dim: int) -> Floats:
    """theta^(2j / dim) in float32, as torch computes it."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: Floats = np.power(np.float32(theta), exponents, dtype=np.float32)
    return powers


def _tuple(values: NDArray[np.floating[Any]]) -> tuple[float, ...]:
    return tuple(float(v) for v in values.astype(np.float32))


def _llama3(fields: Fields, inv: Floats, original: int) -> Floats:
    factor = fields.number("factor", low=1e-6)
    low, high = fields.number("low_freq_factor", low=1e-6), fields.number("high_freq_factor", low=1e-6)
    if high <= low:
        raise ConfigError(
            "rope factors",
            where=fields.where,
            expected="high_freq_factor > low_freq_factor",
            found=f"{high}, {low}",
        )
    wave = 2 * math.pi / inv
    smooth = (original / wave - low) / (high - low)
    blend = (1 - smooth) * inv / factor + smooth * inv
    return np.where(wave < original / high, inv, np.where(wave > original / low, inv / factor, blend)).astype(
        np.float32
    )


def yarn_attention(factor: float, mscale: float) -> float:
    """By how much attention grows with a context `factor` times as long (YaRN, Peng et al. 2023)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(fields: Fields, dim: int, theta: float, power: Floats, original: int, limit: int) -> Rope:
    if "factor" not in fields.values:
        raise ConfigError("field factor", where=fields.where, expected="a number, or null", found="none")
    factor = fields.number("factor", limit / original, low=1e-6)
    if theta <= 1.0:
        raise ConfigError("field rope_theta", where=fields.where, expected="more than 1 for yarn", found=theta)

    mscale, mscale_all = fields.number("mscale", 0.0, low=0.0), fields.number("mscale_all_dim", 0.0, low=0.0)
    attention = [yarn_attention(factor, one) for one in (mscale, mscale_all)]
    derived = attention[0] / attention[1] if mscale and mscale_all else yarn_attention(factor, 1.0)
    scale = fields.number("attention_factor", derived, low=0.0)

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = correction(fields.number("beta_fast", 32.0, low=1e-6))
    high = correction(fields.number("beta_slow", 1.0, low=1e-6))
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    steps = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    inv = (1 / (np.float32(factor) * power)) * ramp + (1 / power) * (1 - ramp)
    return Rope(dim, theta, _tuple(inv.astype(np.float32)), scale, reach=int(factor * original))


def _longrope(fields: Fields, dim: int, theta: float, power: Floats, original: int, limit: int) -> Rope:
    factor = fields.number("factor", limit / original, low=1e-6)
    derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scale = fields.number("attention_factor", derived, low=0.0)
    short, long = (np.array(fields.numbers(name, dim // 2), np.float32) for name in ("short_factor", "long_factor"))
    return Rope(
        dim,
        theta,
        _tuple(1 / (short * power)),
        scale,
        switch_length=original,
        long_inv_freq=_tuple(1 / (long * power)),
    )


def cos_sin(rope: Rope, positions: Tensor, length: Tensor | None, axes: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """positions i32[m] -> (cos, sin) f32[m, rotary_dim / 2], multiplied by `rope.scale`.

    With `axes` positions are i32[a, m], and pair j has those of axes[j]. `length` is i32[m], read if frequencies depend
    on it; None: that of the highest position, without `axes`.
    """
    half = rope.rotary_dim // 2
    tables = [Tensor.from_const(np.array(rope.inv_freq, np.float32))]
    if rope.long_inv_freq:
        tables.append(Tensor.from_const(np.array(rope.long_inv_freq, np.float32)))
    args = [positions, *tables]
    of_rows = rope.depends_on_length and length is not None
    if of_rows:
        args.append(length)
    if axes:
        args.append(Tensor.from_const(np.array(axes, np.int32)))
    func = _cos_sin_definition(rope, of_rows, int(positions.shape[0]) if axes else 0)
    out = Tensor.placeholder((positions.shape[-1], half), "float32")
    cos, sin = op.tensor_ir_op(func, "rope_cos_sin", args, [out, out])
    return cos, sin


def _cos_sin_definition(rope: Rope, of_rows: bool, axes: int) -> tirx.PrimFunc:
    """The kernel for positions i32[m], or i32[axes, m]."""
    m, half = tirx.Var("m", "int64"), rope.rotary_dim // 2
    positions = te.placeholder((axes, m) if axes else (m,), "int32", name="positions")
    tables = [te.placeholder((half,), "float32", name="inv_freq")]
    inputs = [positions, *tables]

    def one(j: tirx.Var) -> tirx.PrimExpr:
        return tables[0][j]

    frequencies = {"shape": (half,), "fcompute": one}
    if rope.depends_on_length:
        if rope.long_inv_freq:
            tables.append(te.placeholder((half,), "float32", name="long_inv_freq"))
            inputs.append(tables[1])
        lengths = te.placeholder((m,), "int32", name="rope_length") if of_rows else None
        inputs += [lengths] if of_rows else []
        frequencies = _length_dependent(rope, tables, positions, lengths)
    inv = te.compute(**frequencies, name="frequency")
    axis_of = te.placeholder((half,), "int32", name="axis_of")
    inputs += [axis_of] if axes else []

    def angle_of(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        position = positions[axis_of[j], i] if axes else positions[i]
        return position.astype("float32") * (inv[j] if len(inv.shape) == 1 else inv[i, j])

    angle = te.compute((m, half), angle_of, name="angle")
    scale = tirx.const(rope.scale, "float32")
    cos = te.compute((m, half), lambda i, j: tirx.cos(angle[i, j]) * scale, name="cos")
    sin = te.compute((m, half), lambda i, j: tirx.sin(angle[i, j]) * scale, name="sin")
    return tag(te.create_prim_func([*inputs, cos, sin]), "rope_cos_sin", half=half)


def _length_dependent(
    rope: Rope, tables: list[te.Tensor], positions: te.Tensor, lengths: te.Tensor | None
) -> dict[str, Any]:
    """Shape and definition of the frequencies: of pair j for each row's length, or for the one length of all."""
    limit, dim, m, half = rope.switch_length, rope.rotary_dim, positions.shape[-1], rope.rotary_dim // 2

    def by_length(length: tirx.PrimExpr, j: tirx.Var) -> tirx.PrimExpr:
        if rope.long_inv_freq:
            return tirx.if_then_else(length > limit, tables[1][j], tables[0][j])
        ratio = tirx.max(length, limit).astype("float32") * (rope.dynamic_factor / limit) - (rope.dynamic_factor - 1.0)
        stretched = tirx.const(rope.theta, "float32") * tirx.pow(ratio, tirx.const(dim / (dim - 2), "float32"))
        power = tirx.pow(stretched, j.astype("float32") * tirx.const(2.0 / dim, "float32"))
        return tirx.if_then_else(length > limit, tirx.const(1.0, "float32") / power, tables[0][j])

    if lengths is not None:
        return {"shape": (m, half), "fcompute": lambda i, j: by_length(lengths[i], j)}
    r = te.reduce_axis((0, m), "r")
    highest = te.compute((1,), lambda _: te.max(positions[r] + 1, axis=r), name="highest")
    return {"shape": (half,), "fcompute": lambda j: by_length(highest[0], j)}
