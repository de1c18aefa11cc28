"""The gated delta rule of prompts on GPUs, by chunks of rows (Yang et al. 2024, DeltaNet); see `delta_shape.py`.

With c the sums of g in a chunk and D_ij = exp(c_i - c_j), L the part of beta K K^T D below the diagonal:
W = (I + L)^-1 beta exp(c) K and U = (I + L)^-1 beta V, which one kernel computes for all chunks side by side. Another
takes them in turn, for 32 columns of a head's state in each workgroup: V' = U - W S, y = exp(c) Q S + (Q K^T D) V',
S = exp(c_n) S + (exp(c_n - c) K)^T V'. A chunk ends at a multiple of `CHUNK`, as pages do, so that a prompt that is cut
there, or continues a prefix, has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, put
from tir_schedules.delta_shape import EPS, DeltaShape, Inputs
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, launch, local, pin, shared, workspace

CHUNK = 16
_THREADS = 128
_TILE = 4  # rows that are solved together
_SEQUENCES = 64  # that have workgroups of their own
_SHARED_BYTES = 32768


def fits(shape: DeltaShape) -> bool:
    """Whether these kernels take a shape: workgroups of both have room, and a head has one decay."""
    prepared = _stride(shape) * 2 * CHUNK + CHUNK * CHUNK + _THREADS + 5 * CHUNK
    columns = (shape.key_dim + CHUNK) * shape.columns
    return shape.many and not shape.channelwise and 4 * max(prepared, columns) <= _SHARED_BYTES


def gated_delta_chunks(shape: DeltaShape) -> tirx.PrimFunc:
    """The kernel that `DeltaShape` describes, for prompts."""

    def body(of: Inputs, y: Buffer, m: Expr) -> None:
        work = _Work(shape, workspace((m, shape.value_heads * work_size(shape.key_dim, shape.value_dim)), "float32"))
        with launch(_THREADS, shape.value_heads, ceildiv(m, CHUNK)) as (head, part, tx):
            prepared, count = _Prepared(of, work, head, tx), I.cast(m, "int32")
            with I.serial(part * CHUNK, I.min(part * CHUNK + CHUNK, count)) as row:
                prepared.run_if_first(row)
        columns, blocks = shape.columns, shape.value_dim // shape.columns
        each = 2 if columns % 2 == 0 else 1
        groups = I.min(m, _SEQUENCES)
        with launch(columns // each * (CHUNK // 2), shape.value_heads * blocks, groups) as (bx, by, tx):
            columns_of = _Columns(of, work, y, each, keep(bx // blocks), keep(bx % blocks), tx)
            step = I.cast(groups, "int32")
            with I.serial(0, I.truncdiv(of.step.sequences - by + step - 1, step)) as i:
                columns_of.run(by + i * step)

    return shape.function(body)


def work_size(key_dim: int, value_dim: int) -> int:
    """Numbers in float32 that the first kernel leaves of a row and head."""
    return 3 * key_dim + value_dim + CHUNK + 1


def _stride(shape: DeltaShape) -> int:
    """Numbers between rows of q and k in shared memory, an odd number of banks apart; solutions take the place of q."""
    return max(shape.key_dim, _THREADS) + 1


def _each(size: int, threads: int, tx: Expr, emit: Callable[[Expr], None]) -> None:
    """emit(i) for each i below `size`, by invocations in turn."""
    with I.serial(0, -(-size // threads)) as turn:
        i = keep(turn * threads + tx)
        if size % threads == 0:
            emit(i)
            return
        with I.If(i < size), I.Then():
            emit(i)


class _Work:
    """What the first kernel leaves for the second one, of a row and head: W, exp(c) Q, exp(c_n - c) K, U, Q K^T D; and
    in a chunk's first row exp(c_n)."""

    def __init__(self, shape: DeltaShape, data: Buffer) -> None:
        dim = shape.key_dim
        self.data, self.size = data, work_size(dim, shape.value_dim)
        self.w, self.q, self.k, self.u = 0, dim, 2 * dim, 3 * dim
        self.qk = self.u + shape.value_dim
        self.decay = self.qk + CHUNK

    def at(self, row: Expr, head: Expr, number: Expr) -> tuple[Expr, Expr]:
        """The index of a number of a row and head."""
        return row, head * self.size + number


