"""What attention is, in numpy: K and V as pages keep them, and the output of a query."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kernels.cases.steps import sinks_of
from tests.kernels.harness import EPS, Array
from tir_schedules.cpu.attention import PAGE, AttentionShape
from tir_schedules.paged import QUANTIZED


@dataclass(frozen=True)
class Stored:
    """K or V [..., kv_heads, D] as pages keep it: elements, and for q8 and q4, whose elements are codes, scales float16
    [..., kv_heads, groups].
    """

    elements: Array
    scales: Array | None

    def values(self) -> Array:
        """The float64 numbers that these stand for."""
        x = self.elements.astype(np.float64)
        if self.scales is None:
            return x
        groups = self.scales.shape[-1]
        split = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
        return (split * self.scales.astype(np.float64)[..., None]).reshape(x.shape)


def stored(shape: AttentionShape, x: Array) -> Stored:
    """K or V f32[..., kv_heads, D] as AttentionShape says."""
    if shape.dtype not in QUANTIZED:
        return Stored(x.astype(shape.dtype), None)
    groups = x.shape[-1] // shape.scale_dims
    split = x.astype(np.float32).reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    largest, unit, lowest, highest = np.abs(split).max(axis=-1), 1 / 127, -127, 127
    if shape.dtype == "q4":
        unit, lowest, highest = 1 / 8, -8, 7
    scale = np.minimum(largest * np.float32(unit), np.float32(65504))
    if shape.dtype == "q4":  # the number of largest magnitude has code -8
        scale = np.where(split.min(axis=-1) == -largest, scale, -scale)
    scale = scale.astype(np.float16)
    step = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    codes = np.clip(np.rint(split * inverse[..., None]), lowest, highest)
    return Stored(codes.astype(np.int8).reshape(x.shape), scale)


def values_of(shape: AttentionShape, k: Array, v: Array) -> Array:
    """What a token's values are: the first dimensions of a `latent` key."""
    return k[..., : shape.v_dim] if shape.latent else v[..., : shape.v_dim]


def write_token(shape: AttentionShape, pages: Array, page: int, slot: int, k: Stored, v: Stored, t: int) -> None:
    """Token t of k and v into its slot, as `pages.py` says."""
    keys, values = k.elements[t], v.elements[t]
    if shape.dtype == "q4":
        halves = values.reshape(shape.num_kv_heads, shape.v_scale_groups, 2, -1)
        keys = keys[:, 0::2] & 15 | keys[:, 1::2] << 4
        values = (halves[:, :, 0] & 15 | halves[:, :, 1] << 4).reshape(shape.num_kv_heads, -1)
    columns = [(keys, k.scales)] if shape.latent else [(keys, k.scales), (values, v.scales)]
    for h, head in enumerate(pages[page].reshape(shape.num_kv_heads, shape.head_bytes)):
        head[: PAGE * keys[h].nbytes].view(keys.dtype).reshape(-1, PAGE)[:, slot] = keys[h]
        if not shape.latent:
            begin, size = PAGE * keys[h].nbytes, PAGE * values[h].nbytes
            head[begin : begin + size].view(values.dtype).reshape(PAGE, -1)[slot] = values[h]
        at = sum(PAGE * codes[h].nbytes for codes, _ in columns)
        for _, scales in columns:
            if scales is not None:
                end = at + PAGE * scales[t, h].nbytes
                head[at:end].view(np.float16).reshape(-1, PAGE)[:, slot], at = scales[t, h], end


def reference(
    shape: AttentionShape, q: Array, k: Array, v: Array, scale: float, window: int = 0
) -> tuple[Array, Array]:
    """Attention of one query [heads, D] to the keys up to its own, the last: output, and its bound.

    The bound follows the rounding of the dot products.
    """
    keys, values = (np.repeat(x[-window:].astype(np.float64), shape.group, axis=1) for x in (k, v))
    query = q.astype(np.float64)
    score = np.einsum("hd,thd->ht", query, keys) * scale
    slack = (
        (shape.head_dim + 24) * EPS * (np.einsum("hd,thd->ht", np.abs(query), np.abs(keys)) * abs(scale)).max(axis=1)
    )
    if shape.softcap:
        score = shape.softcap * np.tanh(score / shape.softcap)
        slack = slack + 16 * EPS * shape.softcap
    sinks = sinks_of(shape)
    top = np.maximum(score.max(axis=1), sinks)[:, None]
    weight, sink = np.exp(score - top), np.exp(sinks[:, None] - top)
    out = np.einsum("ht,thd->hd", weight / (weight.sum(axis=1, keepdims=True) + sink), values)
    largest = np.abs(values).max(axis=(0, 2))
    relative = 2 * slack + (len(keys) + 32) * EPS + 4e-7
    return out, (relative * largest)[:, None] + EPS * np.abs(out)
