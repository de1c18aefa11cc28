"""From logits to the next token on CPUs, compiled into the library.

`sample`: temperature, top-k, top-p, min-p and the draw, exact and without sorting the vocabulary;
`sample_with_confidence` also says how probable the token was, `sample_with_measure` how sure the model is of a row. The
other functions change logits before.
`tir_schedules/sampling.py` defines them.
Logits and probabilities are float32, sums float64 (in float32 those over 150 000 tokens are off by 1e-4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, function_of, put
from tir_schedules.cpu.vectors import read, scratch, splat, store
from tir_schedules.op import by_hand
from tir_schedules.sampling import FORBID, SIGNATURES, dimensions

# Weights lie in (0, 1]; a bucket is their exponent and 4 bits of mantissa: the float's bits shifted by 19.
_SHIFT = 19
_BUCKETS = (0x3F800000 >> _SHIFT) + 1
_RADIX = 2048
# exp clips its argument at -87 (fast_math.py), so a weight this small stands for any smaller one, 0 included.
_CLIPPED = 2e-38
_LOWEST = -3.4e38
_INFINITY = 0x7F800000  # the bits; those of NaN, less the sign, are larger


class _Cell:
    """A number of a buffer: `cell.value` is an expression, `cell.value = x` emits a store."""

    def __init__(self, buffer: Buffer, index: int) -> None:
        self._buffer, self._index = buffer, index

    @property
    def value(self) -> Expr:
        return self._buffer[self._index]

    @value.setter
    def value(self, value: Expr) -> None:
        put(self._buffer, self._index, value)


@dataclass(frozen=True)
class _Pairs:
    """Pairs (key, id), as many again to sort into, and counts of a digit. Keys are bits of non-negative floats."""

    keys: Buffer
    ids: Buffer
    other_keys: Buffer
    other_ids: Buffer
    counts: Buffer

    def key(self, i: Expr) -> Expr:
        """The i-th key as float32."""
        return I.reinterpret("float32", self.keys[i])

    def sort_descending(self, n: Expr) -> None:
        """Emit a stable radix sort of n pairs, largest key first: three digits of 11 bits."""

        def digit_of(i: Expr) -> Expr:
            shifted = I.shift_right(self.keys[i], I.cast(digit * 11, "uint32"))
            return I.bind(I.cast(I.bitwise_and(shifted, I.uint32(_RADIX - 1)), "int32"))

        with I.serial(3) as digit:
            with I.serial(_RADIX) as i:
                put(self.counts, i, 0)
            with I.serial(n) as i:
                add(self.counts, digit_of(i), 1)
            start = _Cell(scratch(1, "int32"), 0)
            start.value = 0
            with I.serial(_RADIX) as i:
                size = I.bind(self.counts[_RADIX - 1 - i])
                put(self.counts, _RADIX - 1 - i, start.value)
                start.value = start.value + size
            with I.serial(n) as i:
                bucket = digit_of(i)
                put(self.other_keys, self.counts[bucket], self.keys[i])
                put(self.other_ids, self.counts[bucket], self.ids[i])
                add(self.counts, bucket, 1)
            with I.serial(n) as i:
                put(self.keys, i, self.other_keys[i])
                put(self.ids, i, self.other_ids[i])


class _Sample:
    """The steps of `sample` for one vocabulary. Cells are named by what they hold; several share a number in memory."""

    def __init__(self, logits: Buffer) -> None:
        vocab = int(logits.shape[2])
        self.vocab, self.logits = vocab, logits
        self.weight = scratch(vocab)  # exp of logits over temperature, 1 for the best token
        keys, ids, other_keys, other_ids = (scratch(vocab, dtype) for dtype in ("uint32", "int32") * 2)
        self.pairs = _Pairs(keys, ids, other_keys, other_ids, scratch(_RADIX, "int32"))  # candidates by their weights
        self.bucket_count, self.bucket_mass = scratch(_BUCKETS, "int32"), scratch(_BUCKETS, "float64")
        floats, masses, integers = scratch(3), scratch(5, "float64"), scratch(5, "int32")
        self.lane_max, self.lane_size = scratch(16), scratch(16, "int32")
        self.top_logit, self.inverse, self.min_weight = (_Cell(floats, i) for i in range(3))
        self.mass, self.bucket_sum, self.kept_mass, self.drawn_mass, self.running = (_Cell(masses, i) for i in range(5))
        self.limit, self.lowest_bucket, self.count, self.found, self.size = (_Cell(integers, i) for i in range(5))
        self.best, self.drawn, self.kept = self.limit, self.limit, self.found

    def find_top(self, s: Expr) -> None:
        """top_logit = the largest logit of a row; size = the largest bits without a sign, which NaN has where it is."""
        lanes, sizes, top, vocab = self.lane_max, self.lane_size, self.top_logit, self.vocab

        def size_of(logit: Expr, dtype: str, mask: Expr) -> Expr:
            return I.bitwise_and(I.reinterpret(dtype, logit), mask)

        put(lanes, I.ramp(0, 1, 16), splat(_LOWEST, 16))
        put(sizes, I.ramp(0, 1, 16), splat(I.int32(0), 16))
        with I.serial(vocab // 16) as i:
            logit = I.bind(read(self.logits, (s, 0, i * 16), 16))
            put(lanes, I.ramp(0, 1, 16), I.max(read(lanes, 0, 16), logit))
            size = size_of(logit, "int32x16", splat(I.int32(0x7FFFFFFF), 16))
            put(sizes, I.ramp(0, 1, 16), I.max(read(sizes, 0, 16), size))
        top.value, self.size.value = I.float32(_LOWEST), 0
        with I.serial(16) as i:
            top.value = I.max(top.value, lanes[i])
            self.size.value = I.max(self.size.value, sizes[i])
        with I.serial(vocab % 16) as i:
            logit = I.bind(self.logits[s, 0, vocab // 16 * 16 + i])
            top.value = I.max(top.value, logit)
            self.size.value = I.max(self.size.value, size_of(logit, "int32", I.int32(0x7FFFFFFF)))

    def overflowed(self) -> Expr:
        """Whether a logit is NaN or infinity."""
        return tirx.any(self.size.value > _INFINITY, self.top_logit.value > I.float32(-_LOWEST))

    def take_best(self, s: Expr, token: Buffer) -> None:
        """token = the lowest id of the largest logit; -1 where none is larger than minus infinity."""
        with I.serial(self.vocab) as i:
            is_top = self.logits[s, 0, i] >= self.top_logit.value
            self.best.value = I.min(self.best.value, I.if_then_else(is_top, i, self.vocab))
        put(token, s, I.if_then_else(self.best.value < self.vocab, self.best.value, -1))

    def _bucket_of(self, bits: Expr) -> Expr:
        return I.min(I.cast(I.shift_right(bits, I.uint32(_SHIFT)), "int32"), _BUCKETS - 1)

    def weigh(self, s: Expr, temperature: Expr) -> None:
        """Weights, and how many and how much of them each bucket has; mass = their sum."""
        self.inverse.value = I.float32(1) / I.max(temperature, I.float32(1e-30))  # 1 / 1e-45 is infinite

        def weigh_one(i: Expr) -> None:
            put(self.weight, i, I.exp((self.logits[s, 0, i] - self.top_logit.value) * self.inverse.value))

        with I.serial(self.vocab // 16) as i, I.vectorized(16) as lane:
            weigh_one(i * 16 + lane)
        with I.serial(self.vocab % 16) as i:
            weigh_one(self.vocab // 16 * 16 + i)
        with I.serial(_BUCKETS) as i:
            put(self.bucket_count, i, 0)
            put(self.bucket_mass, i, I.float64(0))
        with I.serial(self.vocab) as i:
            bucket = I.bind(self._bucket_of(I.reinterpret("uint32", self.weight[i])))
            add(self.bucket_count, bucket, 1)
            add(self.bucket_mass, bucket, I.cast(self.weight[i], "float64"))
        self.mass.value = I.float64(0)
        with I.serial(_BUCKETS) as i:
            self.mass.value = self.mass.value + self.bucket_mass[i]

    def find_bucket(self, top_k: Expr, top_p: Expr) -> None:
        """lowest_bucket = the lowest that can hold a survivor of top-k or, without it, of top-p."""
        self.limit.value = I.if_then_else(top_k > 0, I.min(top_k, self.vocab), self.vocab)
        self.bucket_sum.value = I.float64(0)
        self.lowest_bucket.value = 0
        self.count.value = 0
        self.found.value = 0
        with I.serial(_BUCKETS) as i, I.If(self.found.value == 0), I.Then():
            self.lowest_bucket.value = _BUCKETS - 1 - i
            self.count.value = self.count.value + self.bucket_count[_BUCKETS - 1 - i]
            self.bucket_sum.value = self.bucket_sum.value + self.bucket_mass[_BUCKETS - 1 - i]
            enough_mass = self.bucket_sum.value >= I.cast(top_p, "float64") * self.mass.value
            nucleus = tirx.all(top_k <= 0, top_p < I.float32(1), enough_mass)
            with I.If(tirx.any(self.count.value >= self.limit.value, nucleus)), I.Then():
                self.found.value = 1

    def collect(self, top_k: Expr, top_p: Expr) -> None:
        """pairs = the `count` tokens of these buckets, sorted where top-k or top-p is on, no more than top-k leaves."""
        self.count.value = 0
        with I.serial(self.vocab) as i:
            bits = I.bind(I.reinterpret("uint32", self.weight[i]))
            with I.If(self._bucket_of(bits) >= self.lowest_bucket.value), I.Then():
                put(self.pairs.keys, self.count.value, bits)
                put(self.pairs.ids, self.count.value, i)
                self.count.value = self.count.value + 1
        with I.If(tirx.any(top_p < I.float32(1), top_k > 0)), I.Then():
            self.pairs.sort_descending(self.count.value)
        self.count.value = I.min(self.count.value, self.limit.value)

    def _weight_of(self, i: Expr) -> Expr:
        return I.cast(self.pairs.key(i), "float64")

    def cut(self, top_k: Expr, top_p: Expr) -> None:
        """kept = how many pairs top-p leaves: those that hold its share of what top-k left, else of all mass."""
        with I.If(top_k > 0), I.Then():
            self.mass.value = I.float64(0)
            with I.serial(self.count.value) as i:
                self.mass.value = self.mass.value + self._weight_of(i)
        self.kept.value = self.count.value
        self.kept_mass.value = I.float64(0)
        with I.If(top_p < I.float32(1)), I.Then():
            self.kept.value = 0
            with I.serial(self.count.value) as i:
                short = self.kept_mass.value < I.cast(top_p, "float64") * self.mass.value
                with I.If(tirx.any(self.kept.value == 0, short)), I.Then():
                    self.kept_mass.value = self.kept_mass.value + self._weight_of(i)
                    self.kept.value = i + 1

    def draw(self, s: Expr, min_p: Expr, uniform: Expr, token: Buffer) -> None:
        """token = the one at `uniform` of the mass of those that min-p leaves; -1 where none has any."""
        # The largest weight is exp(0) = 1, so min-p is a bound on the weight itself; what exp clipped has none.
        self.min_weight.value = I.max(min_p, I.float32(_CLIPPED))
        self.kept_mass.value = I.float64(0)
        with I.serial(self.kept.value) as i, I.If(self.pairs.key(i) >= self.min_weight.value), I.Then():
            self.kept_mass.value = self.kept_mass.value + self._weight_of(i)
        self.drawn_mass.value = I.cast(uniform, "float64") * self.kept_mass.value
        self.running.value = I.float64(0)
        self.drawn.value = -1
        with I.serial(self.kept.value) as i:
            before = tirx.any(self.drawn.value < 0, self.running.value <= self.drawn_mass.value)
            with I.If(tirx.all(self.pairs.key(i) >= self.min_weight.value, before)), I.Then():
                self.running.value = self.running.value + self._weight_of(i)
                self.drawn.value = self.pairs.ids[i]
        put(token, s, self.drawn.value)

    def keep_all(self) -> None:
        """pairs = all tokens, of weights at temperature 1."""
        self.limit.value, self.lowest_bucket.value = self.vocab, 0
        self.collect(I.int32(0), I.float32(1))
        self.kept.value, self.kept_mass.value = self.count.value, self.mass.value
        self.min_weight.value = I.float32(_CLIPPED)

    def _of_kept(self, body: Callable[[Expr, Expr], None]) -> None:
        """`body(i, weight)` for each pair that could be drawn."""
        with I.serial(self.kept.value) as i, I.If(self.pairs.key(i) >= self.min_weight.value), I.Then():
            body(i, self._weight_of(i))

    def margin(self) -> Expr:
        """How much more probable the best token is than the second, float64."""
        best, second = self.drawn_mass, self.running
        best.value, second.value = I.float64(0), I.float64(0)

        def compare(_: Expr, weight: Expr) -> None:
            second.value = I.max(second.value, I.min(best.value, weight))
            best.value = I.max(best.value, weight)

        self._of_kept(compare)
        return (best.value - second.value) / self.kept_mass.value

    def negative_entropy(self, s: Expr) -> Expr:
        """The sum of p log p, float64: with p = w / mass, that of w log w over mass, less log(mass)."""
        self.running.value = I.float64(0)

        def add_one(i: Expr, weight: Expr) -> None:
            log_weight = (self.logits[s, 0, self.pairs.ids[i]] - self.top_logit.value) * self.inverse.value
            self.running.value = self.running.value + weight * I.cast(log_weight, "float64")

        self._of_kept(add_one)
        return self.running.value / self.kept_mass.value - I.log(self.kept_mass.value)


def sample(vocab: int) -> tirx.PrimFunc:
    """Rows in parallel. Logits stay as they are. A token e**86 times less likely than the best is never drawn, nor are
    masked ones.
    """

    return function_of(SIGNATURES["sample"], dimensions(vocab), partial(_sample_rows, vocab))


def sample_with_confidence(vocab: int) -> tirx.PrimFunc:
    """As `sample`."""
    return function_of(SIGNATURES["sample_with_confidence"], dimensions(vocab), partial(_sample_rows, vocab))


def sample_with_measure(vocab: int) -> tirx.PrimFunc:
    """As `sample`."""

    def rows(*buffers: Buffer) -> None:
        *drawn_from, measure, token, confidence = buffers
        body(*drawn_from, token, confidence, measure)

    body: Callable[..., None] = partial(_sample_rows, vocab)
    return function_of(SIGNATURES["sample_with_measure"], dimensions(vocab), rows)


def _sample_rows(
    vocab: int,
    logits: Buffer,
    temperature: Buffer,
    top_p: Buffer,
    top_k: Buffer,
    min_p: Buffer,
    uniform: Buffer,
    token: Buffer,
    confidence: Buffer | None = None,
    measure: Buffer | None = None,
) -> None:
    with I.parallel(logits.shape[0]) as s:
        steps = _Sample(logits)
        steps.find_top(s)
        steps.best.value = vocab
        with I.If(steps.overflowed()):
            with I.Then():
                put(token, s, -1)
            with I.Else(), I.If(temperature[s] <= I.float32(0)):
                with I.Then():
                    steps.take_best(s, token)
                    if confidence is not None:
                        steps.weigh(s, I.float32(1))
                        steps.kept_mass.value = steps.mass.value
                    if measure is not None:
                        steps.keep_all()
                with I.Else():
                    steps.weigh(s, temperature[s])
                    steps.find_bucket(top_k[s], top_p[s])
                    steps.collect(top_k[s], top_p[s])
                    steps.cut(top_k[s], top_p[s])
                    steps.draw(s, min_p[s], uniform[s], token)
        if confidence is not None:
            put(confidence, s, I.float32(0))
            with I.If(token[s] >= 0), I.Then():
                if measure is not None:
                    with I.If(measure[s] == 1), I.Then():
                        steps.weigh(s, I.float32(1))
                        steps.kept_mass.value = steps.mass.value
                share = I.cast(steps.weight[token[s]], "float64") / steps.kept_mass.value
                put(confidence, s, I.cast(share, "float32"))
                if measure is not None:
                    with I.If(measure[s] == 2), I.Then():
                        put(confidence, s, I.cast(steps.margin(), "float32"))
                    with I.If(measure[s] == 3), I.Then():
                        put(confidence, s, I.cast(steps.negative_entropy(s), "float32"))


def apply_logit_bias_inplace(vocab: int) -> tirx.PrimFunc:
    def body(logits: Buffer, row: Buffer, token: Buffer, bias: Buffer) -> None:
        with I.serial(row.shape[0]) as i:
            add(logits, (row[i], token[i]), bias[i])

    return function_of(SIGNATURES["apply_logit_bias_inplace"], dimensions(vocab), body)


def apply_penalty_inplace(vocab: int) -> tirx.PrimFunc:
    def body(logits: Buffer, seq: Buffer, entry: Buffer, token: Buffer, count: Buffer, penalties: Buffer) -> None:
        with I.serial(entry.shape[0]) as i:
            at, of = (seq[entry[i]], token[i]), entry[i]
            presence, frequency, repetition = (penalties[of, kind] for kind in range(3))
            put(logits, at, logits[at] - (presence + I.cast(count[i], "float32") * frequency))
            scaled = I.if_then_else(logits[at] < I.float32(0), logits[at] * repetition, logits[at] / repetition)
            put(logits, at, scaled)

    return function_of(SIGNATURES["apply_penalty_inplace"], dimensions(vocab), body)


def apply_bitmask_inplace(vocab: int) -> tirx.PrimFunc:
    """Rows in parallel, half a word of the mask at a time."""

    def body(logits: Buffer, seq: Buffer, mask: Buffer) -> None:
        def masked(row: Expr, v: Expr, bits: Expr, lanes: int) -> None:
            one = splat(I.int32(1), lanes)
            kept = I.bitwise_and(bits, one) == one
            store(logits, (row, v), I.Select(kept, read(logits, (row, v), lanes), splat(_LOWEST, lanes)), lanes)

        with I.parallel(seq.shape[0]) as i:
            row = I.bind(seq[i])
            with I.serial(vocab // 16) as half:
                word = splat(mask[row, half // 2], 16)
                masked(row, half * 16, I.shift_right(word, I.ramp(I.cast(half % 2 * 16, "int32"), 1, 16)), 16)
            with I.serial(vocab % 16) as j:
                v = vocab // 16 * 16 + j
                masked(row, v, I.shift_right(mask[row, v // 32], I.cast(v % 32, "int32")), 1)

    return function_of(SIGNATURES["apply_bitmask_inplace"], dimensions(vocab), body)


def forbid_inplace(vocab: int, ranges: Sequence[tuple[int, int]]) -> tirx.PrimFunc:
    """Logits of the tokens in these ranges [begin, end) become the lowest."""

    def body(logits: Buffer) -> None:
        with I.serial(logits.shape[0]) as row:
            for begin, end in ranges:
                with I.serial(end - begin) as i:
                    put(logits, (row, 0, begin + i), _LOWEST)

    return by_hand({FORBID.name: function_of(FORBID, dimensions(vocab), body)})[FORBID.name]


_MAKERS = (
    sample,
    sample_with_confidence,
    sample_with_measure,
    apply_logit_bias_inplace,
    apply_penalty_inplace,
    apply_bitmask_inplace,
)


def sampling_functions(vocab: int) -> dict[str, tirx.PrimFunc]:
    """The sampling functions of a library, by entry point name."""
    return by_hand({make.__name__: make(vocab) for make in _MAKERS}, vocab=vocab)
