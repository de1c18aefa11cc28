"""From logits to the next token on CPUs, compiled into the library.

`sample` is what our hosts call: temperature, top-k, top-p, min-p and the draw, exact and without sorting the
vocabulary. The other functions are MLC's published contract. Logits and probabilities are float32, sums
float64 (in float32 those over 150 000 tokens are off by 1e-4); `b` sequences.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.macro import macro
from tir_schedules.op import by_hand

# Weights lie in (0, 1]; a bucket is their exponent and 4 bits of mantissa: the float's bits shifted by 19.
_SHIFT = 19
_BUCKETS = (0x3F800000 >> _SHIFT) + 1
_RADIX = 2048
# exp clips its argument at -87 (fast_math.py), so a weight this small stands for any smaller one, 0 included.
_CLIPPED = 2e-38


@macro
def _sort_descending(keys, ids, other_keys, other_ids, counts, n):
    """Stable radix sort of n non-negative floats, given as their bits, largest first: three digits of 11 bits."""
    for digit in T.serial(3):
        for i in T.serial(_RADIX):
            counts[i] = 0
        for i in T.serial(n):
            bucket: T.let[T.int32] = T.cast(
                T.bitwise_and(T.shift_right(keys[i], T.cast(digit * 11, "uint32")), T.uint32(_RADIX - 1)), "int32"
            )
            counts[bucket] = counts[bucket] + 1
        start = T.alloc_buffer((1,), "int32")
        start[0] = 0
        for i in T.serial(_RADIX):
            size: T.let[T.int32] = counts[_RADIX - 1 - i]
            counts[_RADIX - 1 - i] = start[0]
            start[0] = start[0] + size
        for i in T.serial(n):
            bucket2: T.let[T.int32] = T.cast(
                T.bitwise_and(T.shift_right(keys[i], T.cast(digit * 11, "uint32")), T.uint32(_RADIX - 1)), "int32"
            )
            other_keys[counts[bucket2]] = keys[i]
            other_ids[counts[bucket2]] = ids[i]
            counts[bucket2] = counts[bucket2] + 1
        for i in T.serial(n):
            keys[i] = other_keys[i]
            ids[i] = other_ids[i]


def sample(vocab: int) -> tirx.PrimFunc:
    """logits f32[b, 1, V] (left as they are), temperature, top_p, min_p, uniform f32[b], top_k i32[b] -> token i32[b].

    As transformers' warpers in order: temperature, top-k (0: off; of equal logits the lower ids), top-p over what
    is left, min-p relative to the largest. Temperature 0 takes the largest logit, the lowest id on a tie. `uniform`
    in [0, 1) draws, from the best token down where top-k or top-p is on, else by id; a token e**86 times less likely
    than the best is never drawn, as masked ones must not be.
    """

    @T.prim_func(s_tir=True)
    def sample(
        logits_handle: T.handle,
        temperature_handle: T.handle,
        top_p_handle: T.handle,
        top_k_handle: T.handle,
        min_p_handle: T.handle,
        uniform_handle: T.handle,
        token_handle: T.handle,
    ):
        b = T.int64()
        logits = T.match_buffer(logits_handle, (b, 1, vocab), "float32")
        temperature = T.match_buffer(temperature_handle, (b,), "float32")
        top_p = T.match_buffer(top_p_handle, (b,), "float32")
        top_k = T.match_buffer(top_k_handle, (b,), "int32")
        min_p = T.match_buffer(min_p_handle, (b,), "float32")
        uniform = T.match_buffer(uniform_handle, (b,), "float32")
        token = T.match_buffer(token_handle, (b,), "int32")
        weight = T.alloc_buffer((vocab,), "float32")
        keys = T.alloc_buffer((vocab,), "uint32")
        ids = T.alloc_buffer((vocab,), "int32")
        other_keys = T.alloc_buffer((vocab,), "uint32")
        other_ids = T.alloc_buffer((vocab,), "int32")
        counts = T.alloc_buffer((_RADIX,), "int32")
        bucket_count = T.alloc_buffer((_BUCKETS,), "int32")
        bucket_mass = T.alloc_buffer((_BUCKETS,), "float64")
        f = T.alloc_buffer((3,), "float32")
        mass = T.alloc_buffer((5,), "float64")
        k = T.alloc_buffer((4,), "int32")
        lane_max = T.alloc_buffer((16,), "float32")
        for s in T.serial(b):
            lane_max[T.ramp(0, 1, 16)] = T.broadcast(T.float32(-3.4e38), 16)
            for i in T.serial(vocab // 16):
                lane_max[T.ramp(0, 1, 16)] = T.max(lane_max[T.ramp(0, 1, 16)], logits[s, 0, T.ramp(i * 16, 1, 16)])
            f[0] = T.float32(-3.4e38)
            for i in T.serial(16):
                f[0] = T.max(f[0], lane_max[i])
            for i in T.serial(vocab % 16):
                f[0] = T.max(f[0], logits[s, 0, vocab // 16 * 16 + i])
            k[0] = vocab
            if temperature[s] <= T.float32(0):
                for i in T.serial(vocab):
                    k[0] = T.min(k[0], T.if_then_else(logits[s, 0, i] >= f[0], i, vocab))
                token[s] = T.min(k[0], vocab - 1)
            else:
                f[1] = T.float32(1) / T.max(temperature[s], T.float32(1e-30))  # 1 / 1e-45 is infinite
                for i in T.serial(vocab // 16):
                    for lane in T.vectorized(16):
                        weight[i * 16 + lane] = T.exp((logits[s, 0, i * 16 + lane] - f[0]) * f[1])
                for i in T.serial(vocab % 16):
                    weight[vocab // 16 * 16 + i] = T.exp((logits[s, 0, vocab // 16 * 16 + i] - f[0]) * f[1])
                for i in T.serial(_BUCKETS):
                    bucket_count[i] = 0
                    bucket_mass[i] = T.float64(0)
                for i in T.serial(vocab):
                    bucket: T.let[T.int32] = T.min(
                        T.cast(T.shift_right(T.reinterpret(weight[i], dtype="uint32"), T.uint32(_SHIFT)), "int32"),
                        _BUCKETS - 1,
                    )
                    bucket_count[bucket] = bucket_count[bucket] + 1
                    bucket_mass[bucket] = bucket_mass[bucket] + T.cast(weight[i], "float64")
                mass[0] = T.float64(0)
                for i in T.serial(_BUCKETS):
                    mass[0] = mass[0] + bucket_mass[i]
                # k[1]: the lowest bucket that can hold a survivor of top-k or, without it, of top-p.
                k[0] = T.if_then_else(top_k[s] > 0, T.min(top_k[s], vocab), vocab)
                mass[1] = T.float64(0)
                k[1] = 0
                k[2] = 0
                k[3] = 0
                for i in T.serial(_BUCKETS):
                    if k[3] == 0:
                        k[1] = _BUCKETS - 1 - i
                        k[2] = k[2] + bucket_count[_BUCKETS - 1 - i]
                        mass[1] = mass[1] + bucket_mass[_BUCKETS - 1 - i]
                        if k[2] >= k[0] or (
                            top_k[s] <= 0
                            and top_p[s] < T.float32(1)
                            and mass[1] >= T.cast(top_p[s], "float64") * mass[0]
                        ):
                            k[3] = 1
                k[2] = 0
                for i in T.serial(vocab):
                    bits: T.let[T.uint32] = T.reinterpret(weight[i], dtype="uint32")
                    if T.min(T.cast(T.shift_right(bits, T.uint32(_SHIFT)), "int32"), _BUCKETS - 1) >= k[1]:
                        keys[k[2]] = bits
                        ids[k[2]] = i
                        k[2] = k[2] + 1
                if top_p[s] < T.float32(1) or top_k[s] > 0:
                    _sort_descending(keys, ids, other_keys, other_ids, counts, k[2])
                k[2] = T.min(k[2], k[0])
                # mass[0]: the mass that top-p is a share of: what top-k left, else the whole vocabulary's.
                if top_k[s] > 0:
                    mass[0] = T.float64(0)
                    for i in T.serial(k[2]):
                        mass[0] = mass[0] + T.cast(T.reinterpret(keys[i], dtype="float32"), "float64")
                k[3] = k[2]
                mass[2] = T.float64(0)
                if top_p[s] < T.float32(1):
                    k[3] = 0
                    for i in T.serial(k[2]):
                        if k[3] == 0 or mass[2] < T.cast(top_p[s], "float64") * mass[0]:
                            mass[2] = mass[2] + T.cast(T.reinterpret(keys[i], dtype="float32"), "float64")
                            k[3] = i + 1
                # The largest weight is exp(0) = 1, so min-p is a bound on the weight itself; what exp clipped has none.
                f[2] = T.max(min_p[s], T.float32(_CLIPPED))
                mass[2] = T.float64(0)
                for i in T.serial(k[3]):
                    if T.reinterpret(keys[i], dtype="float32") >= f[2]:
                        mass[2] = mass[2] + T.cast(T.reinterpret(keys[i], dtype="float32"), "float64")
                mass[3] = T.cast(uniform[s], "float64") * mass[2]
                mass[4] = T.float64(0)
                k[0] = -1
                for i in T.serial(k[3]):
                    if T.reinterpret(keys[i], dtype="float32") >= f[2] and (k[0] < 0 or mass[4] <= mass[3]):
                        mass[4] = mass[4] + T.cast(T.reinterpret(keys[i], dtype="float32"), "float64")
                        k[0] = ids[i]
                token[s] = T.max(k[0], 0)

    return sample


def softmax_with_temperature(vocab: int) -> tirx.PrimFunc:
    """logits f32[b, 1, V], temperature f32[b] -> probabilities f32[b, 1, V]; temperature 0 is the one-hot limit."""

    @T.prim_func(s_tir=True)
    def softmax_with_temperature(logits_handle: T.handle, temperature_handle: T.handle, out_handle: T.handle):
        b = T.int64()
        logits = T.match_buffer(logits_handle, (b, 1, vocab), "float32")
        temperature = T.match_buffer(temperature_handle, (b,), "float32")
        out = T.match_buffer(out_handle, (b, 1, vocab), "float32")
        for s in T.serial(b):
            f = T.alloc_buffer((2,), "float32")
            total = T.alloc_buffer((1,), "float64")
            f[0] = T.float32(-3.4e38)
            for i in T.serial(vocab):
                f[0] = T.max(f[0], logits[s, 0, i])
            f[1] = T.float32(1) / T.max(temperature[s], T.float32(1e-6))
            total[0] = T.float64(0)
            for i in T.serial(vocab // 16):
                for lane in T.vectorized(16):
                    out[s, 0, i * 16 + lane] = T.exp((logits[s, 0, i * 16 + lane] - f[0]) * f[1])
            for i in T.serial(vocab % 16):
                out[s, 0, vocab // 16 * 16 + i] = T.exp((logits[s, 0, vocab // 16 * 16 + i] - f[0]) * f[1])
            for i in T.serial(vocab):
                total[0] = total[0] + T.cast(out[s, 0, i], "float64")
            for i in T.serial(vocab):
                out[s, 0, i] = out[s, 0, i] / T.cast(total[0], "float32")

    return softmax_with_temperature


def argsort_probs(vocab: int) -> tirx.PrimFunc:
    """probs f32[b, V] -> (largest first f32[b, V], their ids i32[b, V])."""

    @T.prim_func(s_tir=True)
    def argsort_probs(probs_handle: T.handle, sorted_handle: T.handle, ids_handle: T.handle):
        b = T.int64()
        probs = T.match_buffer(probs_handle, (b, vocab), "float32")
        sorted_probs = T.match_buffer(sorted_handle, (b, vocab), "float32")
        sorted_ids = T.match_buffer(ids_handle, (b, vocab), "int32")
        keys = T.alloc_buffer((vocab,), "uint32")
        ids = T.alloc_buffer((vocab,), "int32")
        other_keys = T.alloc_buffer((vocab,), "uint32")
        other_ids = T.alloc_buffer((vocab,), "int32")
        counts = T.alloc_buffer((_RADIX,), "int32")
        for s in T.serial(b):
            for i in T.serial(vocab):
                keys[i] = T.reinterpret(probs[s, i], dtype="uint32")
                ids[i] = i
            _sort_descending(keys, ids, other_keys, other_ids, counts, vocab)
            for i in T.serial(vocab):
                sorted_probs[s, i] = T.reinterpret(keys[i], dtype="float32")
                sorted_ids[s, i] = ids[i]

    return argsort_probs


def sample_with_top_p(vocab: int) -> tirx.PrimFunc:
    """sorted probs f32[b, V], ids i32[b, V], uniform f32[n], row i32[n], top_p f32[b] -> token i32[n]."""

    @T.prim_func(s_tir=True)
    def sample_with_top_p(
        probs_handle: T.handle,
        ids_handle: T.handle,
        uniform_handle: T.handle,
        row_handle: T.handle,
        top_p_handle: T.handle,
        token_handle: T.handle,
    ):
        b = T.int64()
        n = T.int64()
        probs = T.match_buffer(probs_handle, (b, vocab), "float32")
        ids = T.match_buffer(ids_handle, (b, vocab), "int32")
        uniform = T.match_buffer(uniform_handle, (n,), "float32")
        row = T.match_buffer(row_handle, (n,), "int32")
        top_p = T.match_buffer(top_p_handle, (b,), "float32")
        token = T.match_buffer(token_handle, (n,), "int32")
        for j in T.serial(n):
            f = T.alloc_buffer((3,), "float64")
            k = T.alloc_buffer((2,), "int32")
            f[0] = T.float64(0)
            k[0] = 0
            for i in T.serial(vocab):
                if i == 0 or f[0] < T.cast(top_p[row[j]], "float64"):
                    f[0] = f[0] + T.cast(probs[row[j], i], "float64")
                    k[0] = i + 1
            f[1] = T.cast(uniform[j], "float64") * f[0]
            f[2] = T.float64(0)
            k[1] = ids[row[j], 0]
            for i in T.serial(k[0]):
                if i == 0 or f[2] <= f[1]:
                    f[2] = f[2] + T.cast(probs[row[j], i], "float64")
                    k[1] = ids[row[j], i]
            token[j] = k[1]

    return sample_with_top_p


def apply_logit_bias_inplace(vocab: int) -> tirx.PrimFunc:
    """logits f32[b, V][row[i], token[i]] += bias[i]."""

    @T.prim_func(s_tir=True)
    def apply_logit_bias_inplace(
        logits_handle: T.handle, row_handle: T.handle, token_handle: T.handle, bias_handle: T.handle
    ):
        b = T.int64()
        n = T.int64()
        logits = T.match_buffer(logits_handle, (b, vocab), "float32")
        row = T.match_buffer(row_handle, (n,), "int32")
        token = T.match_buffer(token_handle, (n,), "int32")
        bias = T.match_buffer(bias_handle, (n,), "float32")
        for i in T.serial(n):
            logits[row[i], token[i]] = logits[row[i], token[i]] + bias[i]

    return apply_logit_bias_inplace


def apply_penalty_inplace(vocab: int) -> tirx.PrimFunc:
    """Presence, frequency, then repetition penalty on logits f32[b, V] of tokens that occurred.

    seq i32[n] rows; of[i] says which of them entry i belongs to; token, count i32[k]; penalties f32[n, 3] =
    presence, frequency, repetition. Repetition divides positive and multiplies negative logits (Keskar et al. 2019).
    """

    @T.prim_func(s_tir=True)
    def apply_penalty_inplace(
        logits_handle: T.handle,
        seq_handle: T.handle,
        of_handle: T.handle,
        token_handle: T.handle,
        count_handle: T.handle,
        penalty_handle: T.handle,
    ):
        b = T.int64()
        n = T.int64()
        k = T.int64()
        logits = T.match_buffer(logits_handle, (b, vocab), "float32")
        seq = T.match_buffer(seq_handle, (n,), "int32")
        of = T.match_buffer(of_handle, (k,), "int32")
        token = T.match_buffer(token_handle, (k,), "int32")
        count = T.match_buffer(count_handle, (k,), "int32")
        penalty = T.match_buffer(penalty_handle, (n, 3), "float32")
        for i in T.serial(k):
            logits[seq[of[i]], token[i]] = logits[seq[of[i]], token[i]] - (
                penalty[of[i], 0] + T.cast(count[i], "float32") * penalty[of[i], 1]
            )
            logits[seq[of[i]], token[i]] = T.if_then_else(
                logits[seq[of[i]], token[i]] < T.float32(0),
                logits[seq[of[i]], token[i]] * penalty[of[i], 2],
                logits[seq[of[i]], token[i]] / penalty[of[i], 2],
            )

    return apply_penalty_inplace


def apply_bitmask_inplace(vocab: int) -> tirx.PrimFunc:
    """Logits f32[b, V] of rows seq i32[n] become -3.4e38 where bit v % 32 of mask i32[b, ceil(V / 32)] is 0."""

    @T.prim_func(s_tir=True)
    def apply_bitmask_inplace(logits_handle: T.handle, seq_handle: T.handle, mask_handle: T.handle):
        b = T.int64()
        n = T.int64()
        logits = T.match_buffer(logits_handle, (b, vocab), "float32")
        seq = T.match_buffer(seq_handle, (n,), "int32")
        mask = T.match_buffer(mask_handle, (b, (vocab + 31) // 32), "int32")
        for i in T.serial(n):
            for v in T.serial(vocab):
                if T.bitwise_and(T.shift_right(mask[seq[i], v // 32], v % 32), 1) == 0:
                    logits[seq[i], v] = T.float32(-3.4e38)

    return apply_bitmask_inplace


def sampling_functions(vocab: int) -> dict[str, tirx.PrimFunc]:
    """Every sampling function of the library, by its entry point name; they write to their last arguments."""
    makers = (
        sample,
        softmax_with_temperature,
        argsort_probs,
        sample_with_top_p,
        apply_logit_bias_inplace,
        apply_penalty_inplace,
        apply_bitmask_inplace,
    )
    return by_hand({make.__name__: make(vocab) for make in makers}, vocab=vocab)
