"""Mixture of experts (Shazeer et al. 2017; Fedus et al. 2021): a router selects MLPs for each token."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.script import tirx as T

from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.linear import ExpertLinear, Float32, Linear
from mlcpipe.nn.mlp import GatedMLP, PlainMLP, activation, gated
from mlcpipe.nn.rows import scaled
from tir_schedules.op import tag


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts and weighs their results.

    scores = `score`(logits); the `chosen` best of scores + bias are taken, the lower id of equals; their weights are
    their scores, divided by (their sum or the larger `smallest_sum`, + `epsilon`) with `normalize`, times `scale`.

    bias    the router has a correction bias for the choice (DeepSeek-V3, Liu et al. 2024)
    jitter  of "sparsemixer" (Liu et al. 2024), of two experts: the weight of each is its softmax among those that come
            after it in the order of logits and are at most 2 * jitter smaller, relative to the larger magnitude
    of_input  weights multiply what experts read, and not their results
    groups  experts are in that many groups, of which those `top_groups` count whose `group_score` is best: their
            largest number ("max") or the sum of their two largest ("top2")
    """

    experts: int
    chosen: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalize: bool = False
    epsilon: float = 0.0
    smallest_sum: float = 0.0
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    jitter: float = 0.0
    of_input: bool = False


# What families call the number of experts, and of those that a token uses.
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


def expert_counts(
    config: Fields, experts: int | None = None, chosen: int | None = None, *, low: int = 1
) -> tuple[int, int]:
    """(experts, experts per token) with the family's defaults.

    transformers 5 saves fields of other names than published files have. Raises ConfigError if fields of several names
    disagree, or if more experts are chosen than exist.
    """
    count = _one_number(config, _COUNTS, experts, low=low, high=4096)
    return count, _one_number(config, _CHOSEN, chosen, low=1, high=max(count, 1))


def _one_number(config: Fields, names: tuple[str, ...], default: int | None, *, low: int, high: int) -> int:
    """The integer in [low, high] of the fields that a family has of these; Hunyuan lists it for each layer."""
    found = [name for name in names if config.get(name) is not None] or list(names[:1])
    counts = []
    for name in found:
        stated = config.get(name, default)
        values = stated if isinstance(stated, list) and stated else [stated]
        counts += [Fields({name: one}, config.where).integer(name, low=low, high=high) for one in values]
    if len(set(counts)) > 1:
        expected = "one number for all layers"
        raise ConfigError("fields " + " and ".join(found), where=config.where, expected=expected, found=counts[:8])
    return counts[0]


class Router(Linear):
    """hidden -> logits of the experts, and the bias of their choice."""

    def __init__(self, hidden_size: int, routing: Routing) -> None:
        super().__init__(hidden_size, routing.experts, quantize=False)
        self.e_score_correction_bias = Float32((routing.experts,)) if routing.bias else None


class Mixture(nn.Module):
    """A router and its experts, `experts_gate_up` and `experts_down`. Another device may have these (`nn/experts.py`).

    `elsewhere` is then what calls them.
    """

    elsewhere: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """What the experts i32[m, chosen] with weights f32[m, chosen] make of x [m, hidden], wherever they are."""
        return (self.elsewhere or self.mix)(x, weights, ids)

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As `mixed`, here."""
        raise NotImplementedError


class SparseMoE(Mixture):
    """Sum of weight_e * down_e(act(gate_e(x)) * up_e(x)) over the chosen experts e: x [m, hidden] -> [m, hidden].

    An expert's gate and up are one matrix, so a token's row is read once. `shared_width`: an expert that every token
    uses is added, with `shared_gate` times the sigmoid of a learned product with x, and times `shared_scale`. Without
    `gated` an expert is down_e(act(up_e(x))). `experts`: the number of MLPs, where it is not that of the routing.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        routing: Routing,
        act: str,
        *,
        shared_width: int = 0,
        shared_gate: bool = False,
        shared_scale: float = 1.0,
        gated: bool = True,
        experts: int | None = None,
    ) -> None:
        self.shared_scale, self.gated = shared_scale, gated
        self.act, self.routing = activation(act), routing
        experts = routing.experts if experts is None else experts
        self.gate = Router(hidden_size, routing)
        parts = ("gate", "up") if gated else ("up",)
        inner = [[f"experts.{e}.{name}_proj" for name in parts] for e in range(experts)]
        self.experts_gate_up = ExpertLinear(experts, hidden_size, len(parts) * width, inner)
        down = [[f"experts.{e}.down_proj"] for e in range(experts)]
        self.experts_down = ExpertLinear(experts, width, hidden_size, down)
        for layer in (self.experts_gate_up, self.experts_down):
            layer.weight.attrs["reads"] = Fraction(routing.chosen, routing.experts)
        shared = GatedMLP if gated else PlainMLP
        self.shared_expert = shared(hidden_size, shared_width, act) if shared_width else None
        self.shared_expert_gate = Linear(hidden_size, 1, quantize=False) if shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        weights, ids = route(self.gate(x), self.routing, self.gate.e_score_correction_bias)
        y = self.mixed(x, weights, ids)
        return y if self.shared_expert is None else op.add(y, self._shared(x))

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As `Mixture.mixed`."""
        if self.routing.of_input:
            m, top = ids.shape
            each = op.multiply(op.unsqueeze(x, 1), op.unsqueeze(op.astype(weights, x.dtype), 2))
            x_of_each = op.reshape(each, (m * top, x.shape[1]))
            weights, outer = op.ones((m, top), "float32"), self.chosen(x_of_each, ids, shared=False)
        else:
            outer = self.chosen(x, ids)
        return op.tensor_expr_op(combine, "moe_combine", [weights, outer])

    def chosen(self, x: Tensor, ids: Tensor, *, shared: bool = True) -> Tensor:
        """What experts i32[m, top] make of x [m, hidden], or [m * top, hidden] if not `shared`: [m * top, hidden]."""
        inner = self.experts_gate_up(x, ids, shared=shared)
        return self.experts_down(gated(self.act, inner) if self.gated else self.act(inner), ids, shared=False)

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_expert is not None
        y = scaled(self.shared_expert(x), self.shared_scale)
        if self.shared_expert_gate is None:
            return y
        return op.multiply(y, op.sigmoid(self.shared_expert_gate(x)))


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [m, experts] -> weights f32[m, chosen] and ids i32[m, chosen], best first."""
    logits = logits if logits.dtype == "float32" else op.astype(logits, "float32")
    if routing.score == "softmax" and bias is None and routing.groups == 1:
        weights, ids = _best(logits, routing.chosen, routing.normalize)
        return scaled(weights, routing.scale), ids
    if routing.score == "sparsemixer":
        return _sparse_mixer(logits, routing)
    scores = op.sigmoid(logits) if routing.score == "sigmoid" else op.softmax(logits, axis=-1)
    choice = scores if bias is None else op.add(scores, bias)
    choice = logits if routing.of_input else choice  # Llama 4's: equal sigmoids may be of different logits
    if routing.groups > 1:
        choice = _of_best_groups(choice, routing)
    shares, ids = _best(choice, routing.chosen, True)

    def weigh(scores: te.Tensor, shares: te.Tensor, ids: te.Tensor) -> te.Tensor:
        def element(i: tirx.Var, t: tirx.Var) -> tirx.PrimExpr:
            own = scores[i, ids[i, t]]
            if routing.normalize:
                total = _sum(scores[i, ids[i, s]] for s in range(routing.chosen))
                total = tirx.max(total, tirx.const(routing.smallest_sum, "float32")) if routing.smallest_sum else total
                own = own / (total + tirx.const(routing.epsilon, "float32"))
            own = own * tirx.const(routing.scale, "float32")
            return tirx.if_then_else(shares[i, t] >= 0, own, shares[i, t])  # NaN if a score of the token is

        return te.compute(ids.shape, element, name="moe_weights")

    return op.tensor_expr_op(weigh, "moe_weights", [scores, shares, ids]), ids


