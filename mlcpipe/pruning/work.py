"""The state shared by pruning methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.calibration.changed import Changed
from mlcpipe.compiler.calibration.stream import Stream
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.support.progress import Progress

Array = NDArray[Any]


@dataclass(frozen=True)
class PrunedTensor:
    """A tensor of the pruned checkpoint: tensor `source` of the original, or its new float32 `values`."""

    name: str
    source: str
    values: Array | None = None


@dataclass(frozen=True)
class Work:
    """`keep`: how many units of the method remain; 0 for a pattern. `config` is that of the result."""

    model: CausalLM
    checkpoint: Checkpoint
    stream: Stream
    keep: int
    config: dict[str, Any]
    progress: Progress

    def layers(self) -> Iterator[int]:
        """The number of each layer in order, reported as progress."""
        self.progress.stage("prune layer by layer")
        self.progress.steps_total(self.model.facts.num_layers)
        for index in range(self.model.facts.num_layers):
            yield index
            self.progress.advance(1)

    def prefix(self, index: int) -> str:
        """The prefix of the names of a layer's tensors."""
        return f"{self.stream.prefix}layers.{index}."

    def changed_layers(
        self, change: Callable[[str, Changed, Mapping[str, Inputs]], Mapping[str, Any]]
    ) -> Iterator[PrunedTensor]:
        """The tensors of all layers, after `change` of each layer in order, and those outside the layers.

        `change` takes the prefix of names, the tensors, which it changes in place without changing shapes, and the
        matrices' inputs after changes of earlier layers. It returns, as an index of the array, the rows or columns of
        a tensor that remain; the layer computes the same without the others.
        """
        for index in self.layers():
            inputs = self.stream.run(index, self.checkpoint, advance=False)
            changed = Changed(self.checkpoint)
            cuts = change(self.prefix(index), changed, inputs)
            self.stream.run(index, changed, observe=False)
            for name in self.names(index):
                rest = cuts.get(name)
                if rest is not None or name in inputs:
                    yield PrunedTensor(name, name, changed.read(name)[() if rest is None else rest])
                else:
                    yield PrunedTensor(name, name)
        yield from self.others()

    def names(self, index: int) -> list[str]:
        """The tensors of a layer in the checkpoint, including those that no model reads."""
        return [name for name in self.checkpoint.tensors if name.startswith(self.prefix(index))]

    def others(self) -> Iterator[PrunedTensor]:
        """The tensors outside the layers."""
        layers = f"{self.stream.prefix}layers."
        return (PrunedTensor(name, name) for name in self.checkpoint.tensors if not name.startswith(layers))


def smallest(scores: Array, count: int) -> NDArray[np.bool_]:
    """A mask of the `count` smallest of the last axis; among equals the first."""
    found = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(found, np.argsort(scores, axis=-1, kind="stable")[..., :count], True, axis=-1)
    return found
