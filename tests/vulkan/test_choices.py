"""Whatever a space of GPU kernels allows computes what numpy does: a few random choices of each rule, on a device."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import IRModule, tirx

from mlcpipe.compiler.library import own_barriers
from mlcpipe.compiler.spirv import build
from mlcpipe.nn import definitions
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from mlcpipe.tuning.inputs import Inputs, inputs_of
from mlcpipe.tuning.kernels import ruled
from tests.vulkan.schedule_cases import LAYOUT, Array, attention
from tir_schedules.gpu.attention import AttentionShape, kv_cache_functions
from tir_schedules.gpu.sampling import sampling_functions
from tir_schedules.gpu.spaces import SPACES
from tir_schedules.op import Declined, op_of
from tir_schedules.paged import PAGE
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


def cached(shape: AttentionShape, given: Inputs, first: int) -> tuple[Array, Array]:
    """K and V [tokens, kv heads, D] of the pages, which are argument `first`."""
    pages, _, indices = (np.asarray(given.values[first + i]) for i in range(3))
    halves = pages.reshape(len(pages), shape.num_kv_heads, 2, PAGE * shape.head_dim)[indices]
    k = halves[:, :, 0].reshape(-1, shape.num_kv_heads, shape.head_dim, PAGE).transpose(0, 3, 1, 2)
    v = halves[:, :, 1].reshape(-1, shape.num_kv_heads, PAGE, shape.head_dim).transpose(0, 2, 1, 3)
    return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])


@dataclass(frozen=True)
class Attends:
    """Outputs and log-sum-exps of a function of the cache, for the sequence that it is measured with."""

    shape: AttentionShape
    role: str
    keys: int = 0

    def __call__(self, given: Inputs) -> Sequence[Array]:
        q, window = np.asarray(given.values[0]), self.shape.sliding_window
        if self.role == "prefill_chunk":
            k, v = (np.asarray(given.values[i]) for i in (2, 3))
        else:
            k, v = (x[: self.keys] for x in cached(self.shape, given, 1 if self.role == "decode" else 2))
        found = []
        for row, query in enumerate(q):
            position = self.keys - 1 if self.role == "decode" else self.keys + row
            end = row + 1 if self.role == "prefill_chunk" else self.keys
            oldest = max(position - window + 1, 0) if window and self.role != "prefill_chunk" else 0
            found.append(attention(self.shape, query, k[:end], v[:end], oldest, self.shape.head_dim**-0.5))
        out, lse = zip(*found)
        return np.stack(out), np.stack(lse)


def normed(given: Inputs) -> Sequence[Array]:
    *rows, weight = (np.asarray(value, np.float64) for index, value in enumerate(given.values) if index not in given.outputs)
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


def kernels() -> Mapping[str, tuple[str, Any, Expected, tuple[int, int] | None]]:
    """Name -> rule, definition, what it computes, and sizes to measure at instead of the space's."""
    plain, window = kv_cache_functions(HEADS, 1), kv_cache_functions(replace(WINDOW, all_slide=True), 1)
    sampling = sampling_functions(VOCAB)
    scheme = load_scheme("q4f16_1")
    return {
        "decode": ("gpu.attention", plain["decode"], Attends(HEADS, "decode", 203), (1, 203)),
        "decode with a window": ("gpu.attention", window["decode"], Attends(WINDOW, "decode", 131), (1, 131)),
        "prefill": ("gpu.attention", plain["prefill_chunk"], Attends(HEADS, "prefill_chunk"), (37, 0)),
        "prefill in a window": (
            "gpu.attention", window["prefill_cached"], Attends(WINDOW, "prefill_cached", 50), (13, 50),
        ),
        "norm": ("gpu.norm", definitions.rms_norm(100, 1e-5, "float32", "float32"), normed, None),
        "norm of a sum": ("gpu.norm", definitions.add_rms_norm(100, 1e-5, "float32", "float32"), normed, None),
        "softmax": ("gpu.sampling", sampling["softmax_with_temperature"], softmax, None),
        "sort": ("gpu.sampling", sampling["argsort_probs"], in_order, None),
        "top-p": ("gpu.sampling", sampling["sample_with_top_p"], drawn, None),
        "experts": (
            "gpu.expert_matmul", definitions.expert_matmul(scheme, LAYOUT, 4, 70, 96, 2, True, "float32"), experts, None,
        ),
    }  # fmt: skip


KERNELS = kernels()


@pytest.mark.parametrize("name", KERNELS)
def test_choices_compute_what_numpy_does(name: str) -> None:
    rule, func, expected, sizes = KERNELS[name]
    op = op_of(func)
    assert op is not None
    build.register()
    for space in SPACES[rule](op, VARIANT.schedule):
        given = inputs_of(func, *(sizes or (space.rows, space.keys)))
        made = {}
        for index, choice in enumerate(({}, *chosen(space))):
            kernel = ruled(TARGET, rule, func, {**VARIANT.schedule, **choice})
            assert not isinstance(kernel, Declined)
            made[f"f{index}"] = kernel.with_attr("global_symbol", f"f{index}")
        with own_barriers():
            module = tirx.build(IRModule(made), target=tvm_target(TARGET, VARIANT))
        wanted = expected(given)
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
    from mlcpipe.tuning.measure import Bench, local_runner

    func = kv_cache_functions(HEADS, 1)["decode"]
    bench = Bench(local_runner(TARGET, VARIANT), TARGET, "gpu.attention", func, inputs_of(func, 1, 40), VARIANT.schedule)
    pairs = bench.pairs({"decode_part": 32, "decode_threads": 16}, 2)
    assert len(pairs) == 2 and all(0 < seconds < 5 for pair in pairs for seconds in pair)