def _sparse_mixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits f32[m, experts] -> weights f32[m, 2] and ids i32[m, 2], as `Routing.jitter` says."""
    shares, ids = _best(logits, routing.chosen, True)

    def weigh(logits: te.Tensor, shares: te.Tensor, ids: te.Tensor) -> te.Tensor:
        def element(i: tirx.Var, t: tirx.Var) -> tirx.PrimExpr:
            best = logits[i, ids[i, t]]

            def share(e: int) -> tirx.PrimExpr:
                value = logits[i, e]
                bound = tirx.const(2 * routing.jitter, "float32") * tirx.max(tirx.abs(value), best)
                counts = tirx.all(tirx.any(t == 0, ids[i, 0] != e), best - value <= bound)
                return tirx.if_then_else(counts, tirx.exp(value - best), tirx.const(0.0, "float32"))

            own = tirx.const(1.0, "float32") / _sum(share(e) for e in range(routing.experts))
            return tirx.if_then_else(shares[i, t] >= 0, own, shares[i, t])  # NaN if a logit of the token is

        return te.compute(ids.shape, element, name="moe_weights")

    return op.tensor_expr_op(weigh, "moe_weights", [logits, shares, ids]), ids


def _of_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """choice f32[m, experts], the lowest number for experts of other groups than the best; NaN stays."""
    m, each = choice.shape[0], routing.experts // routing.groups
    first = 1 if routing.group_score == "max" else 2
    by_group = op.reshape(choice, (m * routing.groups, each))
    _, best = _best(by_group, first, True)

    def score(values: te.Tensor, ids: te.Tensor) -> te.Tensor:
        return te.compute(
            (values.shape[0],), lambda i: _sum(values[i, ids[i, t]] for t in range(first)), name="group_scores"
        )

    scores = op.reshape(op.tensor_expr_op(score, "group_scores", [by_group, best]), (m, routing.groups))
    _, groups = _best(scores, routing.top_groups, True)

    def mask(values: te.Tensor, groups: te.Tensor) -> te.Tensor:
        def element(i: tirx.Var, e: tirx.Var) -> tirx.PrimExpr:
            among = [groups[i, t] == (e // each).astype("int32") for t in range(routing.top_groups)]
            value = values[i, e]
            other = tirx.if_then_else(value <= tirx.max_value("float32"), tirx.min_value("float32"), value)
            return tirx.if_then_else(tirx.any(*among), value, other)

        return te.compute(values.shape, element, name="of_groups")

    return op.tensor_expr_op(mask, "of_groups", [choice, groups])


def _sum(values: Iterable[tirx.PrimExpr]) -> tirx.PrimExpr:
    return functools.reduce(operator.add, values)


def _best(scores: Tensor, count: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """scores f32[m, n] -> their softmax f32[m, count] and ids i32[m, count], as `moe_route`."""
    shape = (scores.shape[0], count)
    out = [Tensor.placeholder(shape, "float32"), Tensor.placeholder(shape, "int32")]
    func = moe_route(int(scores.shape[1]), count, normalize)
    weights, ids = op.tensor_ir_op(func, "moe_route", [scores], out)
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


@functools.cache  # TVM reads the source of the function and of all its callers, for tens of milliseconds
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
