"""Numbers of a packed weight as matrix units take them: pairs of float16 in words.

A float16 from 1024 to 2047 is 1024 plus the number in its ten lowest bits, and one from 64 to 127 is 64 plus a
sixteenth of it. So a code becomes one by moving bytes and setting bits, and a multiply-add takes away what is too much:
all of it exact, and no conversion. Scaled, it has the bits of the float32 product rounded to float16, because a code's
digits times a scale's fit a float32.

What is too much is the same for all rows of a weight, and so is its product with x: sums of products can begin with it
(`biased_codes`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Expr
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import pin
from tir_schedules.gpu.matmul.packed import Packed
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES, LANE_ROWS, Weights

WORDS = GROUP_LANES // 2  # of the eight columns of a step


def has_codes(weight: Packed) -> bool:
    """Whether a weight has codes of 4 or 8 bits in words and scales in float16."""
    return weight.kept is None and weight.bits in (4, 8) and weight.pairs


def codes(weight: Packed, stored: Sequence[Sequence[Expr]]) -> list[list[Expr]]:
    """[row, `WORDS`]: codes of a step minus the zero point, of stored words [word, row] of some of the lane's rows."""
    pairs = _pairs_of_4 if weight.bits == 4 else _pairs_of_8
    return [[pin(pair) for word in words for pair in pairs(word, weight.zero_point)] for words in zip(*stored)]


def biased_codes(weight: Packed, stored: Sequence[Sequence[Expr]]) -> list[list[Expr]]:
    """[row, `WORDS`]: codes of a step minus `biases`, in the order of `in_code_order`; `stored` as in `codes`."""
    pairs = _biased_of_4 if weight.bits == 4 else _digits_of_8
    return [[pin(pair) for word in words for pair in pairs(word)] for words in zip(*stored)]


def biases(weight: Packed) -> list[Expr]:
    """What is to be added to `biased_codes`, in `WORDS`."""
    tops = (1024, 64) if weight.bits == 4 else (1024, 1024)
    return [_pair(-top - weight.zero_point, -top - weight.zero_point) for top in tops * 2]


def in_code_order(weight: Packed, xs: Sequence[Expr]) -> list[Expr]:
    """Eight columns of x, two in a word, as `biased_codes` has them: of 4 bits the column i beside i + 4."""
    if weight.bits == 8:
        return list(xs)
    low, high = device_calls.low_halves, device_calls.high_halves
    return [pin(half(xs[i], xs[i + 2])) for i in range(2) for half in (low, high)]


def numbers(weights: Weights, stored: Sequence[Sequence[Expr]], scales: Sequence[Expr]) -> list[list[Expr]]:
    """[the lane's row, `WORDS`]: a step's numbers. `scales`: a row of `scale_pairs`, or what `Weights.scales` says."""
    weight = weights.weight
    if has_codes(weight):
        return [
            [pin(device_calls.half_multiply(pair, scale)) for pair in row]
            for row, scale in zip(codes(weight, stored), scales)
        ]
    if not weight.bits and weight.pairs:
        return [list(words) for words in zip(*stored)]
    columns = [weights.column([list(words) for words in stored], j, scales) for j in range(GROUP_LANES)]
    return [
        [pin(device_calls.half_pair(columns[2 * i][row], columns[2 * i + 1][row])) for i in range(WORDS)]
        for row in range(LANE_ROWS)
    ]


def scale_pairs(weights: Weights, block: Expr, unit: Expr) -> list[list[Expr]]:
    """Scales of a unit, [quantization group, the lane's row], twice in a word."""
    words = weights.scale_words(block, unit)
    halves = [[pin(device_calls.permute_bytes(word, word, which)) for word in words] for which in (0x1010, 0x3232)]
    if weights.scales_per_word == 2:
        return halves
    return [[pin(I.Select(unit % 2 == 0, low, high)) for low, high in zip(*halves)]]


def _biased_of_4(word: Expr) -> list[Expr]:
    """Eight codes of a word: 1024 plus the lower codes of bytes, 64 plus the upper ones."""
    upper = pin(I.shift_right(word, I.uint32(8)))
    masks = ((0x000F000F, _bits(1024)), (0x00F000F0, _bits(64)))
    return [device_calls.set_bits(part, mask, bits) for part in (word, upper) for mask, bits in masks]


def _pairs_of_4(word: Expr, zero: float) -> list[Expr]:
    """Eight codes of a word: the upper code of a byte has 16 times its value."""
    spread = [device_calls.permute_bytes(word, I.uint32(0), 0x4040 | byte * 0x0101) for byte in range(4)]
    digits = [device_calls.set_bits(pair, 0x00F0000F, _bits(1024)) for pair in spread]
    return [device_calls.half_fma(pair, _pair(1, 1 / 16), _pair(-1024 - zero, -64 - zero)) for pair in digits]


def _digits_of_8(word: Expr) -> list[Expr]:
    """1024 plus each of the four codes of a word."""
    return [device_calls.permute_bytes(word, _pair(1024, 1024), which) for which in (0x5150, 0x5352)]


def _pairs_of_8(word: Expr, zero: float) -> list[Expr]:
    """Four codes of a word."""
    return [device_calls.half_fma(pair, _pair(1, 1), _pair(-1024 - zero, -1024 - zero)) for pair in _digits_of_8(word)]


def _pair(low: float, high: float) -> Expr:
    return I.uint32(struct.unpack("<I", struct.pack("<2e", low, high))[0])


def _bits(number: float) -> int:
    """A float16 twice in a word."""
    return int(struct.unpack("<I", struct.pack("<2e", number, number))[0])
