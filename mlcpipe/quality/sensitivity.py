"""The loss of rounding one matrix of a model: measured on the model itself, or guessed without a text.

The model's unquantized bundle runs over the last tokens of a text with one weight rounded to 4 bits, and its logits are
compared with the original's. Matrices that multiply the same input are one weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.export import OUTPUT_NAMES
from mlcpipe.compiler.job import lower
from mlcpipe.errors import UsageError
from mlcpipe.quality.measure import WINDOW, read_text
from mlcpipe.quality.reference import prepare_reference
from mlcpipe.quality.statistics import score
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.runtime.engine import Engine
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.support.defaults import LOCAL_TARGET, SEARCH, UNIFORM_QUANTIZATION
from mlcpipe.support.progress import Progress
from mlcpipe.targets import load_target
from mlcpipe.weights.table import Weight, read_matrices

TOKENS = 1024  # of the text: the second half of each window is scored
_CHARACTERS = 16  # of the text per wanted token
# Without a text: the loss per number of the logits matrix, relative to other matrices; from the ruler, where that
# matrix has 16 % of the numbers and 85 % of the loss.
_OUTPUT_LOSS = 30


@dataclass(frozen=True)
class Sensitivity:
    """The KL divergence of each matrix, joined with those of the same input, in 4 bits; `how` names the method."""

    losses: tuple[tuple[Weight, float], ...]
    how: str


def guess(checkpoint: Checkpoint) -> Sensitivity:
    """A unitless loss per number: the same for all matrices, larger for the logits matrix."""
    weights = _weights(checkpoint)
    names = {weight.name for weight in weights}
    output = next((name for name in OUTPUT_NAMES if name in names), None)
    losses = ((w, math.prod(w.shape) * (_OUTPUT_LOSS if w.name == output else 1.0)) for w in weights if _rounds(w))
    how = "guessed: no text was given, so all matrices count alike, but that of the logits more"
    return Sensitivity(tuple(losses), how)


def measure_sensitivity(checkpoint: Checkpoint, text: Path, progress: Progress) -> Sensitivity:
    """Raises UsageError for a text that is too short, and what `mlcpipe.load` raises for the reference."""
    reference = prepare_reference(checkpoint.path, 0, progress)
    engine = Engine(reference, context_length=WINDOW)
    weights = _weights(checkpoint, engine.manifest.quantization)
    windows = _windows(engine, read_text(text))
    expected = [_logits(engine.model, window) for window in windows]
    progress.stage("round one matrix at a time")
    progress.steps_total(sum(map(_rounds, weights)))
    losses = []
    for i, weight in enumerate(weights):
        if _rounds(weight):
            model = _with_weight(engine.model, i, _rounded(weight, checkpoint))
            losses.append((weight, _divergence(model, windows, expected)))
            progress.advance(1)
    positions = sum(len(logits) for logits in expected)
    return Sensitivity(tuple(losses), f"measured on {positions} positions of {text.name}")


def _weights(checkpoint: Checkpoint, quantization: str = "q0f32") -> tuple[Weight, ...]:
    """The weights of the checkpoint's unquantized bundle for this machine, in its order; each has one array."""
    return lower(checkpoint, load_target(LOCAL_TARGET), quantization).state.weights


def _rounds(weight: Weight) -> bool:
    """Whether quantizations round a weight."""
    return weight.kind == "scheme"


def _windows(engine: Engine, text: str) -> list[list[int]]:
    """The last tokens of a text in windows of equal length."""
    tokens = engine.tokenizer.encode(text[-_CHARACTERS * TOKENS :], add_special_tokens=False)[-TOKENS:]
    size = min(WINDOW, engine.manifest.model.context_length, len(tokens))
    if size < 16:
        raise UsageError("the text is too short", expected="at least 16 tokens", found=len(tokens))
    return [tokens[begin : begin + size] for begin in range(0, len(tokens) - size + 1, size)]


def _logits(model: LoadedModel, window: list[int]) -> NDArray[np.float32]:
    """The logits of the second half of a window, f32[m, V]."""
    return np.concatenate([part.copy() for part in model.logit_parts(window[:-1], len(window) // 2)])


def _divergence(model: LoadedModel, windows: Sequence[list[int]], expected: Sequence[NDArray[np.float32]]) -> float:
    """The mean KL divergence from the expected logits."""
    found = [
        score(_logits(model, window), logits, np.array(window[-len(logits) :])).kld
        for window, logits in zip(windows, expected)
    ]
    return float(np.concatenate(found).mean())


def _rounded(weight: Weight, checkpoint: Checkpoint) -> NDArray[Any]:
    """A matrix, or those of all experts, rounded by the default quantization, in the reference's layout."""
    assert weight.scheme is not None and weight.layout is not None
    scheme, numbers = load_scheme(UNIFORM_QUANTIZATION), []
    for matrix in read_matrices(weight, checkpoint):
        packed = pack(scheme, matrix, name=weight.name, method=SEARCH)
        numbers.append(unpack(scheme, packed, matrix.shape[1]))
    whole = np.stack(numbers).reshape(weight.shape)
    (array,) = weight.layout.repack(weight.scheme, pack(weight.scheme, whole), *weight.shape[-2:]).values()
    return array


def _with_weight(model: LoadedModel, index: int, array: NDArray[Any]) -> LoadedModel:
    """The model with one weight's array replaced."""
    params = list(model.bundle.params)
    params[index] = tvm.runtime.tensor(array)
    return LoadedModel(replace(model.bundle, params=tvm_ffi.convert(params)))
