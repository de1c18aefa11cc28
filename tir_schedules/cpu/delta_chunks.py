"""Prompts of gated delta nets on CPUs, in chunks of rows (Yang et al. 2024, DeltaNet); see `delta_shape.py`.

With c the sums of g in a chunk and D_ij = exp(c_i - c_j), V' solves (I + strictly lower part of (beta K K^T D)) V' =
beta (V - exp(c) K S); then y = exp(c) Q S + (Q K^T D) V' and S = exp(c_n) S + (exp(c_n - c) K)^T V'.

Where each channel decays, D is inside the products: sum_d k_id k_jd exp(c_id - c_jd). The keys of a chunk decay from
row to row while they are multiplied: all factors are at most 1, and nothing overflows as exp(-c) would.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.delta_rows import lanes_of_size, lengths, store_decays
from tir_schedules.cpu.vectors import Registers, lanes_of, load, read, scratch, splat, store, value
from tir_schedules.delta_shape import Inputs

CHUNK = 16  # rows of a chunk, which begins at a multiple of it, as pages do: a prefix that was kept changes no bit
_TILE = 4  # rows of a register tile


class Chunks:
    """The rows of a sequence in a head, a chunk at a time.

    Buffers, all float32: S [key_dim, value_dim]; of a chunk's rows q and k [CHUNK, key_dim], k transposed, V' and y
    [CHUNK, value_dim], K K^T and Q K^T [CHUNK, CHUNK], c, exp(c) and beta.
    """

    def __init__(self, of: Inputs, y: Buffer, s: Expr, head: Expr) -> None:
        shape = of.shape
        self.of, self.y, self.s, self.head, self.shape = of, y, s, head, shape
        self.lanes, self.key_lanes = lanes_of_size(shape.value_dim), lanes_of_size(shape.key_dim)
        self.state = scratch(shape.state_size)
        self.q, self.k, self.turned = (scratch(CHUNK * shape.key_dim) for _ in range(3))
        self.v, self.out = (scratch(CHUNK * shape.value_dim) for _ in range(2))
        self.kk, self.qk = (scratch(CHUNK * CHUNK) for _ in range(2))
        self.beta = scratch(CHUNK)
        self._allocate_gates()

    def _allocate_gates(self) -> None:
        self.c, self.grown = scratch(CHUNK), scratch(CHUNK)

    def run(self) -> None:
        """All rows."""
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
        shape, lanes = self.shape, lanes_of_size(self.shape.columns)
        first, columns = value(self.head * shape.state_size), shape.columns
        with I.serial(shape.value_dim // columns) as block, I.serial(shape.key_dim) as i:
            for v in range(0, columns, lanes):
                at = first + (block * shape.key_dim + i) * columns + v
                emit(at, i * shape.value_dim + block * columns + v, lanes)

    def _chunk(self, row: Expr, n: Expr) -> None:
        tiles = value((n + _TILE - 1) // _TILE)
        self._load(row, n, tiles)
        self._load_gates(row, n, tiles)
        self._products(n, tiles)
        self._read_state(row, n, tiles)
        self._solve(n)
        self._finish(row, n, tiles)
        self._write_state(n)

    def _load(self, row: Expr, n: Expr, tiles: Expr) -> None:
        """q, k and beta of the rows; those that fill the last tile are 0."""
        of, shape, lanes = self.of, self.shape, self.key_lanes
        dim = shape.key_dim
        q, k = value(of.q(self.head)), value(of.k(self.head))
        with I.serial(n) as i:
            q_scale, k_scale, _ = lengths(of, row + i, self.head)
            with I.serial(dim // lanes) as d:
                for at, factor, to in ((q, q_scale, self.q), (k, k_scale, self.k)):
                    number = load(of.qkv, (row + i, at + d * lanes), lanes) * splat(factor, lanes)
                    store(to, i * dim + d * lanes, number, lanes)
            put(self.beta, i, of.beta(row + i, self.head))
        with I.serial(tiles * _TILE - n) as rest:
            for buffer in (self.q, self.k):
                with I.serial(dim) as d:
                    put(buffer, (n + rest) * dim + d, I.float32(0))
            put(self.beta, n + rest, I.float32(0))
        with I.serial(dim) as d, I.serial(CHUNK) as i:
            put(self.turned, d * CHUNK + i, I.if_then_else(i < n, self.k[i * dim + d], I.float32(0)))

    def _load_gates(self, row: Expr, n: Expr, tiles: Expr) -> None:
        """c and exp(c); in rows that fill the last tile the last c and 0."""
        c = scratch(1)
        put(c, 0, I.float32(0))
        with I.serial(n) as i:
            put(c, 0, c[0] + self.of.log_decay(row + i, self.head))
            put(self.c, i, c[0])
            put(self.grown, i, I.exp(c[0]))
        with I.serial(n, tiles * _TILE) as i:
            put(self.c, i, c[0])
            put(self.grown, i, I.float32(0))

    def _products(self, n: Expr, tiles: Expr) -> None:
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
                difference = splat(self.c[i], lanes) - read(self.c, at, lanes)
                decay = value(I.exp(I.min(difference, splat(0.0, lanes))))
                below = sums[r] * decay * splat(self.beta[i], lanes)
                zero = splat(0.0, lanes)
                store(self.kk, i * CHUNK + at, I.Select(columns < own, below, zero), lanes)
                store(self.qk, i * CHUNK + at, I.Select(columns <= own, sums[_TILE + r] * decay, zero), lanes)

    def _grown(self, i: Expr, products: Expr) -> Expr:
        """A row's products with the state before the chunk, as it has decayed until then."""
        return splat(self.grown[i], self.lanes) * products

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
                at = i * width + vector * lanes
                v = load(of.qkv, (I.min(row + i, row + n - 1), v_at + vector * lanes), lanes)
                store(self.v, at, (v - self._grown(i, sums[r])) * splat(self.beta[i], lanes), lanes)
                store(self.out, at, self._grown(i, sums[_TILE + r]), lanes)

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
        self._decay_keys(n)
        tile = next(count for count in (8, 4, 2, 1) if dim % count == 0)
        with I.serial(dim // tile) as part, I.serial(width // lanes) as vector:
            sums = Registers(tile, lanes)
            for r in range(tile):
                before = read(self.state, (part * tile + r) * width + vector * lanes, lanes)
                sums[r] = before * splat(value(self._last_decay(n, part * tile + r)), lanes)
            with I.serial(n) as j:
                v = value(read(self.v, j * width + vector * lanes, lanes))
                for r in range(tile):
                    sums[r] = sums[r] + splat(self.turned[(part * tile + r) * CHUNK + j], lanes) * v
            for r in range(tile):
                store(self.state, (part * tile + r) * width + vector * lanes, sums[r], lanes)

    def _decay_keys(self, n: Expr) -> None:
        """exp(c_n - c) K."""
        last, factors = value(self.c[n - 1]), scratch(CHUNK)
        with I.serial(n) as j:
            put(factors, j, I.exp(last - self.c[j]))
        with I.serial(self.shape.key_dim) as d, I.serial(n) as j:
            put(self.turned, d * CHUNK + j, self.turned[d * CHUNK + j] * factors[j])

    def _last_decay(self, n: Expr, channel: Expr) -> Expr:
        """exp(c_n) of a row of the state."""
        return self.grown[n - 1]


class ChannelChunks(Chunks):
    """Where each channel decays by its own gate. exp(c) is [CHUNK, key_dim], and so is exp(g), in place of c."""

    def _allocate_gates(self) -> None:
        self.decays, self.grown = (scratch(CHUNK * self.shape.key_dim) for _ in range(2))

    def _load_gates(self, row: Expr, n: Expr, tiles: Expr) -> None:
        """exp(g) and exp(c); in rows that fill the last tile 1, and nothing."""
        dim, lanes = self.shape.key_dim, self.key_lanes
        with I.serial(n) as i:
            store_decays(self.of, row + i, self.head, self.decays, i * dim)
            with I.serial(dim // lanes) as d:
                at = value(i * dim + d * lanes)
                before = I.if_then_else(i > 0, read(self.grown, I.max(at - dim, 0), lanes), splat(1.0, lanes))
                store(self.grown, at, before * read(self.decays, at, lanes), lanes)
        with I.serial((tiles * _TILE - n) * dim) as rest:
            put(self.decays, n * dim + rest, I.float32(1))

    def _products(self, n: Expr, tiles: Expr) -> None:
        """As `Chunks._products`; then `turned` is exp(c_n - c) K, and q and k are exp(c) Q and exp(c) K."""
        dim, lanes = self.shape.key_dim, CHUNK
        columns = I.bind(I.ramp(0, 1, lanes))
        with I.serial(tiles) as tile:
            sums, keys = Registers(2 * _TILE, lanes), Registers(1, lanes)
            rows = [value(I.cast(tile * _TILE + r, "int32")) for r in range(_TILE)]
            for r in range(2 * _TILE):
                sums[r] = splat(0.0, lanes)
            with I.serial(dim) as d:
                keys[0] = read(self.turned, d * CHUNK, lanes)
                for r in range(_TILE):
                    i = (tile * _TILE + r) * dim + d
                    decay = I.Select(columns < splat(rows[r], lanes), splat(self.decays[i], lanes), splat(1.0, lanes))
                    keys[0] = keys[0] * decay
                    sums[r] = sums[r] + splat(self.k[i], lanes) * keys[0]
                    sums[_TILE + r] = sums[_TILE + r] + splat(self.q[i], lanes) * keys[0]
                store(self.turned, d * CHUNK, keys[0], lanes)
            for r in range(_TILE):
                i, own, zero = tile * _TILE + r, splat(rows[r], lanes), splat(0.0, lanes)
                below = sums[r] * splat(self.beta[i], lanes)
                store(self.kk, i * CHUNK, I.Select(columns < own, below, zero), lanes)
                store(self.qk, i * CHUNK, I.Select(columns <= own, sums[_TILE + r], zero), lanes)
        lanes = self.key_lanes
        with I.serial(n * (dim // lanes)) as i:
            for buffer in (self.q, self.k):
                grown = read(buffer, i * lanes, lanes) * read(self.grown, i * lanes, lanes)
                store(buffer, i * lanes, grown, lanes)

    def _grown(self, i: Expr, products: Expr) -> Expr:
        return products

    def _decay_keys(self, n: Expr) -> None:
        pass

    def _last_decay(self, n: Expr, channel: Expr) -> Expr:
        return self.grown[(n - 1) * self.shape.key_dim + channel]
