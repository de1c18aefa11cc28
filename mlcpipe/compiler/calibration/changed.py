"""A checkpoint with some tensors changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.weights.table import Tensors, Weight, restored

Array = NDArray[Any]


class Changed:
    """The tensors of a checkpoint, including changes."""

    def __init__(self, checkpoint: Tensors) -> None:
        self._checkpoint, self.tensors = checkpoint, checkpoint.tensors
        self._changed: dict[str, Array] = {}

    def put(self, name: str, tensor: Array) -> None:
        """Change a tensor to another float32 array of its shape."""
        self._changed[name] = tensor

    def round(self, weight: Weight, arrays: Mapping[str, Array]) -> None:
        """Set the source tensors of a matrix to the values of its stored arrays."""
        if weight.kind != "scheme":
            return
        whole = restored(weight, arrays)
        for group, matrix in zip(weight.sources, whole[None] if weight.experts is None else whole):
            begin = 0 if weight.rows is None else weight.rows[0]
            rows = np.arange(begin, begin + len(matrix), dtype=np.int32)
            if weight.order:
                rows = np.frombuffer(weight.order, np.int32)[rows]
            first = 0
            for source in group:
                shape = self.tensors[source].shape
                own = (rows >= first) & (rows < first + shape[0])
                if own.any():
                    changed = self._changed.setdefault(source, np.empty(shape, np.float32))
                    changed[rows[own] - first] = matrix[own]
                first += shape[0]

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor, changed or not."""
        return self._changed[name] if name in self._changed else self._checkpoint.read(name)

    def read_parts(self, name: str) -> Parts:
        """The checkpoint's tensor infos."""
        return self._checkpoint.read_parts(name)
