"""Whatever a space of GPU kernels allows computes what numpy does: a few random choices of each rule, on a device."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import IRModule

from mlcpipe.compiler.backends.spirv import codegen as build
from mlcpipe.compiler.build import build_kernels
from mlcpipe.devices import vulkan
from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from mlcpipe.tuned.kernels import apply_rule
from mlcpipe.tuning.inputs import Inputs, inputs_of
from tests.kernels.cases.gpu.attention import SCALE, attention
from tests.kernels.cases.gpu.case import LAYOUT, Array
from tests.kernels.devices.vulkan import knobs
from tir_schedules import step_layout as step
from tir_schedules.gpu.attention import AttentionShape, kv_cache_functions, page_functions
from tir_schedules.gpu.sampling.mlc_contract import sampling_functions
from tir_schedules.gpu.spaces import SPACES
from tir_schedules.op import op_of
from tir_schedules.paged import PAGE
from tir_schedules.rule import Declined, Knobs
from tir_schedules.space import Space

pytestmark = pytest.mark.usefixtures("gpu")

TARGET = load_target("vulkan")
VARIANT = compiled_variants(TARGET)[0]
CHOICES = 2
HEADS = AttentionShape(6, 2, 40, "float32", softcap=20.0)
WINDOW = AttentionShape(4, 4, 24, "float16", sliding_window=37)
VOCAB = 5003
Expected = Callable[[Inputs], Sequence[Array]]


def chosen(space: Space) -> list[dict[str, int]]:
    every = [choice for choice in space.choices() if choice != space.default]
    return random.Random(space.bucket).sample(every, min(CHOICES, len(every)))


def in_pages(shape: AttentionShape, pages: Array, ids: Array) -> tuple[Array, Array]:
    """K and V [tokens, kv heads, D] in the pages with these numbers."""
    halves = pages.reshape(len(pages), shape.num_kv_heads, 2, PAGE * shape.head_dim)[ids]
    k = halves[:, :, 0].reshape(-1, shape.num_kv_heads, shape.head_dim, PAGE).transpose(0, 3, 1, 2)
    v = halves[:, :, 1].reshape(-1, shape.num_kv_heads, PAGE, shape.head_dim).transpose(0, 2, 1, 3)
    return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])


@dataclass(frozen=True)
class OverPages:
    """Outputs of attention over pages, for the sequence that it is measured with."""

    shape: AttentionShape
    window: int = 0

    def __call__(self, given: Inputs) -> Sequence[Array]:
        qkv, integers, pages = map(np.asarray, given.values[:3])
        k, v = in_pages(self.shape, pages.view(self.shape.dtype), integers[integers[step.TABLES] :][: len(pages)])
        found = []
        for q, i in zip(qkv[:, : self.shape.num_heads], integers[integers[step.POSITION] :]):
            oldest = max(i - self.window + 1, 0) if self.window else 0
            found.append(attention(self.shape, q, k[: i + 1], v[: i + 1], oldest, SCALE)[0])
        return [np.stack(found)]


@dataclass(frozen=True)
class OverCache:
    """Outputs and log-sum-exps of a function of TVM's cache, likewise."""

    shape: AttentionShape
    role: str
    keys: int = 0

    def __call__(self, given: Inputs) -> Sequence[Array]:
        q, window = np.asarray(given.values[0]), self.shape.sliding_window
        if self.role == "prefill_chunk":
            k, v = (np.asarray(given.values[i]) for i in (2, 3))
        else:
            first = 1 if self.role == "decode" else 2
            pages, _, ids = (np.asarray(given.values[first + i]) for i in range(3))
            k, v = (x[: self.keys] for x in in_pages(self.shape, pages, ids))
        found = []
        for row, query in enumerate(q):
            position = self.keys - 1 if self.role == "decode" else self.keys + row
            end = row + 1 if self.role == "prefill_chunk" else self.keys
            oldest = max(position - window + 1, 0) if window and self.role != "prefill_chunk" else 0
            found.append(attention(self.shape, query, k[:end], v[:end], oldest, self.shape.head_dim**-0.5))
        out, lse = zip(*found)
        return np.stack(out), np.stack(lse)


def normed(given: Inputs) -> Sequence[Array]:
    *rows, weight = (
        np.asarray(value, np.float64) for index, value in enumerate(given.values) if index not in given.outputs
    )
    x: Array = sum(rows[1:], rows[0])
    y = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * weight
    return [x, y][-len(given.outputs) :]


def softmax(given: Inputs) -> Sequence[Array]:
    logits, temperature = (np.asarray(value, np.float64) for value in given.values[:2])
    weights = np.exp((logits - logits.max()) / temperature)
    return [weights / weights.sum()]


def in_order(given: Inputs) -> Sequence[Array]:
    probs = np.asarray(given.values[0])
    order = np.argsort(-probs, axis=1, kind="stable")
    return [np.take_along_axis(probs, order, 1), order]


def drawn(given: Inputs) -> Sequence[Array]:
    probs, ids, uniform, _, top_p = (np.asarray(value, np.float64) for value in given.values[:5])
    sums = probs[0].cumsum()
    last = int(np.argmax(sums >= top_p[0]))
    return [ids[0, np.argmax(sums > uniform * sums[last])].reshape(1)]