class _Prepared:
    """A workgroup of the first kernel, for the chunks of a head that begin in some rows: one of n rows from `row` on.

    In shared memory: q and k of its rows, whose length becomes 1; L; g, c and beta of its rows. Rows from n on are 0.
    """

    def __init__(self, of: Inputs, work: _Work, head: Expr, tx: Expr) -> None:
        self.of, self.work, self.head, self.tx = of, work, head, tx
        self.dim, self.stride = of.shape.key_dim, _stride(of.shape)
        self.qk, self.below = shared(2 * CHUNK * self.stride), shared(CHUNK * CHUNK)
        self.parts, self.scale = shared(_THREADS), shared(2 * CHUNK)
        self.g, self.c, self.beta = (shared(CHUNK) for _ in range(3))

    def run_if_first(self, row: Expr) -> None:
        """The chunk that begins in a row, if there is one."""
        step = self.of.step
        s, place = pin(step.sequence(row)), pin(step.position(row) % CHUNK)
        with I.If(I.Or(place == 0, row == step.row_begin(s))), I.Then():
            self.row, self.n = row, pin(I.min(CHUNK - place, step.row_begin(s + 1) - row))
            self._run()

    def _run(self) -> None:
        barrier()  # the last chunk is solved
        self._load()
        barrier()
        self._square()
        barrier()
        with I.If(self.tx < 2 * CHUNK), I.Then():
            squares = self.parts[self.tx]
            for part in range(1, _THREADS // (2 * CHUNK)):
                squares = squares + self.parts[part * 2 * CHUNK + self.tx]
            length = I.if_then_else(self.tx < CHUNK, I.float32(self.of.q_scale), I.float32(1))
            put(self.scale, self.tx, length / I.sqrt(squares + I.float32(EPS)))
        barrier()
        self._normalize()
        barrier()
        self._multiply()
        barrier()
        _each(self.dim + self.of.shape.value_dim, _THREADS, self.tx, self._solve)

    def _load(self) -> None:
        """q, k, g and beta."""
        of, n = self.of, self.n
        q, k = pin(of.q(self.head)), pin(of.k(self.head))

        def emit(i: Expr) -> None:
            line, d = keep(i // self.dim), keep(i % self.dim)
            at = keep(line % CHUNK)
            number = f32(of.qkv[self.row + I.min(at, n - 1), I.if_then_else(line < CHUNK, q, k) + d])
            put(self.qk, line * self.stride + d, I.if_then_else(at < n, number, I.float32(0)))

        _each(2 * CHUNK * self.dim, _THREADS, self.tx, emit)
        with I.If(self.tx < CHUNK), I.Then():
            at = keep(self.row + I.min(self.tx, n - 1))
            for gate, to in ((of.log_decay(at, self.head), self.g), (of.beta(at, self.head), self.beta)):
                put(to, self.tx, I.if_then_else(self.tx < n, gate, I.float32(0)))

    def _square(self) -> None:
        """Parts of q q and k k; c."""
        count = _THREADS // (2 * CHUNK)
        size, line, part = -(-self.dim // count), keep(self.tx % (2 * CHUNK)), keep(self.tx // (2 * CHUNK))
        total = local(1)
        put(total, 0, I.float32(0))
        with I.serial(0, size) as i, I.If(part * size + i < self.dim), I.Then():
            number = keep(self.qk[line * self.stride + part * size + i])
            add(total, 0, number * number)
        put(self.parts, self.tx, total[0])
        with I.If(self.tx < CHUNK), I.Then():
            put(total, 0, I.float32(0))
            with I.serial(0, CHUNK) as i:
                add(total, 0, I.if_then_else(i <= self.tx, self.g[i], I.float32(0)))
            put(self.c, self.tx, total[0])

    def _normalize(self) -> None:
        """q and k, and what the second kernel multiplies by them."""

        def emit(i: Expr) -> None:
            line, d = keep(i // self.dim), keep(i % self.dim)
            at, is_q = keep(line % CHUNK), line < CHUNK
            number = pin(self.qk[line * self.stride + d] * self.scale[line])
            put(self.qk, line * self.stride + d, number)
            with I.If(at < self.n), I.Then():
                power = I.if_then_else(is_q, self.c[at], self.c[CHUNK - 1] - self.c[at])
                to = I.if_then_else(is_q, self.work.q, self.work.k) + d
                put(self.work.data, self.work.at(self.row + at, self.head, to), number * I.exp(power))

        _each(2 * CHUNK * self.dim, _THREADS, self.tx, emit)
        with I.If(self.tx == 0), I.Then():
            put(self.work.data, self.work.at(self.row, self.head, self.work.decay), I.exp(self.c[CHUNK - 1]))

    def _multiply(self) -> None:
        """L, and Q K^T D up to the diagonal, 0 behind it: of a column, two rows in an invocation."""
        first, j, half = keep(self.tx // CHUNK), keep(self.tx % CHUNK), _THREADS // CHUNK
        sums = local(2 * CHUNK // half)
        rows = [first + r * half for r in range(CHUNK // half)]
        for which in range(2 * len(rows)):
            put(sums, which, I.float32(0))
        with I.serial(0, self.dim) as d:
            key = keep(self.qk[(CHUNK + j) * self.stride + d])
            for r, i in enumerate(rows):
                add(sums, 2 * r, self.qk[(CHUNK + i) * self.stride + d] * key)
                add(sums, 2 * r + 1, self.qk[i * self.stride + d] * key)
        for r, i in enumerate(rows):
            decay = pin(I.exp(I.min(self.c[i] - self.c[j], I.float32(0))))
            below = self.beta[i] * sums[2 * r] * decay
            put(self.below, i * CHUNK + j, I.if_then_else(j < i, below, I.float32(0)))
            with I.If(i < self.n), I.Then():
                seen = I.if_then_else(j <= i, sums[2 * r + 1] * decay, I.float32(0))
                put(self.work.data, self.work.at(self.row + i, self.head, self.work.qk + j), seen)

    def _solve(self, column: Expr) -> None:
        """A column of W or U, by forward substitution; solved rows take the place of q."""
        of, dim, solved, sums = self.of, self.dim, self.qk, local(_TILE)
        is_key, v = column < dim, pin(of.v(self.head) + I.max(column - dim, 0))
        to = keep(I.if_then_else(is_key, self.work.w + column, self.work.u - dim + column))
        with I.serial(0, CHUNK // _TILE) as tile:
            for r in range(_TILE):
                i = keep(tile * _TILE + r)
                key = I.exp(self.c[i]) * self.qk[(CHUNK + i) * self.stride + I.min(column, dim - 1)]
                value = f32(of.qkv[self.row + I.min(i, self.n - 1), v])
                put(sums, r, self.beta[i] * I.if_then_else(is_key, key, value))
            with I.serial(0, tile * _TILE) as j:
                known = keep(solved[j * self.stride + self.tx])
                for r in range(_TILE):
                    add(sums, r, I.float32(0) - self.below[(tile * _TILE + r) * CHUNK + j] * known)
            for r in range(_TILE):
                i = keep(tile * _TILE + r)
                for before in range(r):
                    add(sums, r, I.float32(0) - self.below[i * CHUNK + tile * _TILE + before] * sums[before])
                put(solved, i * self.stride + self.tx, sums[r])
                with I.If(i < self.n), I.Then():
                    put(self.work.data, self.work.at(self.row + i, self.head, to), sums[r])


class _Columns:
    """A workgroup of the second kernel, for some columns of a head. An invocation has `each` columns of two rows of a
    chunk, and of every eighth row of the state, which is in shared memory with V'."""

    def __init__(self, of: Inputs, work: _Work, y: Buffer, each: int, head: Expr, block: Expr, tx: Expr) -> None:
        self.of, self.work, self.y, self.shape, self.head, self.tx = of, work, y, of.shape, head, tx
        self.columns, lanes = of.shape.columns, of.shape.columns // each
        self.threads, self.groups = lanes * (CHUNK // 2), CHUNK // 2
        self.group = keep(tx // lanes)
        self.own = [keep(tx % lanes + c * lanes) for c in range(each)]
        self.first = keep(block * self.columns)
        size = of.shape.key_dim * self.columns
        self.at = keep(head * of.shape.state_size + block * size)
        self.state, self.v = shared(size), shared(CHUNK * self.columns)
        self.sums, self.known = local(4 * each), local(CHUNK * each)

    def run(self, s: Expr) -> None:
        """All rows of a sequence."""
        of, step, size = self.of, self.of.step, self.shape.key_dim * self.columns
        slot, target = pin(step.slot_read(s)), pin(step.slot_write(s))
        begin, end = pin(step.row_begin(s)), pin(step.row_begin(s + 1))

        def load(i: Expr) -> None:
            number = I.if_then_else(slot >= 0, of.state[I.max(slot, 0), self.at + i], I.float32(0))
            put(self.state, i, number)

        def store(i: Expr) -> None:
            put(of.state, (target, self.at + i), self.state[i])

        _each(size, self.threads, self.tx, load)
        barrier()
        border = pin(begin - step.position(begin) % CHUNK)
        with I.serial(0, I.truncdiv(end - border + (CHUNK - 1), CHUNK)) as chunk:
            row = pin(I.max(begin, border + chunk * CHUNK))
            self._chunk(row, pin(I.min(end, border + chunk * CHUNK + CHUNK) - row))
        with I.If(target >= 0), I.Then():
            _each(size, self.threads, self.tx, store)

    def _number(self, row: Expr, number: Expr) -> Expr:
        return self.work.data[self.work.at(row, self.head, number)]

    def _chunk(self, row: Expr, n: Expr) -> None:
        """n rows."""
        places = [keep(self.group + r * self.groups) for r in range(2)]
        rows = [keep(row + I.min(place, n - 1)) for place in places]
        self._read_state(rows)
        for r, place in enumerate(places):
            for c, own in enumerate(self.own):
                u = self._number(rows[r], self.work.u + self.first + own)
                corrected = u - self.sums[self._sum(r, 0, c)]
                put(self.v, place * self.columns + own, I.if_then_else(place < n, corrected, I.float32(0)))
        barrier()
        for c, own in enumerate(self.own):
            for j in range(CHUNK):
                put(self.known, c * CHUNK + j, self.v[j * self.columns + own])
        for r, place in enumerate(places):
            for j in range(CHUNK):
                weight = keep(self._number(rows[r], self.work.qk + j))
                for c in range(len(self.own)):
                    add(self.sums, self._sum(r, 1, c), weight * self.known[c * CHUNK + j])
            with I.If(place < n), I.Then():
                for c, own in enumerate(self.own):
                    column = self.head * self.shape.value_dim + self.first + own
                    put(self.y, (rows[r], column), self.sums[self._sum(r, 1, c)])
        self._write_state(row, n)
        barrier()

    def _sum(self, r: int, which: int, c: int) -> int:
        """Where the sum of a row, of W or Q, and a column is."""
        return (r * 2 + which) * len(self.own) + c

    def _read_state(self, rows: list[Expr]) -> None:
        """W S and exp(c) Q S."""
        for which in range(4 * len(self.own)):
            put(self.sums, which, I.float32(0))
        unrolled = next(n for n in (4, 2, 1) if self.shape.key_dim % n == 0)
        with I.serial(0, self.shape.key_dim // unrolled) as part:
            for d in (keep(part * unrolled + i) for i in range(unrolled)):
                numbers = [keep(self.state[d * self.columns + own]) for own in self.own]
                for r, row in enumerate(rows):
                    for which, of in enumerate((self.work.w, self.work.q)):
                        factor = keep(self._number(row, of + d))
                        for c, number in enumerate(numbers):
                            add(self.sums, self._sum(r, which, c), factor * number)

    def _write_state(self, row: Expr, n: Expr) -> None:
        """S = exp(c_n) S + (exp(c_n - c) K)^T V'."""
        dim, decay = self.shape.key_dim, pin(self._number(row, self.work.decay))
        with I.serial(0, ceildiv(dim, self.groups)) as turn:
            d = keep(turn * self.groups + self.group)
            with I.If(d < dim), I.Then():
                for c, own in enumerate(self.own):
                    put(self.sums, c, decay * self.state[d * self.columns + own])
                for i in range(CHUNK):
                    key = keep(self._number(row + I.min(i, n - 1), self.work.k + d))
                    for c in range(len(self.own)):
                        add(self.sums, c, key * self.known[c * CHUNK + i])
                for c, own in enumerate(self.own):
                    put(self.state, d * self.columns + own, self.sums[c])
