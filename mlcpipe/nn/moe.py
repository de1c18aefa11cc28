"""Mixture of experts (Shazeer et al. 2017; Fedus et al. 2021): a router selects MLPs for each token."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.script import tirx as T

from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.linear import ExpertLinear, Linear
from mlcpipe.nn.mlp import activation, gated
from tir_schedules.op import tag


@dataclass(frozen=True)
class ExpertNames:
    """The checkpoint's names of an expert's three matrices."""

    gate: str
    up: str
    down: str


def expert_counts(config: Fields, experts: int, chosen: int, *, low: int = 1) -> tuple[int, int]:
    """(experts, experts per token) with the family's defaults.

    Files use `num_experts` or `num_local_experts` (transformers 5 saves the latter for both families).
    Raises ConfigError if they disagree, or if more experts are chosen than exist.
    """
    names = [name for name in ("num_local_experts", "num_experts") if config.get(name) is not None]
    counts = [config.integer(name, low=low, high=4096) for name in names] or [experts]
    if counts[0] != counts[-1]:
        raise ConfigError("fields " + " and ".join(names), where=config.where, expected="one number", found=counts)
    return counts[0], config.integer("num_experts_per_tok", chosen, high=max(counts[0], 1))


class SparseMoE(nn.Module):
    """Sum of weight_e * down_e(act(gate_e(x)) * up_e(x)) over the chosen experts e: x [m, hidden] -> [m, hidden].

    Weights are the softmax over all experts in float32; with `normalize` those of the chosen experts sum to 1.
    An expert's gate and up are one matrix, so a token's row is read once.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        experts: int,
        chosen: int,
        *,
        normalize: bool,
        act: str,
        names: ExpertNames,
    ) -> None:
        self.act, self.experts, self.chosen, self.normalize = activation(act), experts, chosen, normalize
        self.gate = Linear(hidden_size, experts, quantize=False)
        gate_up = [[f"experts.{e}.{name}" for name in (names.gate, names.up)] for e in range(experts)]
        self.experts_gate_up = ExpertLinear(experts, hidden_size, 2 * width, gate_up)
        down = [[f"experts.{e}.{names.down}"] for e in range(experts)]
        self.experts_down = ExpertLinear(experts, width, hidden_size, down)
        for layer in (self.experts_gate_up, self.experts_down):
            layer.weight.attrs["reads"] = Fraction(chosen, experts)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        weights, ids = route(self.gate(x), self.chosen, self.normalize)
        inner = gated(self.act, self.experts_gate_up(x, ids, shared=True))
        outer = self.experts_down(inner, ids, shared=False)
        return op.tensor_expr_op(combine, "moe_combine", [weights, outer])


def route(logits: Tensor, chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """logits [m, experts] -> weights f32[m, chosen] and ids i32[m, chosen], as `moe_route`."""
    logits = logits if logits.dtype == "float32" else op.astype(logits, "float32")
    shape = (logits.shape[0], chosen)
    out = [Tensor.placeholder(shape, "float32"), Tensor.placeholder(shape, "int32")]
    func = moe_route(int(logits.shape[1]), chosen, normalize)
    weights, ids = op.tensor_ir_op(func, "moe_route", [logits], out)
    return weights, ids


def combine(weights: te.Tensor, outer: te.Tensor, *biased: te.Tensor) -> te.Tensor:
    """weights f32[m, chosen], outer [m * chosen, hidden] -> [m, hidden], summed in float32.

    `biased`: none, or a bias [experts * hidden] that is added to rows of `outer`, and their experts i32[m, chosen].
    """
    chosen, hidden = int(weights.shape[1]), outer.shape[1]

    def row(i: tirx.Var, t: int, j: tirx.Var) -> tirx.PrimExpr:
        value = outer[i * chosen + t, j].astype("float32")
        if not biased:
            return value
        bias, ids = biased
        return value + bias[ids[i, t].astype("int64") * hidden + j].astype("float32")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        # Unrolled: the residual addition fuses only with an elementwise function.
        total = weights[i, 0] * row(i, 0, j)
        for t in range(1, chosen):
            total = total + weights[i, t] * row(i, t, j)
        return total.astype(outer.dtype)

    return te.compute((weights.shape[0], outer.shape[1]), element, name="moe_combine")


@cache  # TVM reads the source of the function and of all its callers, for tens of milliseconds
def moe_route(experts: int, chosen: int, normalize: bool) -> tirx.PrimFunc:
    """logits f32[m, experts] -> weights f32[m, chosen], ids i32[m, chosen]: best first, ties by lower id.

    Rank t is the best logit below rank t - 1 in the order (logit, -id), which needs no sort and no scratch.
    One thread: m * experts * chosen comparisons are negligible next to the experts' products.
    """

    @T.prim_func(private=True, s_tir=True)
    def route(logits_handle: T.handle, weights_handle: T.handle, ids_handle: T.handle) -> None:
        m = T.int64()
        logits = T.match_buffer(logits_handle, (m, experts), "float32")
        weights = T.match_buffer(weights_handle, (m, chosen), "float32")
        ids = T.match_buffer(ids_handle, (m, chosen), "int32")
        for token in range(m):
            with T.sblock("route"):
                i = T.axis.spatial(m, token)
                # [0] is the previous rank, [1] the best so far.
                expert = T.sblock_alloc_buffer((2,), "int32", scope="local")
                logit = T.sblock_alloc_buffer((2,), "float32", scope="local")
                total = T.sblock_alloc_buffer((1,), "float32", scope="local")
                expert[0] = -1
                logit[0] = T.infinity("float32")
                for t in range(chosen):
                    expert[1] = -1
                    for e in range(experts):
                        if (logits[i, e] < logit[0] or (logits[i, e] == logit[0] and e > expert[0])) and (
                            expert[1] < 0 or logits[i, e] > logit[1]
                        ):
                            expert[1] = e
                            logit[1] = logits[i, e]
                    # NaN logits have no order: use any valid expert. The weights become NaN, as in softmax.
                    ids[i, t] = T.max(expert[1], 0)
                    weights[i, t] = logits[i, ids[i, t]]
                    expert[0] = expert[1]
                    logit[0] = logit[1]
                logit[0] = weights[i, 0]
                total[0] = T.float32(0)
                if normalize:
                    for t in range(chosen):
                        total[0] = total[0] + T.exp(weights[i, t] - logit[0])
                else:
                    for e in range(experts):
                        total[0] = total[0] + T.exp(logits[i, e] - logit[0])
                for e in range(experts):
                    if T.bitwise_and(T.reinterpret("int32", logits[i, e]), 0x7FFFFFFF) > 0x7F800000:
                        total[0] = logits[i, e]
                for t in range(chosen):
                    weights[i, t] = T.exp(weights[i, t] - logit[0]) / total[0]

    facts = {"experts": experts, "chosen": chosen, "normalize": int(normalize)}
    return tag(route, "moe_route", **facts)
