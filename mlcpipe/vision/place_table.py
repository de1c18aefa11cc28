"""Tables of learned vectors of places, from which those of a picture with other numbers of patches are made."""

from __future__ import annotations

from collections.abc import Callable

from tvm import te
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.linear import Float32

# (the table's side, the table f32[side * side, hidden], places i32[m, 4]) -> f32[m, hidden]
Resizing = Callable[[int, te.Tensor, te.Tensor], te.Tensor]


class PlaceTable(nn.Module):
    """Vectors of side * side places, and by `resizing` those between them."""

    def __init__(self, side: int, hidden_size: int, resizing: Resizing) -> None:
        self.side, self.resizing = side, resizing
        self.weight = Float32((side * side, hidden_size))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x [m, hidden] plus the vectors of places i32[m, 4] (row, column, numbers of them)."""
        arguments = [self.weight, places]
        vectors = op.tensor_expr_op(lambda *of: self.resizing(self.side, *of), self.resizing.__name__, arguments)
        return op.add(x, vectors if x.dtype == "float32" else op.astype(vectors, x.dtype))
