"""A text's hidden states, carried through a model layer by layer: the weights of one are in memory at a time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from mlcpipe.bundle.states import slot_bytes
from mlcpipe.compiler.calibration.layer import LayerFunction, TensorNames, compile_layers
from mlcpipe.errors import CheckpointError, CompileError
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.runtime.serving.batch import Span, StepBuffer
from mlcpipe.runtime.serving.sequence import ScheduledRequest
from mlcpipe.runtime.serving.sequence import Sequence as Tokens
from mlcpipe.weights.table import Tensors
from tir_schedules.step_layout import PAGE

Array = NDArray[Any]

_GRAM_ROWS = 2048  # per x^T x: with 512 it waits for the memory of the result


class Stream:
    """Windows of tokens, all of one length, passing through a model.

    `prefix` begins the names of its tensors, `norm` is the number of the norm after all layers, `output` the
    checkpoint's tensor of the matrix after that. `gram`: `Inputs` contain it. `sample`: about how many rows they
    contain. Raises CompileError, CheckpointError.
    """

    def __init__(
        self,
        model: CausalLM,
        checkpoint: Tensors,
        windows: Sequence[Sequence[int]],
        *,
        gram: bool = False,
        sample: int = 0,
    ) -> None:
        self._gram, rows = gram, len(windows[0])
        self._step_of_sample = max(1, rows * len(windows) // sample) if sample else 0
        self._layers = compile_layers(model, checkpoint, rows)
        self.norm = model.facts.num_layers
        self.names = TensorNames.of(model, checkpoint)
        self.output, self.prefix = self.names.table, self.names.prefix
        table = checkpoint.read(self.output)
        if not model.facts.tied:
            self.output = model.names.published("lm_head.weight")
        self.hidden = [table[np.array(ids)] * np.float32(model.facts.embedding_scale) for ids in windows]
        if model.model.embed_positions is not None:
            at, vectors = model.model.first, checkpoint.read(self.prefix + self.names.named("embed_positions.weight"))
            self.hidden = [x + vectors[at : at + rows] for x in self.hidden]
        if model.model.embedding_norm is not None:
            self.hidden = [self._normalized(x, model, checkpoint) for x in self.hidden]
        pages = -(-rows // PAGE)
        sequence = Tokens(0, ScheduledRequest(tuple(windows[0]), 1), [array("i", range(pages))], [0])
        sequence.next_slot = 0 if slot_bytes(model.states()) else -1
        self._step = tvm.runtime.tensor(StepBuffer().fill([Span(sequence, 0, rows)]))

    def _normalized(self, x: Array, model: CausalLM, checkpoint: Tensors) -> Array:
        norm = model.model.embedding_norm
        x = x - x.mean(axis=1, keepdims=True) if isinstance(norm, LayerNorm) else x
        y: Array = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + np.float32(norm.eps))
        for part, apply in (("weight", np.multiply), ("bias", np.add)):
            vector = getattr(norm, part, None)
            if vector is not None and "add" in vector.attrs:
                raise CompileError(f"no calibration of {model.facts.model_type}", found="a norm after the embedding")
            if vector is not None:
                y = apply(y, checkpoint.read(self.prefix + self.names.named(f"embedding_norm.{part}")))
        return y

    def run(self, index: int, tensors: Tensors, *, observe: bool = True, advance: bool = True) -> dict[str, Inputs]:
        """Run a layer, or the norm after the last one, with weights from `tensors`.

        With `observe` returns the inputs of its matrices by the checkpoint's tensor names. With `advance` its result
        replaces the hidden states. Raises CheckpointError for numbers that are not finite.
        """
        layer = self._layers[index]
        params = layer.params(tensors)
        sums: dict[tuple[str, ...], _Sums] = {}
        for i, hidden in enumerate(self.hidden):
            result = layer.function(tvm.runtime.tensor(hidden), self._step, layer.states, params)
            found, *inputs = (np.from_dlpack(one) for one in result)
            if not np.isfinite(found).all():
                raise CheckpointError(f"layer {index} of the model computes numbers that are not finite")
            if observe:
                self._observe(layer, inputs, sums)
            if advance:
                self.hidden[i] = found
        known = {names: one.inputs() for names, one in sums.items()}
        return {name: inputs for names, inputs in known.items() for name in names}

    def _observe(self, layer: LayerFunction, inputs: list[Array], sums: dict[tuple[str, ...], _Sums]) -> None:
        results = iter(inputs)
        for observed in layer.observed:
            x = next(results)
            chosen = next(results) if observed.experts else None
            for expert, names in enumerate(layer.sources(observed)):
                rows = x if chosen is None else x[rows_of_expert(expert, chosen, len(x))]
                sums.setdefault(names, _Sums(x.shape[1], self._gram, self._step_of_sample)).add(rows)

    @property
    def layer_of(self) -> dict[str, int]:
        """The layer number of each tensor of a layer."""
        return {
            source: index
            for index, layer in enumerate(self._layers)
            for weight in layer.weights
            for group in weight.sources
            for source in group
        }

    def inputs_of_output(self) -> Inputs:
        """The inputs of the output matrix, after the norm."""
        sums = _Sums(self.hidden[0].shape[1], self._gram)
        for hidden in self.hidden:
            sums.add(hidden)
        return sums.inputs()


def rows_of_expert(expert: int, chosen: Array, rows: int) -> Array:
    """Which rows an expert multiplies: of [m, K], or of [m * top, K], where i32[m, top] are the chosen experts."""
    mine = chosen == expert
    found: Array = mine.any(axis=1) if rows == len(chosen) else mine.ravel()
    return found


class _Sums:
    """Sums over rows that become `Inputs`."""

    def __init__(self, k: int, gram: bool, step_of_sample: int = 0) -> None:
        self._sample: list[Array] = []
        self._step_of_sample = step_of_sample
        self._rows, self._square, self._peak = 0, np.zeros(k, np.float64), np.zeros(k, np.float32)
        self._gram = np.zeros((k, k), np.float32) if gram else None
        self._waiting: list[Array] = []  # rows that the gram has not

    def add(self, x: Array) -> None:
        if not len(x):
            return
        self._rows += len(x)
        if self._step_of_sample:
            self._sample.append(x[:: self._step_of_sample].copy())
        self._square += np.einsum("nk,nk->k", x, x)
        np.maximum(self._peak, np.abs(x).max(axis=0), out=self._peak)
        if self._gram is not None:
            self._waiting.append(x)
            if sum(map(len, self._waiting)) >= _GRAM_ROWS:
                self._add_to_gram(self._gram)

    def _add_to_gram(self, gram: Array) -> None:
        if self._waiting:
            x = np.concatenate(self._waiting)
            self._waiting.clear()
            gram += x.T @ x

    def inputs(self) -> Inputs:
        """The final statistics; no rows can be added afterwards."""
        rows = max(1, self._rows)
        if self._gram is not None:
            self._add_to_gram(self._gram)
            self._gram /= np.float32(rows)
        sample = np.concatenate(self._sample) if self._sample else None
        return Inputs((self._square / rows).astype(np.float32), self._peak, self._gram, sample)
