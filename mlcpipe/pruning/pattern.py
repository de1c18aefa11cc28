"""The 2:4 pattern: of each 4 neighbours in a row of a matrix in the layers, 2 are 0. Embeddings and output stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlcpipe.compiler.calibration.changed import Changed
from mlcpipe.errors import ConfigError
from mlcpipe.pruning.work import Array, PrunedTensor, Work
from mlcpipe.quantization.inputs import Inputs

GROUP, PRUNED = 4, 2


def prune_matrices(work: Work, prune_matrix: Callable[[Array, Inputs], Array]) -> Iterator[PrunedTensor]:
    """Prune each matrix float32[N, K] of the layers separately. Raises ConfigError if a K is not a multiple of 4."""

    def change(prefix: str, changed: Changed, inputs: Mapping[str, Inputs]) -> dict[str, Any]:
        for name, known in inputs.items():
            w = changed.read(name)
            if w.shape[1] % GROUP:
                raise ConfigError(
                    f"2:4 needs columns in fours, tensor {name}", expected="a multiple of 4", found=w.shape
                )
            changed.put(name, prune_matrix(w, known))
        return {}

    return work.changed_layers(change)
