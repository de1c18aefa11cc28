"""Alternating updates (Baykal et al. 2023): a layer computes one of several streams and corrects the others by it.

Streams lie side by side, [m, count * hidden].
"""

from __future__ import annotations

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.linear import Linear
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rows import columns, scaled

_LEAST = 1e-5  # of mean squares that divide


class Streams(nn.Module):
    """The streams of embeddings, and the mean of those after all layers; all have the size of the first one."""

    def __init__(self, count: int, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.projections = nn.ModuleList([Linear(hidden_size, hidden_size) for _ in range(count - 1)])
        self.unembed_projections = nn.ModuleList([Linear(hidden_size, hidden_size) for _ in range(count - 1)])

    def begin(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, count * hidden]."""
        return op.concat([x, *(_as_large(projection(x), x) for projection in self.projections)], dim=1)

    def end(self, streams: Tensor) -> Tensor:
        """[m, count * hidden] -> [m, hidden]."""
        h = self.hidden_size
        first = total = columns(streams, 0, h, streams.dtype)
        for index, projection in enumerate(self.unembed_projections):
            other = columns(streams, (index + 1) * h, h, streams.dtype)
            total = op.add(total, _as_large(projection(other), first))
        return scaled(total, 1 / (1 + len(self.unembed_projections)))


class AltUp(nn.Module):
    """What a layer predicts and corrects, by learned mixtures of the streams that depend on the active one."""

    def __init__(self, count: int, active: int, hidden_size: int, norm: NormSpec, scale_output: bool) -> None:
        self.count, self.active, self.hidden_size, self.scale_output = count, active, hidden_size, scale_output
        self.correct_output_scale = nn.Parameter((hidden_size,))
        self.correction_coefs = Linear(count, count, quantize=False)
        self.prediction_coefs = Linear(count, count**2, quantize=False)
        self.modality_router = Linear(hidden_size, count, quantize=False)
        self.router_norm = norm(hidden_size)

    def of_active(self, streams: Tensor) -> Tensor:
        """[m, count * hidden] -> the active stream [m, hidden]."""
        return columns(streams, self.active * self.hidden_size, self.hidden_size, streams.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """[m, count * hidden] -> each stream plus a mixture of all."""
        mixture = self.prediction_coefs(self._modalities(self.of_active(streams)))
        return op.tensor_expr_op(self._mixed, "altup_predict", [streams, mixture])

    def correct(self, predicted: Tensor, activated: Tensor) -> Tensor:
        """predicted [m, count * hidden], the active stream after the layer [m, hidden] -> all streams."""
        shares = self.correction_coefs(self._modalities(activated))
        return op.tensor_expr_op(self._corrected, "altup_correct", [predicted, activated, shares])

    def output(self, corrected: Tensor) -> Tensor:
        """corrected [m, count * hidden] -> the active stream [m, hidden] for what follows."""
        active = self.of_active(corrected)
        if not self.scale_output:
            return active
        scale = self.correct_output_scale
        return op.multiply(active, scale if scale.dtype == active.dtype else op.astype(scale, active.dtype))

    def add_to_others(self, streams: Tensor, update: Tensor) -> Tensor:
        """streams [m, count * hidden], of which all but the first get `update` [m, hidden]."""
        h = self.hidden_size

        def element(s: te.Tensor, u: te.Tensor) -> te.Tensor:
            return te.compute(
                s.shape,
                lambda i, j: s[i, j] + tirx.if_then_else(j >= h, u[i, j % h], tirx.const(0, s.dtype)),
                name="added",
            )

        return op.tensor_expr_op(element, "altup_add", [streams, update])

    def _modalities(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, count]."""
        return op.tanh(self.modality_router(scaled(self.router_norm(x), 1 / self.hidden_size)))

    def _mixed(self, s: te.Tensor, mixture: te.Tensor) -> te.Tensor:
        h, n = self.hidden_size, self.count

        def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
            value = s[i, j]
            for k in range(n):
                value = value + mixture[i, j // h * n + k] * s[i, k * h + j % h]
            return value

        return te.compute(s.shape, element, name="predicted")

    def _corrected(self, s: te.Tensor, activated: te.Tensor, shares: te.Tensor) -> te.Tensor:
        h, first, one = self.hidden_size, self.active * self.hidden_size, tirx.const(1, s.dtype)

        def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
            innovation = activated[i, j % h] - s[i, first + j % h]
            return s[i, j] + (shares[i, j // h] + one) * innovation

        return te.compute(s.shape, element, name="corrected")


def _as_large(x: Tensor, of: Tensor) -> Tensor:
    """x [m, n] times the root mean square of `of` over its own."""
    ratio = op.divide(_mean_square(of), op.maximum(_mean_square(x), Tensor.from_scalar(_LEAST, x.dtype)))
    return op.multiply(x, op.sqrt(ratio))


def _mean_square(x: Tensor) -> Tensor:
    return scaled(op.sum(op.multiply(x, x), axis=-1, keepdims=True), 1 / int(x.shape[-1]))
