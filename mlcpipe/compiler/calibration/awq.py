"""AWQ (Lin et al. 2023): columns whose errors matter most are scaled up before rounding.

The producer of a matrix's input (a norm, or the rows of another matrix) is divided by the factors that the matrix's
columns are multiplied by, so the model's function is unchanged. Factors are powers of the inputs' size; of a few
powers the one of least output error is taken, with inputs rounded to int8 as in prefill: large channels, which spoil
the rounding of their neighbours, become smaller (SmoothQuant, Xiao et al. 2022).
It pays for models with a few large channels, whose loss it removes; for others GPTQ loses less (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend import nn

from mlcpipe.compiler.calibration.changed import Changed
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.mlp import FusedGatedMLP, GatedMLP
from mlcpipe.nn.short_conv import ShortConv
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.support.defaults import SEARCH

Array = NDArray[Any]

_POWERS = np.linspace(0.1, 1.0, 10)
_GROUP = 32  # columns of an input with one scale of int8, see tir_schedules/cpu/int8_activations.py
_ROWS = 512  # of each matrix, to measure the error with
SAMPLE = 512  # rows of their inputs


@dataclass(frozen=True)
class Fold:
    """Factors for the columns of `consumers`; the rows of `producers` from `begin` on are divided by them.

    Producers are vectors or matrices; `add` is added to them when they are read. Of `heads` (kv_heads, query heads of
    each, head_dim) those that read the same rows share factors.
    """

    consumers: tuple[str, ...]
    producers: tuple[str, ...]
    begin: int = 0
    add: float = 0.0
    heads: tuple[int, int, int] | None = None


def folds_of(layer: nn.Module) -> Iterator[Fold]:
    """The foldable pairs of a layer, by parameter names. Experts are unchanged."""
    form, name, mlp = layer.form, layer.mixer_name, layer.mlp
    mixer, simple = getattr(layer, name), isinstance(mlp, GatedMLP | FusedGatedMLP)
    inner = [f"mlp.{one}" for one in mlp.inner] if simple else []
    if isinstance(mixer, Attention):
        spec = mixer.spec
        readers = ["qkv_proj"] if spec.fused else ["q_proj", "k_proj", "v_proj"]
        if _foldable(layer, form.before_mixer) and not form.parallel and not spec.gate:
            yield _of_norm(layer, form.before_mixer, [f"{name}.{one}" for one in readers])
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.value_size)
        begin = spec.q_size + spec.kv_size if spec.fused else 0
        if spec.fused != "groups" and not spec.clip and not spec.sub_norm:
            yield Fold((f"{name}.o_proj.weight",), _parameters(mixer, name, readers[-1]), begin, heads=heads)
    if isinstance(mixer, ShortConv) and _foldable(layer, form.before_mixer):
        yield _of_norm(layer, form.before_mixer, [f"{name}.in_proj"])
    if simple:
        if _foldable(layer, form.before_mlp):
            yield _of_norm(layer, form.before_mlp, inner)
        begin = int(mlp.down_proj.weight.shape[1]) if isinstance(mlp, FusedGatedMLP) else 0
        if getattr(mlp, "sub_norm", None) is None:
            yield Fold(("mlp.down_proj.weight",), _parameters(mlp, "mlp", mlp.inner[-1]), begin)


def _foldable(layer: nn.Module, norm: str) -> bool:
    """Whether there is such a norm, with weights, whose output only matrices read."""
    return bool(norm) and layer.form.of_norms is None and getattr(layer, norm).weight is not None


def _of_norm(layer: nn.Module, norm: str, readers: Sequence[str]) -> Fold:
    of = getattr(layer, norm)
    vectors = [one for one in ("weight", "bias") if getattr(of, one, None) is not None]
    add = float(of.weight.attrs.get("add", 0.0))
    return Fold(tuple(f"{reader}.weight" for reader in readers), tuple(f"{norm}.{one}" for one in vectors), add=add)


def _parameters(block: nn.Module, name: str, linear: str) -> tuple[str, ...]:
    """The weight of a linear layer, and its bias if it has one."""
    bias = getattr(block, linear).bias is not None
    return tuple(f"{name}.{linear}.{part}" for part in ("weight", "bias")[: 1 + bias])


def fold_layer(
    layer: nn.Module,
    named: Callable[[str], str],
    schemes: Mapping[str, Scheme],
    changed: Changed,
    inputs: Mapping[str, Inputs],
) -> dict[str, Inputs]:
    """Fold factors into the tensors of a layer, which the checkpoint has as `named` -> the inputs of its matrices then.

    `schemes` are those of matrices. `inputs` have rows.
    """
    found = dict(inputs)
    for fold in folds_of(layer):
        consumers = [named(name) for name in fold.consumers]
        matrices = [changed.read(name) for name in consumers]
        factors = factors_of(fold, matrices, schemes[consumers[0]], inputs[consumers[0]])
        for name, matrix in zip(consumers, matrices):
            changed.put(name, matrix * factors)
            found[name] = inputs[name].scaled(1 / factors)
        rows = factors if fold.heads is None else factors.reshape(fold.heads)[:, 0].ravel()
        for name in map(named, fold.producers):
            tensor = changed.read(name)
            part = tensor[fold.begin : fold.begin + len(rows)]
            divisor = rows if part.ndim == 1 else rows[:, None]
            add = np.float32(fold.add if name.endswith("weight") else 0.0)
            part[...] = (part + add) / divisor - add
            changed.put(name, tensor)
    return found


def factors_of(fold: Fold, matrices: Sequence[Array], scheme: Scheme, inputs: Inputs) -> Array:
    """The factors float32[K] of least output error; 1 if no others are better."""
    assert inputs.rows is not None
    w = np.concatenate([matrix[:: -(-len(matrix) // (_ROWS // len(matrices)))] for matrix in matrices])
    expected = inputs.rows @ w.T
    best = np.ones(w.shape[1], np.float32)
    least = output_error(best, w, scheme, inputs, expected)
    for size in (np.sqrt(inputs.mean_square), inputs.peak):
        for power in _POWERS:
            least_size = size.max() * np.float32(1e-4) + np.float32(1e-30)
            factors = _shared(fold, np.maximum(size, least_size) ** np.float32(power))
            factors /= np.sqrt(factors.max() * factors.min())
            error = output_error(factors, w, scheme, inputs, expected)
            if error < least:
                best, least = factors, error
    return best


def _shared(fold: Fold, factors: Array) -> Array:
    """The largest of the factors that must be equal."""
    if fold.heads is None:
        return factors
    by_head = factors.reshape(fold.heads)
    shared: Array = np.broadcast_to(by_head.max(axis=1, keepdims=True), by_head.shape).reshape(-1).copy()
    return shared


def output_error(factors: Array, w: Array, scheme: Scheme, inputs: Inputs, expected: Array) -> float:
    """Squared error of the outputs of rounded weights for rounded inputs."""
    folded = inputs.scaled(1 / factors)
    assert folded.rows is not None
    rounded = unpack(scheme, pack(scheme, w * factors, method=SEARCH, inputs=folded), w.shape[1])
    return float(((_int8(folded.rows) @ rounded.T - expected) ** 2).sum())


def _int8(x: Array) -> Array:
    """x[n, K] rounded to int8 with a scale for each `_GROUP` columns of a row."""
    n, k = x.shape
    padded = np.zeros((n, -(-k // _GROUP), _GROUP), np.float32)
    padded.reshape(n, -1)[:, :k] = x
    steps = np.abs(padded).max(axis=2, keepdims=True) / np.float32(127)
    steps[steps == 0] = 1
    rounded: Array = (np.rint(padded / steps) * steps).reshape(n, -1)[:, :k]
    return rounded
