"""Quantizes the weights of a checkpoint by their inputs on a calibration text, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.calibration.awq import SAMPLE, fold_layer
from mlcpipe.compiler.calibration.changed import Changed
from mlcpipe.compiler.calibration.layer import model_of
from mlcpipe.compiler.calibration.stream import Stream
from mlcpipe.compiler.calibration.text import CalibrationText, windows_of
from mlcpipe.errors import UsageError
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.defaults import AWQ, GPTQ
from mlcpipe.weights.table import Weight, load

Array = NDArray[Any]


def calibrated(
    weights: Sequence[Weight], checkpoint: Checkpoint, tokenizer: Tokenizer | None, text: CalibrationText, method: str
) -> Iterator[tuple[str, Array, int]]:
    """Yields what `load` does for each weight, quantized by its inputs on the text.

    Weights outside the layers come last. Raises UsageError for a text that is too short, ConfigError for
    an embedding model, CompileError, and what `load` raises.
    """
    if tokenizer is None:
        raise UsageError("a calibration text needs a tokenizer", where=checkpoint.path, expected="tokenizer.json")
    model = model_of(checkpoint)
    windows = windows_of(text.text, tokenizer, model.facts.context_length)
    again = method == GPTQ  # later columns of gptq compensate for errors, those of earlier layers too
    stream = Stream(model, checkpoint, windows, gram=again, sample=SAMPLE if method == AWQ else 0)
    several = _by_layer(weights, stream)
    for index in range(model.facts.num_layers):
        inputs = stream.run(index, checkpoint, advance=not again)
        changed = Changed(checkpoint)
        if method == AWQ:
            layer, schemes = model.model.layers[index], _schemes(several[index])
            inputs = fold_layer(layer, stream.names_of(index), schemes, changed, inputs)
        for weight in several[index]:
            arrays = list(load(weight, changed, method, inputs))
            yield from arrays
            if again:
                changed.round(weight, {name: array for name, array, _ in arrays})
        if again:
            stream.run(index, changed, observe=False)
    stream.run(stream.norm, checkpoint)
    inputs = {stream.output: stream.inputs_of_output()}
    for weight in several[stream.norm]:
        yield from load(weight, checkpoint, method, inputs)


def _schemes(weights: Sequence[Weight]) -> dict[str, Scheme]:
    """The storage scheme of each matrix's tensors."""
    several = ((source, one.scheme) for one in weights for group in one.sources for source in group)
    return {source: scheme for source, scheme in several if scheme is not None}


def _by_layer(weights: Sequence[Weight], stream: Stream) -> dict[int, list[Weight]]:
    """The weights of each layer; those outside the layers come with the last norm."""
    found = defaultdict(list)
    for weight in weights:
        found[stream.layer_of.get(weight.sources[0][0], stream.norm)].append(weight)
    return found
