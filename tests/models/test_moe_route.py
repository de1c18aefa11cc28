"""The routers of mixtures against numpy: the best experts first, of equals the lower id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import tir_schedules.cpu  # noqa: F401 - the compiled exp is the one that it installs
from mlcpipe.nn.moe import Routing, moe_route, route

ROWS = 37


def run(logits: np.ndarray, chosen: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """The compiled function: logits f32[m, experts] -> weights f32[m, chosen], ids i32[m, chosen]."""
    rows, experts = logits.shape
    func = moe_route(experts, chosen, normalize).with_attr("global_symbol", "main")
    built: Any = tvm.compile(tvm.IRModule({"main": func}), target="llvm")
    weights = tvm.runtime.tensor(np.full((rows, chosen), np.nan, np.float32))
    ids = tvm.runtime.tensor(np.full((rows, chosen), -1, np.int32))
    built["main"](tvm.runtime.tensor(logits), weights, ids)
    return weights.numpy(), ids.numpy()


def expected(logits: np.ndarray, chosen: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :chosen]
    all_weights = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    all_weights /= all_weights.sum(1, keepdims=True)
    weights = np.take_along_axis(all_weights, ids, 1)
    return weights / weights.sum(1, keepdims=True) if normalize else weights, ids


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (4, 4), (8, 2), (128, 8)])
def test_routes_as_numpy(experts: int, chosen: int, normalize: bool) -> None:
    # One decimal: many equal logits.
    logits = np.random.default_rng(3).normal(0, 2, (ROWS, experts)).round(1).astype(np.float32)
    weights, ids = run(logits, chosen, normalize)
    want_weights, want_ids = expected(logits, chosen, normalize)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=0, atol=3e-7)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, 1e4 + 1, -1e4, 0.0]], np.float32)
    weights, ids = run(logits, 2, False)
    assert ids.tolist() == [[1, 0]]
    np.testing.assert_allclose(weights[0], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rtol=1e-5)


def test_logits_that_are_not_numbers_choose_experts_that_exist() -> None:
    logits = np.full((2, 8), np.nan, np.float32)
    weights, ids = run(logits, 3, True)
    assert ((ids >= 0) & (ids < 8)).all()
    assert np.isnan(weights).all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_one_logit_that_is_not_a_number_shows(value: float, normalize: bool) -> None:
    """As softmax of torch: one NaN or infinity makes all weights of a token NaN, and of no other token."""
    logits = np.tile(np.arange(8, dtype=np.float32), (9, 1))
    logits[np.arange(8), np.arange(8)] = value
    weights, ids = run(logits, 2, normalize)
    assert ((ids >= 0) & (ids < 8)).all()
    assert np.isnan(weights[:8]).all() and np.isfinite(weights[8]).all()


class Routed(nn.Module):
    """`route` as a function of logits f32[m, experts] and a bias f32[experts]."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing

    def forward(self, logits: nn.Tensor, bias: nn.Tensor) -> Any:
        return route(logits, self.routing, bias if self.routing.bias else None)


def run_route(logits: np.ndarray, bias: np.ndarray, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    spec = {"logits": nn.spec.Tensor(logits.shape, "float32"), "bias": nn.spec.Tensor(bias.shape, "float32")}
    module, _ = Routed(routing).export_tvm({"forward": spec})
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    weights, ids = machine["forward"](tvm.runtime.tensor(logits), tvm.runtime.tensor(bias))
    return weights.numpy(), ids.numpy()


def test_equal_sigmoids_of_other_logits() -> None:
    """As Llama 4 chooses: by logits, whose sigmoids are all 1 in float32."""
    logits, routing = np.array([[30, 50, 40, 60]], np.float32), Routing(4, 2, "sigmoid", of_input=True)
    weights, ids = run_route(logits, np.zeros(4, np.float32), routing)
    assert ids.tolist() == [[3, 1]] and weights.tolist() == [[1, 1]]


def expected_route(logits: np.ndarray, bias: np.ndarray, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Formulas of `Routing`, in float64 for the weights."""
    rows, experts = logits.shape
    with np.errstate(invalid="ignore"):
        if routing.score == "sigmoid":
            scores = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
        else:
            powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
            scores = (powers / powers.sum(1, keepdims=True)).astype(np.float32)
        choice = scores + bias if routing.bias else scores
        if routing.groups > 1:
            by_group = np.sort(choice.reshape(rows, routing.groups, -1), axis=-1)
            of_group = by_group[..., -1] if routing.group_score == "max" else by_group[..., -2:].sum(-1)
            best = np.argsort(-of_group, axis=1, kind="stable")[:, : routing.top_groups]
            among = (np.arange(experts) // (experts // routing.groups) == best[..., None]).any(1)
            choice = np.where(among, choice, -np.inf)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : routing.chosen]
    weights = np.take_along_axis(scores, ids, 1).astype(np.float64)
    if routing.normalize:
        weights /= np.maximum(weights.sum(1, keepdims=True), routing.smallest_sum) + routing.epsilon
    return weights * routing.scale, ids


ROUTINGS = [
    Routing(8, 3, "sigmoid", normalize=True, epsilon=1e-20, scale=2.5, bias=True, groups=4, top_groups=2),
    Routing(8, 2, "sigmoid", bias=True, scale=0.5),
    Routing(8, 2, "softmax", normalize=True, bias=True, smallest_sum=0.5),
    Routing(12, 2, "softmax", scale=16.0, groups=3, top_groups=1, group_score="max"),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda one: f"{one.score}-{one.groups}-{one.chosen}")
def test_scores_biases_and_groups_as_numpy(routing: Routing) -> None:
    """A NaN makes all weights of its token NaN, whether its expert would be chosen or not, and of no other token."""
    draw = np.random.default_rng(5)
    logits = draw.normal(0, 2, (ROWS, routing.experts)).astype(np.float32)
    bias = draw.normal(0, 0.3, routing.experts).astype(np.float32)
    broken = np.arange(routing.experts)
    logits[broken, broken] = np.nan
    logits[routing.experts] = np.nan
    weights, ids = run_route(logits, bias, routing)
    assert ((ids >= 0) & (ids < routing.experts)).all()
    good = slice(routing.experts + 1, None)
    assert np.isnan(weights[: routing.experts + 1]).all()
    want_weights, want_ids = expected_route(logits[good], bias, routing)
    np.testing.assert_array_equal(ids[good], want_ids)
    np.testing.assert_allclose(weights[good], want_weights, rtol=2e-6, atol=0)