def experts(given: Inputs) -> Sequence[Array]:
    """Of the first choice's kernel: there is a test of what it computes elsewhere."""
    return []


@dataclass(frozen=True)
class Kernel:
    """A rule, a definition, what it computes, sizes to measure at instead of the space's, and facts of a target."""

    rule: str
    func: Any
    expected: Expected
    sizes: tuple[int, int] | None = None
    facts: Knobs = field(default_factory=lambda: VARIANT.schedule)


def kernels() -> Mapping[str, Kernel]:
    pages, in_window = page_functions(HEADS, SCALE), page_functions(WINDOW, SCALE, WINDOW.sliding_window)
    cache, sliding = kv_cache_functions(HEADS, 1), kv_cache_functions(replace(WINDOW, all_slide=True), 1)
    sampling, scheme = sampling_functions(VOCAB), load_scheme("q4f16_1")
    few, many, attend = pages["attend_few"], pages["attend_many"], "gpu.attention"
    norms = (100, 1e-5, "float32", "float32")
    experts_of = definitions.expert_matmul(scheme, LAYOUT, 4, 70, 96, 2, True, "float32")
    made = {
        "few": Kernel(attend, few, OverPages(HEADS), (3, 203)),
        "few in a window": Kernel(attend, in_window["attend_few"], OverPages(WINDOW, 37), (1, 131)),
        "few with subgroups": Kernel(
            "gpu.subgroup_attention", few, OverPages(HEADS), (2, 403), knobs(8, shuffled=False)
        ),
        "many": Kernel(attend, many, OverPages(HEADS), (37, 0)),
        "many in a window": Kernel(attend, in_window["attend_many"], OverPages(WINDOW, 37), (13, 50)),
        "norm": Kernel("gpu.norm", definitions.rms_norm(*norms), normed),
        "norm of a sum": Kernel("gpu.norm", definitions.add_rms_norm(*norms), normed),
        "softmax": Kernel("gpu.sampling", sampling["softmax_with_temperature"], softmax),
        "sort": Kernel("gpu.sampling", sampling["argsort_probs"], in_order),
        "top-p": Kernel("gpu.sampling", sampling["sample_with_top_p"], drawn),
        "experts": Kernel("gpu.expert_matmul", experts_of, experts),
    }
    browsers = {
        "decode": Kernel(attend, cache["decode"], OverCache(HEADS, "decode", 203), (1, 203)),
        "decode in a window": Kernel(attend, sliding["decode"], OverCache(WINDOW, "decode", 131), (1, 131)),
        "prefill": Kernel(attend, cache["prefill_chunk"], OverCache(HEADS, "prefill_chunk"), (37, 0)),
        "prefill in a window": Kernel(
            attend, sliding["prefill_cached"], OverCache(WINDOW, "prefill_cached", 50), (13, 50)
        ),
    }
    facts = load_target("webgpu").schedule
    return made | {name: replace(kernel, facts=facts) for name, kernel in browsers.items()}


KERNELS = kernels()


@pytest.mark.parametrize("name", KERNELS)
def test_choices_compute_what_numpy_does(name: str, gpu: vulkan.Device) -> None:
    kernel = KERNELS[name]
    rule, func, facts = kernel.rule, kernel.func, kernel.facts
    if facts.get("subgroup") and not (
        gpu.limits["can_require_subgroup_size"] and gpu.limits["min_subgroup_size"] <= int(facts["subgroup"])
    ):
        pytest.skip(f"this device has no subgroups of {facts['subgroup']}")
    op = op_of(func)
    assert op is not None
    build.register()
    for space in SPACES[rule](op, facts):
        given = inputs_of(func, *(kernel.sizes or (space.rows, space.keys)))
        made = {}
        for index, choice in enumerate(({}, *chosen(space))):
            scheduled = apply_rule(TARGET, rule, func, {**facts, **choice})
            assert not isinstance(scheduled, Declined)
            made[f"f{index}"] = scheduled.with_attr("global_symbol", f"f{index}")
        module = build_kernels(KernelModule(IRModule(made), tvm_target(TARGET, VARIANT)))
        wanted = kernel.expected(given)
        for symbol in made:
            found = outputs(module[symbol], given)
            wanted = wanted or found
            for a, b in zip(found, wanted, strict=True):
                limit = 2e-3 if func.params[0].ty.dtype == "float16" else 3e-6
                np.testing.assert_allclose(a, b.reshape(a.shape), rtol=0, atol=limit * np.abs(b).max())


def outputs(function: Any, given: Inputs) -> list[Array]:
    values = [tvm.runtime.tensor(x, tvm.device("vulkan", 0)) if isinstance(x, np.ndarray) else x for x in given.values]
    function(*values)
    return [values[index].numpy().astype(np.float64) for index in given.outputs]


def test_a_choice_is_measured_beside_the_default() -> None:
    from mlcpipe.compiler.backends import vulkan as backend
    from mlcpipe.tuning.measure import Bench

    func = page_functions(HEADS, SCALE)["attend_few"]
    bench = Bench(
        backend.runner(TARGET, VARIANT), TARGET, "gpu.attention", func, inputs_of(func, 1, 40), VARIANT.schedule
    )
    pairs = bench.pairs({"decode_part": 32, "decode_threads": 16}, 2)
    assert len(pairs) == 2 and all(seconds > 0 for pair in pairs for seconds in pair)
