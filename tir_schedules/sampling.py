"""Sampling functions of a library: names, arguments and results, for every target. This module does not import TVM.

`sample` is our own, the others are MLC's published contract. Symbols: `V` vocabulary, `b` sequences, `n` rows to
sample, `k` penalized tokens. A PrimFunc takes the inputs, then the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SHORT = {"float32": "f32", "int32": "i32"}
_MASK_WORDS = "ceil(V/32)"


@dataclass(frozen=True)
class TensorType:
    """A tensor with symbols among its dimensions."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"{_SHORT[self.dtype]}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Signature:
    """A function's arguments and results. A function without outputs changes its first input in place."""

    name: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...] = ()

    def __str__(self) -> str:
        """For people: `sample(logits: f32[b, 1, V], ...) -> i32[b]`."""
        inputs = ", ".join(f"{tensor.name}: {tensor}" for tensor in self.inputs)
        outputs = ", ".join(map(str, self.outputs))
        result = f" -> {outputs}" if len(self.outputs) == 1 else f" -> ({outputs})" if outputs else ""
        return f"{self.name}({inputs}){result}"


def dimensions(vocab: int) -> Mapping[str, int]:
    """The symbols that a vocabulary fixes; the others are dynamic."""
    return {"V": vocab, _MASK_WORDS: -(-vocab // 32)}


def _f32(name: str, *shape: str | int) -> TensorType:
    return TensorType(name, "float32", shape)


def _i32(name: str, *shape: str | int) -> TensorType:
    return TensorType(name, "int32", shape)


_DRAWN_FROM = (
    _f32("logits", "b", 1, "V"),
    _f32("temperature", "b"),
    _f32("top_p", "b"),
    _i32("top_k", "b"),
    _f32("min_p", "b"),
    _f32("uniform", "b"),
)
SIGNATURES: Mapping[str, Signature] = {
    signature.name: signature
    for signature in (
        # As transformers' warpers in order: temperature, top-k (0: off; of equal logits the lower ids), top-p over
        # what is left, min-p relative to the largest. Temperature 0 takes the largest logit, the lowest id on a tie.
        # `uniform` in [0, 1) draws: from the best token down where top-k or top-p is on, else by id.
        # -1 for a row with NaN or infinity, or with minus infinity alone.
        Signature(
            "sample",
            _DRAWN_FROM,
            (_i32("token", "b"),),
        ),
        # As `sample`, and the probability of the token among those that could be drawn; with temperature 0 among all,
        # at temperature 1; 0 where the token is -1. In place of `sample` in libraries that denoise blocks.
        Signature("sample_with_confidence", _DRAWN_FROM, (_i32("token", "b"), _f32("confidence", "b"))),
        # As `sample`, and a measure of the row, 0 where the token is -1. `measure` 0 is the probability of the token,
        # as `sample_with_confidence` has it, 1 that among all at temperature 1; 2 how much more probable the most
        # probable token is than the next one, 3 the sum of p log p: of those that could be drawn, with temperature 0
        # of all at temperature 1. In place of `sample` in libraries that denoise whole answers.
        Signature(
            "sample_with_measure",
            (*_DRAWN_FROM, _i32("measure", "b")),
            (_i32("token", "b"), _f32("confidence", "b")),
        ),
        # Temperature 0 is the one-hot limit. NaN for a row with NaN or infinity.
        Signature(
            "softmax_with_temperature",
            (_f32("logits", "b", 1, "V"), _f32("temperature", "b")),
            (_f32("probs", "b", 1, "V"),),
        ),
        # Largest first; of equal ones the lower id first.
        Signature(
            "argsort_probs",
            (_f32("probs", "b", "V"),),
            (_f32("sorted_probs", "b", "V"), _i32("sorted_ids", "b", "V")),
        ),
        # The nucleus is the shortest prefix whose mass reaches top_p, at least one token; `uniform` draws in it.
        # -1 for a row of NaN, for which WebLLM raises an error.
        Signature(
            "sample_with_top_p",
            (
                _f32("sorted_probs", "b", "V"),
                _i32("sorted_ids", "b", "V"),
                _f32("uniform", "n"),
                _i32("row", "n"),
                _f32("top_p", "b"),
            ),
            (_i32("token", "n"),),
        ),
        # logits[row[i], token[i]] += bias[i]; the pairs (row, token) are distinct.
        Signature(
            "apply_logit_bias_inplace",
            (_f32("logits", "b", "V"), _i32("row", "n"), _i32("token", "n"), _f32("bias", "n")),
        ),
        # Presence, frequency and repetition penalties, in that order, of tokens that occurred `count` times. Entry i
        # is for sequence seq[entry[i]]. Repetition divides positive and multiplies negative logits
        # (Keskar et al. 2019).
        Signature(
            "apply_penalty_inplace",
            (
                _f32("logits", "b", "V"),
                _i32("seq", "n"),
                _i32("entry", "k"),
                _i32("token", "k"),
                _i32("count", "k"),
                _f32("penalties", "n", 3),
            ),
        ),
        # Logits of rows seq[i] become -3.4e38 where bit v % 32 of mask[seq[i], v / 32] is 0.
        Signature(
            "apply_bitmask_inplace",
            (_f32("logits", "b", "V"), _i32("seq", "n"), _i32("mask", "b", _MASK_WORDS)),
        ),
    )
}

# What `sample` and `softmax_with_temperature` of a library begin with where the tokenizer lacks ids of the vocabulary:
# no host draws them. Logits of rows in between, such as padding, become -3.4e38.
FORBID = Signature("forbid_inplace", (_f32("logits", "b", 1, "V"),))


# The function that draws tokens, by what a model denoises; it is `sample` where one token follows the other.
DRAWS: Mapping[str, str] = {"blocks": "sample_with_confidence", "answers": "sample_with_measure"}


def sampling_names(own_pages: bool, draw: str = "sample") -> tuple[str, ...]:
    """The functions that a library's host calls: our runtime, which owns pages, has one to draw, MLC's have three."""
    others = {"sample", *DRAWS.values()}
    if own_pages:
        others = {"softmax_with_temperature", "argsort_probs", "sample_with_top_p", *others} - {draw}
    return tuple(name for name in SIGNATURES if name not in others)
