"""`--fold-outliers`: outliers of activations are folded into matrices before weights are rounded, by any method.

What the CPU rounds to int8, and what a group of weights is rounded on, then has fewer numbers that spoil their
neighbours' (SmoothQuant, Xiao et al. 2022). Factors are powers of two, so that folding itself rounds nothing; those of
least output error are searched as AWQ's are, for inputs on a text, or for those that the weights alone let expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend import nn

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.calibration.awq import SAMPLE, fold_layer
from mlcpipe.compiler.calibration.fold import Fold, Folded, folds_of
from mlcpipe.compiler.calibration.layer import TensorNames, model_of
from mlcpipe.compiler.calibration.stream import Stream
from mlcpipe.compiler.calibration.text import CalibrationText, read_calibration, windows_of
from mlcpipe.errors import ConfigError, UsageError
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.defaults import AWQ, FOLD_BY_WEIGHTS, NO_CALIBRATION
from mlcpipe.support.progress import Progress
from mlcpipe.weights.table import Weight, schemes_of

Array = NDArray[Any]

_LEAVE = "leave out --fold-outliers"


@dataclass(frozen=True)
class Folding:
    """How factors are found: on a text, or without one by weights alone."""

    text: CalibrationText | None = None


def folding_of(
    requested: str | Path | None, checkpoint: Checkpoint, *, method: str | None, adapters: bool = False
) -> Folding | None:
    """The folding for `weights`, `own`, the path of a text, or `none` and None, which are none.

    Raises UsageError and ConfigError for what cannot be folded.
    """
    if requested is None or requested == NO_CALIBRATION:
        return None
    if checkpoint.quantized_as is not None:
        raise ConfigError(
            "outliers cannot be folded into weights that are quantized already", where=checkpoint.path,
            expected="float32, float16 or bfloat16", found=checkpoint.quantized_as, next_step=_LEAVE,
        )  # fmt: skip
    if adapters:
        raise ConfigError(
            "adapters are trained for weights as the checkpoint has them", where=checkpoint.path,
            expected="no --fold-outliers with --adapters", next_step="leave one of them out",
        )  # fmt: skip
    if method == AWQ:
        raise UsageError("--method awq folds outliers itself", next_step=f"{_LEAVE}, or take another method")
    return Folding() if requested == FOLD_BY_WEIGHTS else Folding(read_calibration(requested))


def folded_tensors(
    folding: Folding, weights: Sequence[Weight], checkpoint: Checkpoint, tokenizer: Tokenizer | None, progress: Progress
) -> Folded:
    """The checkpoint's tensors with outliers folded in those layers whose matrices are among `weights`.

    Raises ConfigError for a model without foldable layers, UsageError for a text that is too short, CompileError and
    CheckpointError.
    """
    model = model_of(checkpoint, what="--fold-outliers", without=_LEAVE)
    layers = list(model.model.layers)
    if not any(fold for layer in layers for fold in folds_of(layer)):
        raise ConfigError(
            "there is nothing to fold outliers in", where=checkpoint.path, found=model.facts.model_type,
            expected="norms that feed attention or an MLP alone", next_step=_LEAVE,
        )  # fmt: skip
    schemes, folded, names = schemes_of(weights), Folded(checkpoint), TensorNames.of(model, checkpoint)
    observed = _observer(folding.text, model, checkpoint, tokenizer)
    for index, layer in enumerate(layers):
        named = names.of_layer(index)
        if all(named(name) in schemes for fold in folds_of(layer) for name in fold.consumers):
            fold_layer(layer, named, schemes, folded, observed(index), exact=True)
    matrices = len(folded.changed & schemes.keys())
    progress.note(f"outliers are folded: {matrices} of {len(schemes)} matrices change, the model's function does not")
    return folded


def _observer(
    text: CalibrationText | None, model: CausalLM, checkpoint: Checkpoint, tokenizer: Tokenizer | None
) -> Callable[[int], dict[str, Inputs]]:
    """What gives the inputs of a layer's matrices, layer after layer."""
    if text is None:
        names, width = TensorNames.of(model, checkpoint), model.facts.hidden_size
        return lambda index: expected_inputs(model.model.layers[index], names.of_layer(index), checkpoint, width)
    if tokenizer is None:
        raise UsageError("a calibration text needs a tokenizer", where=checkpoint.path, expected="tokenizer.json")
    windows = windows_of(text.text, tokenizer, model.facts.context_length)
    stream = Stream(model, checkpoint, windows, sample=SAMPLE)
    return lambda index: stream.run(index, checkpoint)


def expected_inputs(
    layer: nn.Module, named: Callable[[str], str], checkpoint: Checkpoint, width: int
) -> dict[str, Inputs]:
    """The inputs of matrices where the normalized residual stream, `width` numbers, is a standard normal one.

    Attention is taken for the value of one token, and the MLP's activation for SiLU: factors need the sizes of channels
    beside one another alone.
    """
    normal = np.random.default_rng(0).standard_normal((SAMPLE, width), np.float32)
    found: dict[str, Inputs] = {}
    for fold in folds_of(layer):
        rows = _normalized(normal, layer, fold.norm, named, checkpoint)
        if not fold.of_norm:
            rows = _made(rows, fold, named, checkpoint)
        inputs = Inputs((rows * rows).mean(axis=0), np.abs(rows).max(axis=0), rows=rows)
        found |= {named(name): inputs for name in fold.consumers}
    return found


def _normalized(x: Array, layer: nn.Module, norm: str, named: Callable[[str], str], checkpoint: Checkpoint) -> Array:
    """What a norm makes of normalized rows; the rows themselves without one."""
    of = getattr(layer, norm) if norm else None
    if of is None or of.weight is None:
        return x
    y: Array = x * (checkpoint.read(named(f"{norm}.weight")) + np.float32(of.weight.attrs.get("add", 0.0)))
    return y + checkpoint.read(named(f"{norm}.bias")) if isinstance(of, LayerNorm) and of.bias is not None else y


def _made(x: Array, fold: Fold, named: Callable[[str], str], checkpoint: Checkpoint) -> Array:
    """What the producers of a matrix's input make of the rows x, in the order of its columns."""
    matrix, *bias = (checkpoint.read(named(name))[fold.begin :] for name in fold.producers)
    y: Array = x @ matrix.T
    for vector in bias:
        y += vector
    if fold.gate:
        gate = x @ checkpoint.read(named(fold.gate))[: y.shape[1]].T
        y *= gate / (1 + np.exp(-np.clip(gate, -60, 60)))
    if fold.heads is None:
        return y
    kv_heads, group, size = fold.heads
    return np.repeat(y.reshape(len(y), kv_heads, 1, size), group, axis=2).reshape(len(y), -1)
