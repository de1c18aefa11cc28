"""The gated delta rule for CPUs; see `delta_shape.py`.

A step takes some columns of a head's state, which stay in the first cache while they are read, corrected and written.
A prompt takes chunks of rows (Yang et al. 2024, DeltaNet): with c the sums of g in a chunk and D_ij = exp(c_i - c_j),
V' solves (I + strictly lower part of (beta K K^T D)) V' = beta (V - exp(c) K S); then y = exp(c) Q S + (Q K^T D) V' and
S = exp(c_n) S + (exp(c_n - c) K)^T V'.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.vectors import Registers, lanes_of, load, prefetch, read, scratch, splat, store, total, value
from tir_schedules.delta_shape import EPS, DeltaShape, Inputs
from tir_schedules.step import Step

CHUNK = 16  # rows of a chunk, which begins at a multiple of it, as pages do: a prefix that was kept changes no bit
_TILE = 4  # rows of a register tile


def gated_delta(shape: DeltaShape) -> tirx.PrimFunc:
    """The kernel that `DeltaShape` describes."""

    def body(of: Inputs, y: Buffer, m: Expr) -> None:
        parts = 1 if shape.many else shape.value_dim // shape.columns
        tasks = shape.value_heads * parts
        with I.parallel(I.cast(of.step.sequences, "int64") * tasks) as task:
            s, head = value(task // tasks), value(task % tasks // parts)
            if shape.many:
                _Chunks(of, y, s, head).run()
            else:
                _step(of, y, s, head, value(task % parts))

    return shape.function(body)


def _lanes(size: int) -> int:
    return next(n for n in (16, 8, 4, 2, 1) if size % n == 0)


def _dot(size: int, pairs: int, load_pair: Callable[[int, Expr, int], tuple[Expr, Expr]]) -> list[Expr]:
    """Some dot products of `size` numbers: load_pair(which, first, lanes) has a vector of both."""
    lanes = _lanes(size)
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


def _lengths(of: Inputs, row: Expr, head: Expr) -> tuple[Expr, Expr, Expr]:
    """What makes q and k as long as they should be, and their product then."""
    q, k = value(of.q(head)), value(of.k(head))

    def pair(which: int, at: Expr, lanes: int) -> tuple[Expr, Expr]:
        a, b = ((q, q), (k, k), (q, k))[which]
        return load(of.qkv, (row, a + at), lanes), load(of.qkv, (row, b + at), lanes)

    qq, kk, qk = _dot(of.shape.key_dim, 3, pair)
    q_scale = value(I.float32(of.q_scale) / I.sqrt(qq + I.float32(EPS)))
    k_scale = value(I.float32(1) / I.sqrt(kk + I.float32(EPS)))
    return q_scale, k_scale, value(qk * q_scale * k_scale)


def _step(of: Inputs, y: Buffer, s: Expr, head: Expr, block: Expr) -> None:
    """All rows of a sequence in some columns of a head, one after the other."""
    shape, step = of.shape, of.step
    size, lanes = shape.key_dim * shape.columns, _lanes(shape.columns)
    slot, target = value(step.slot_read(s)), value(step.slot_write(s))
    begin, end = value(step.row_begin(s)), value(step.row_begin(s + 1))
    first = value(head * shape.state_size + block * size)

    def stored(i: Expr) -> Expr:
        return I.if_then_else(slot >= 0, load(of.state, (slot, first + i), lanes), splat(0.0, lanes))

    def write(i: Expr, number: Expr) -> None:
        with I.If(target >= 0), I.Then():
            store(of.state, (target, first + i), number, lanes)
        prefetch(of.state, (I.max(slot, 0), first + size + i))  # what the next task reads

    column = value(block * shape.columns)
    with I.If(end - begin == 1):
        with I.Then():
            _advance(of, y, begin, head, column, stored, write)
        with I.Else():
            kept = scratch(size)
            with I.serial(size // lanes) as i:
                store(kept, i * lanes, stored(i * lanes), lanes)
            with I.serial(begin, end) as row:
                _advance(
                    of, y, row, head, column, lambda i: read(kept, i, lanes), lambda i, x: store(kept, i, x, lanes)
                )
                to = value(I.if_then_else(row + 1 == end, target, _slot_of_row(step, row)))
                with I.If(to >= 0), I.Then(), I.serial(size // lanes) as i:
                    store(of.state, (to, first + i * lanes), read(kept, i * lanes, lanes), lanes)


def _slot_of_row(step: Step, row: Expr) -> Expr:
    return I.if_then_else(step.has_slots_of_rows, step.slot_of_row(row), -1)


def _advance(
    of: Inputs, y: Buffer, row: Expr, head: Expr, column: Expr, load_state: Callable[[Expr], Expr],
    store_state: Callable[[Expr, Expr], None],
) -> None:  # fmt: skip
    """One row in the columns of a block: y = exp(g) q S + (q k) d, S = exp(g) S + k^T d, d = beta (v - exp(g) k S)."""
    shape, columns = of.shape, of.shape.columns
    lanes = _lanes(columns)
    count = columns // lanes
    q_scale, k_scale, qk = _lengths(of, row, head)
    decay, beta = value(I.exp(of.log_decay(row, head))), value(of.beta(row, head))
    q, k, v_at = value(of.q(head)), value(of.k(head)), value(of.v(head) + column)
    sums = Registers(2 * count, lanes)
    for v in range(2 * count):
        sums[v] = splat(0.0, lanes)
    with I.serial(shape.key_dim) as i:
        q_i, k_i = (splat(value(load(of.qkv, (row, at + i), 1)), lanes) for at in (q, k))
        for v in range(count):
            number = value(load_state(i * columns + v * lanes))
            sums[v] = sums[v] + q_i * number
            sums[count + v] = sums[count + v] + k_i * number
    for v in range(count):
        seen = sums[count + v] * splat(value(decay * k_scale), lanes)
        sums[count + v] = (load(of.qkv, (row, v_at + v * lanes), lanes) - seen) * splat(beta, lanes)
        found = sums[v] * splat(value(decay * q_scale), lanes) + sums[count + v] * splat(qk, lanes)
        at = head * shape.value_dim + column + v * lanes
        store(y, (row, at), I.cast(found, lanes_of(shape.dtype, lanes)), lanes)
    with I.serial(shape.key_dim) as i:
        k_i = splat(value(load(of.qkv, (row, k + i), 1) * k_scale), lanes)
        for v in range(count):
            at = i * columns + v * lanes
            store_state(at, load_state(at) * splat(decay, lanes) + k_i * sums[count + v])


class _Chunks:
    """The rows of a sequence in a head, a chunk at a time.

    Buffers, all float32: S [key_dim, value_dim]; of a chunk's rows q and k [CHUNK, key_dim], k transposed, V' and y
    [CHUNK, value_dim], K K^T and Q K^T [CHUNK, CHUNK], c, exp(c) and beta.
    """

    def __init__(self, of: Inputs, y: Buffer, s: Expr, head: Expr) -> None:
        shape = of.shape
        self.of, self.y, self.s, self.head, self.shape = of, y, s, head, shape
        self.lanes, self.key_lanes = _lanes(shape.value_dim), _lanes(shape.key_dim)
        self.state = scratch(shape.state_size)
        self.q, self.k, self.turned = (scratch(CHUNK * shape.key_dim) for _ in range(3))
        self.v, self.out = (scratch(CHUNK * shape.value_dim) for _ in range(2))
        self.kk, self.qk = (scratch(CHUNK * CHUNK) for _ in range(2))
        self.c, self.grown, self.beta = (scratch(CHUNK) for _ in range(3))

    def run(self) -> None:
        of, step = self.of, self.of.step
        slot, target = value(step.slot_read(self.s)), value(step.slot_write(self.s))
        begin, end = value(step.row_begin(self.s)), value(step.row_begin(self.s + 1))

        def load_state(at: Expr, own: Expr, lanes: int) -> None:
            number = I.if_then_else(slot >= 0, load(of.state, (slot, at), lanes), splat(0.0, lanes))
            store(self.state, own, number, lanes)

        self._each_vector(load_state)
        border = value(begin - step.position(begin) % CHUNK)
        with I.serial((end - border + CHUNK - 1) // CHUNK) as chunk:
            row = value(I.max(begin, border + chunk * CHUNK))
            self._chunk(row, value(I.min(end, border + chunk * CHUNK + CHUNK) - row))
        with I.If(target >= 0), I.Then():
            self._each_vector(lambda at, own, lanes: store(of.state, (target, at), read(self.state, own, lanes), lanes))

    def _each_vector(self, emit: Callable[[Expr, Expr, int], None]) -> None:
        """emit(its index in a slot, its index in `state`, lanes) for each vector of the state."""
        shape, lanes = self.shape, _lanes(self.shape.columns)
        first, columns = value(self.head * shape.state_size), shape.columns
        with I.serial(shape.value_dim // columns) as block, I.serial(shape.key_dim) as i:
            for v in range(0, columns, lanes):
                at = first + (block * shape.key_dim + i) * columns + v
                emit(at, i * shape.value_dim + block * columns + v, lanes)

    def _chunk(self, row: Expr, n: Expr) -> None:
        tiles = value((n + _TILE - 1) // _TILE)
        self._load(row, n, tiles)
        self._products(tiles)
        self._read_state(row, n, tiles)
        self._solve(n)
        self._finish(row, n, tiles)
        self._write_state(n)

    def _load(self, row: Expr, n: Expr, tiles: Expr) -> None:
        """q, k, c and beta of the rows; those that fill the last tile are 0."""
        of, shape, lanes = self.of, self.shape, self.key_lanes
        dim, c = shape.key_dim, scratch(1)
        q, k = value(of.q(self.head)), value(of.k(self.head))
        put(c, 0, I.float32(0))
        with I.serial(n) as i:
            q_scale, k_scale, _ = _lengths(of, row + i, self.head)
            with I.serial(dim // lanes) as d:
                for at, factor, to in ((q, q_scale, self.q), (k, k_scale, self.k)):
                    number = load(of.qkv, (row + i, at + d * lanes), lanes) * splat(factor, lanes)
                    store(to, i * dim + d * lanes, number, lanes)
            put(c, 0, c[0] + of.log_decay(row + i, self.head))
            put(self.c, i, c[0])
            put(self.grown, i, I.exp(c[0]))
            put(self.beta, i, of.beta(row + i, self.head))
        with I.serial(tiles * _TILE - n) as rest:
            for buffer in (self.q, self.k):
                with I.serial(dim) as d:
                    put(buffer, (n + rest) * dim + d, I.float32(0))
            put(self.c, n + rest, c[0])
            put(self.grown, n + rest, I.float32(0))
            put(self.beta, n + rest, I.float32(0))
        with I.serial(dim) as d, I.serial(CHUNK) as i:
            put(self.turned, d * CHUNK + i, I.if_then_else(i < n, self.k[i * dim + d], I.float32(0)))

    def _products(self, tiles: Expr) -> None:
        """beta K K^T D below the diagonal and Q K^T D up to it, else 0; of columns up to those of the tile's rows."""
        dim, lanes = self.shape.key_dim, 16
        with I.serial(tiles) as tile, I.serial(tile * _TILE // lanes + 1) as column:
            sums, at = Registers(2 * _TILE, lanes), value(column * lanes)
            for r in range(2 * _TILE):
                sums[r] = splat(0.0, lanes)
            with I.serial(dim) as d:
                keys = value(read(self.turned, d * CHUNK + at, lanes))
                for r in range(_TILE):
                    i = (tile * _TILE + r) * dim + d
                    sums[r] = sums[r] + splat(self.k[i], lanes) * keys
                    sums[_TILE + r] = sums[_TILE + r] + splat(self.q[i], lanes) * keys
            columns = I.cast(I.ramp(I.cast(at, "int32"), 1, lanes), f"int32x{lanes}")
            for r in range(_TILE):
                i = value(tile * _TILE + r)
                own = splat(I.cast(i, "int32"), lanes)
                difference = splat(self.c[i], lanes) - self._c(at, lanes)
                decay = value(I.exp(I.min(difference, splat(0.0, lanes))))
                below = sums[r] * decay * splat(self.beta[i], lanes)
                zero = splat(0.0, lanes)
                store(self.kk, i * CHUNK + at, I.Select(columns < own, below, zero), lanes)
                store(self.qk, i * CHUNK + at, I.Select(columns <= own, sums[_TILE + r] * decay, zero), lanes)

    def _c(self, at: Expr, lanes: int) -> Expr:
        return read(self.c, at, lanes)

    def _read_state(self, row: Expr, n: Expr, tiles: Expr) -> None:
        """V' = beta (V - exp(c) K S), which is yet to be solved, and y = exp(c) Q S."""
        of, shape, lanes = self.of, self.shape, self.lanes
        dim, width, v_at = shape.key_dim, shape.value_dim, value(of.v(self.head))
        with I.serial(width // lanes) as vector, I.serial(tiles) as tile:
            sums = Registers(2 * _TILE, lanes)
            for r in range(2 * _TILE):
                sums[r] = splat(0.0, lanes)
            with I.serial(dim) as d:
                number = value(read(self.state, d * width + vector * lanes, lanes))
                for r in range(_TILE):
                    i = (tile * _TILE + r) * dim + d
                    sums[r] = sums[r] + splat(self.k[i], lanes) * number
                    sums[_TILE + r] = sums[_TILE + r] + splat(self.q[i], lanes) * number
            for r in range(_TILE):
                i = value(tile * _TILE + r)
                grown, at = splat(self.grown[i], lanes), i * width + vector * lanes
                v = load(of.qkv, (I.min(row + i, row + n - 1), v_at + vector * lanes), lanes)
                store(self.v, at, (v - grown * sums[r]) * splat(self.beta[i], lanes), lanes)
                store(self.out, at, grown * sums[_TILE + r], lanes)

    def _solve(self, n: Expr) -> None:
        """V', by forward substitution."""
        width, lanes = self.shape.value_dim, self.lanes
        count = next(c for c in (4, 3, 2, 1) if width % (c * lanes) == 0)
        with I.serial(width // (count * lanes)) as part, I.serial(1, n) as i:
            sums, first = Registers(count, lanes), value(part * (count * lanes))
            for v in range(count):
                sums[v] = read(self.v, i * width + first + v * lanes, lanes)
            with I.serial(i) as j:
                factor = splat(value(self.kk[i * CHUNK + j]), lanes)
                for v in range(count):
                    sums[v] = sums[v] - factor * read(self.v, j * width + first + v * lanes, lanes)
            for v in range(count):
                store(self.v, i * width + first + v * lanes, sums[v], lanes)

    def _finish(self, row: Expr, n: Expr, tiles: Expr) -> None:
        """y += (Q K^T D) V', to the rows of the output."""
        width, lanes = self.shape.value_dim, self.lanes
        with I.serial(width // lanes) as vector, I.serial(tiles) as tile:
            sums, first = Registers(_TILE, lanes), value(tile * _TILE)
            for r in range(_TILE):
                sums[r] = read(self.out, (first + r) * width + vector * lanes, lanes)
            with I.serial(first + _TILE) as j:
                v = value(read(self.v, j * width + vector * lanes, lanes))
                for r in range(_TILE):
                    sums[r] = sums[r] + splat(self.qk[(first + r) * CHUNK + j], lanes) * v
            for r in range(_TILE):
                with I.If(first + r < n), I.Then():
                    found = I.cast(sums[r], lanes_of(self.shape.dtype, lanes))
                    store(self.y, (row + first + r, self.head * width + vector * lanes), found, lanes)

    def _write_state(self, n: Expr) -> None:
        """S = exp(c_n) S + (exp(c_n - c) K)^T V'."""
        width, lanes, dim = self.shape.value_dim, self.lanes, self.shape.key_dim
        last, factors = value(self.c[n - 1]), scratch(CHUNK)
        with I.serial(n) as j:
            put(factors, j, I.exp(last - self.c[j]))
        with I.serial(dim) as d, I.serial(n) as j:
            put(self.turned, d * CHUNK + j, self.turned[d * CHUNK + j] * factors[j])
        tile = next(count for count in (8, 4, 2, 1) if dim % count == 0)
        with I.serial(dim // tile) as part, I.serial(width // lanes) as vector:
            sums, decay = Registers(tile, lanes), splat(value(self.grown[n - 1]), lanes)
            for r in range(tile):
                sums[r] = read(self.state, (part * tile + r) * width + vector * lanes, lanes) * decay
            with I.serial(n) as j:
                v = value(read(self.v, j * width + vector * lanes, lanes))
                for r in range(tile):
                    sums[r] = sums[r] + splat(self.turned[(part * tile + r) * CHUNK + j], lanes) * v
            for r in range(tile):
                store(self.state, (part * tile + r) * width + vector * lanes, sums[r], lanes)
