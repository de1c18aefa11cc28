"""What steps and prompts of gated delta nets on CPUs compute of a row; see `delta_shape.py`."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.vectors import Registers, load, scratch, splat, store, total, value
from tir_schedules.delta_shape import EPS, Inputs


def lanes_of_size(size: int) -> int:
    """The widest vectors that `size` numbers are whole ones of."""
    return next(n for n in (16, 8, 4, 2, 1) if size % n == 0)


def _dot(size: int, pairs: int, load_pair: Callable[[int, Expr, int], tuple[Expr, Expr]]) -> list[Expr]:
    """Some dot products of `size` numbers: load_pair(which, first, lanes) has a vector of both."""
    lanes = lanes_of_size(size)
    sums, memory = Registers(pairs, lanes), scratch(pairs * lanes)
    for which in range(pairs):
        sums[which] = splat(0.0, lanes)
    with I.serial(size // lanes) as i:
        for which in range(pairs):
            a, b = load_pair(which, i * lanes, lanes)
            sums[which] = sums[which] + a * b
    for which in range(pairs):
        store(memory, which * lanes, sums[which], lanes)
    return [value(total(memory, which * lanes, lanes)) for which in range(pairs)]


def lengths(of: Inputs, row: Expr, head: Expr) -> tuple[Expr, Expr, Expr]:
    """What makes q and k as long as they should be, and their product then."""
    q, k = value(of.q(head)), value(of.k(head))

    def pair(which: int, at: Expr, lanes: int) -> tuple[Expr, Expr]:
        a, b = ((q, q), (k, k), (q, k))[which]
        return load(of.qkv, (row, a + at), lanes), load(of.qkv, (row, b + at), lanes)

    qq, kk, qk = _dot(of.shape.key_dim, 3, pair)
    q_scale = value(I.float32(of.q_scale) / I.sqrt(qq + I.float32(EPS)))
    k_scale = value(I.float32(1) / I.sqrt(kk + I.float32(EPS)))
    return q_scale, k_scale, value(qk * q_scale * k_scale)


def store_decays(of: Inputs, row: Expr, head: Expr, to: Buffer, at: Expr) -> None:
    """exp(g) of a row in each channel of a head, to to[at] and what follows."""
    shape = of.shape
    lanes, first = lanes_of_size(shape.key_dim), value(of.a(head))
    with I.serial(shape.key_dim // lanes) as i:
        own = value(first + i * lanes)
        x = load(of.ba, (row, shape.value_heads + own), lanes) + load(of.dt_bias, own, lanes)
        log_decay = of.log_decay_of(x, head, lambda number: splat(number, lanes))
        store(to, at + i * lanes, I.exp(log_decay), lanes)
