"""Quantizes the weights of a checkpoint by their inputs on a calibration text, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.calibration.awq import SAMPLE, fold_layer
from mlcpipe.compiler.calibration.changed import Changed
from mlcpipe.compiler.calibration.fold import Folded
from mlcpipe.compiler.calibration.layer import model_of
from mlcpipe.compiler.calibration.stream import Stream
from mlcpipe.compiler.calibration.text import CalibrationText, windows_of
from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.defaults import AWQ, GPTQ
from mlcpipe.weights.table import Tensors, Weight, load, schemes_of

Array = NDArray[Any]


def calibrated(
    weights: Sequence[Weight], checkpoint: Checkpoint, tokenizer: Tokenizer | None, text: CalibrationText, method: str,
    tensors: Tensors | None = None,
) -> Iterator[tuple[str, Array, int]]:  # fmt: skip
    """Yields what `load` does for each weight, quantized by its inputs on the text.

    `tensors` are the checkpoint's if some were changed. Weights outside the layers come last. Raises UsageError for a
    text that is too short, ConfigError for an embedding model, CompileError, and what `load` raises.
    """
    if tokenizer is None:
        raise UsageError("a calibration text needs a tokenizer", where=checkpoint.path, expected="tokenizer.json")
    model = model_of(checkpoint)
    windows = windows_of(text.text, tokenizer, model.facts.context_length)
    again = method == GPTQ  # later columns of gptq compensate for errors, those of earlier layers too
    source = tensors or checkpoint
    stream = Stream(model, source, windows, gram=again, sample=SAMPLE if method == AWQ else 0)
    several = _by_layer(weights, stream)
    for index in range(model.facts.num_layers):
        inputs = stream.run(index, source, advance=not again)
        changed = Changed(source)
        given: Tensors = changed
        if method == AWQ:
            given, schemes = Folded(checkpoint), schemes_of(several[index])
            inputs = fold_layer(model.model.layers[index], stream.names.of_layer(index), schemes, given, inputs)
        for weight in several[index]:
            arrays = list(load(weight, given, method, inputs))
            yield from arrays
            if again:
                changed.round(weight, {name: array for name, array, _ in arrays})
        if again:
            stream.run(index, changed, observe=False)
    stream.run(stream.norm, source)
    inputs = {stream.output: stream.inputs_of_output()}
    for weight in several[stream.norm]:
        yield from load(weight, source, method, inputs)


def _by_layer(weights: Sequence[Weight], stream: Stream) -> dict[int, list[Weight]]:
    """The weights of each layer; those outside the layers come with the last norm."""
    found = defaultdict(list)
    for weight in weights:
        found[stream.layer_of.get(weight.sources[0][0], stream.norm)].append(weight)
    return found
