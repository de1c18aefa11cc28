"""Small Relax modules with their weight tables, and how to compare, run and read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from mlcpipe.compiler.build import build
from mlcpipe.compiler.weights import Weight
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target

Array = NDArray[Any]
HIDDEN, KV, VOCAB, EXPERTS = 32, 16, 24, 5
EPSILON = 1e-5
MODEL_PASSES = pipeline.PASSES[:6]


@I.ir_module
class Block:
    """Something like a layer: lookup, norm, three projections of one input, residual, norm, router."""

    @R.function
    def decode(  # type: ignore[no-untyped-def]
        ids: R.Tensor((1,), "int32"),
        table: R.Tensor((24, 32), "float32"),
        q: R.Tensor((32, 32), "float32"),
        k: R.Tensor((16, 32), "float32"),
        v: R.Tensor((16, 32), "float32"),
        o: R.Tensor((32, 32), "float32"),
        first: R.Tensor((32,), "float32"),
        second: R.Tensor((32,), "float32"),
        router: R.Tensor((5, 32), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            x = R.take(table, ids, axis=0)
            y = R.nn.rms_norm(x, first, axes=[-1], epsilon=1e-5)
            qt = R.permute_dims(q)
            a = R.matmul(y, qt)
            kt = R.permute_dims(k)
            b = R.matmul(y, kt)
            vt = R.permute_dims(v)
            c = R.matmul(y, vt)
            d = R.concat((b, c), axis=1)
            e = R.multiply(a, d)
            ot = R.permute_dims(o)
            f = R.matmul(e, ot)
            s = R.add(x, f)
            z = R.nn.rms_norm(s, second, axes=[-1], epsilon=1e-5)
            rt = R.permute_dims(router)
            g = R.matmul(z, rt)
            out = (s, g)
            R.output(out)
        return out

    @R.function
    def prefill(  # type: ignore[no-untyped-def]
        ids: R.Tensor(("n",), "int32"),
        table: R.Tensor((24, 32), "float32"),
        q: R.Tensor((32, 32), "float32"),
        k: R.Tensor((16, 32), "float32"),
        v: R.Tensor((16, 32), "float32"),
        o: R.Tensor((32, 32), "float32"),
        first: R.Tensor((32,), "float32"),
        second: R.Tensor((32,), "float32"),
        router: R.Tensor((5, 32), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            x = R.take(table, ids, axis=0)
            y = R.nn.rms_norm(x, first, axes=[-1], epsilon=1e-5)
            kt = R.permute_dims(k)
            b = R.matmul(y, kt)
            vt = R.permute_dims(v)
            c = R.matmul(y, vt)
            qt = R.permute_dims(q)
            a = R.matmul(y, qt)
            d = R.concat((b, c), axis=1)
            e = R.multiply(a, d)
            ot = R.permute_dims(o)
            f = R.matmul(e, ot)
            s = R.add(x, f)
            z = R.nn.rms_norm(s, second, axes=[-1], epsilon=1e-5)
            rt = R.permute_dims(router)
            g = R.matmul(z, rt)
            out = (s, g)
            R.output(out)
        return out


def _weight(name: str, shape: tuple[int, ...], kind: str) -> Weight:
    return Weight(f"{name}.weight", shape, "float32", kind, ((f"{name}.weight",),))


BLOCK_WEIGHTS = (
    _weight("table", (VOCAB, HIDDEN), "scheme"),
    _weight("attn.q_proj", (HIDDEN, HIDDEN), "scheme"),
    _weight("attn.k_proj", (KV, HIDDEN), "scheme"),
    _weight("attn.v_proj", (KV, HIDDEN), "scheme"),
    _weight("attn.o_proj", (HIDDEN, HIDDEN), "scheme"),
    _weight("first", (HIDDEN,), "vector"),
    _weight("second", (HIDDEN,), "vector"),
    _weight("router", (EXPERTS, HIDDEN), "plain"),
)


def lowering(mod: tvm.IRModule, weights: Sequence[Weight], scheme: str = "q4f16_1", **bounds: int) -> Lowering:
    """The state that passes start from, for this CPU; matmuls in float32, whose numbers float64 can bound closely."""
    target = load_target("cpu-native")
    variant = compiled_variants(target)[0]
    return Lowering(
        mod,
        tuple(weights),
        target,
        replace(variant, schedule={**variant.schedule, "int8_activations": 0}),
        load_scheme(scheme),
        load_layout("rows16"),
        bounds=bounds,
    )


def apply(state: Lowering, *passes: pipeline.Pass) -> Lowering:
    """Run passes, each checked for well-formedness."""
    return pipeline.run(state, passes, check=True)[0]


def canonical(mod: tvm.IRModule) -> tvm.IRModule:
    """Without aliases of variables, which every rebuild adds one of."""
    return relax.transform.DeadCodeElimination()(relax.transform.CanonicalizeBindings()(mod))


def assert_same(found: tvm.IRModule, expected: tvm.IRModule) -> None:
    """Structural equality up to aliases."""
    tvm.ir.assert_structural_equal(canonical(found), canonical(expected))


def summary(mod: tvm.IRModule, name: str) -> list[str]:
    """One line a binding of a function: `variable = operation(arguments)`; PrimFuncs by their names."""
    func = canonical(mod)[name]
    return [f"{b.var.name} = {_text(b.value)}" for block in func.body.blocks for b in block.bindings]


def _text(value: relax.Expr) -> str:
    if isinstance(value, relax.TupleGetItem):
        return f"{_text(value.tuple_value)}[{value.index}]"
    if isinstance(value, relax.Tuple):
        return f"({', '.join(_text(field) for field in value.fields)})"
    if isinstance(value, tvm.tirx.IntImm):
        return str(int(value))
    if not isinstance(value, relax.Call):
        return str(value.name) if isinstance(value, relax.Var) else str(value)
    if isinstance(value.op, tvm.ir.Op) and value.op.name == "relax.call_tir":
        return f"{value.args[0].name_hint}{_text(value.args[1])}"
    return f"{value.op.name.removeprefix('relax.')}({', '.join(_text(arg) for arg in value.args)})"


def finish(state: Lowering, done: int) -> Any:
    """The VM of a state on which the first `done` passes of the pipeline ran."""
    state = apply(state, *pipeline.PASSES[done:])
    return relax.VirtualMachine(build(state).jit(), tvm.cpu())


def random_weights(table: Sequence[Weight], seed: int = 0) -> dict[str, Array]:
    """A float32 array for every checkpoint tensor of a table whose weights have one source each."""
    rng = np.random.default_rng(seed)
    return {w.sources[0][0]: rng.standard_normal(w.shape).astype(np.float32) / 4 for w in table}


def stored(table: Sequence[Weight], tensors: Mapping[str, Array]) -> list[Any]:
    """The arrays that the functions of a table take, made from checkpoint tensors by the table's own rules."""
    arrays: list[Array] = []
    for weight in table:
        full = np.concatenate([tensors[source] for source in weight.sources[0]])
        arrays += list(packed(weight, full).values())
    return [tvm.runtime.tensor(array) for array in arrays]


def packed(weight: Weight, full: Array) -> dict[str, Array]:
    """What is stored for one weight."""
    if weight.scheme is None or weight.layout is None:
        return {weight.name: full.astype(weight.dtype)}
    n, k = weight.shape[-2:]
    return weight.layout.repack(weight.scheme, weight.scheme.pack(full), n, k)


def meant(table: Sequence[Weight], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Checkpoint tensors as a table stores them, float64: after packing and unpacking, or a cast."""
    result = {}
    for weight in table:
        begin = 0
        for source in weight.sources[0]:
            part = tensors[source]
            if weight.scheme is None:
                result[source] = part.astype(weight.dtype).astype(np.float64)
            else:
                unpacked = weight.scheme.unpack(weight.scheme.pack(part), part.shape[-1])
                result[source] = unpacked.astype(np.float64)
            begin += len(part)
        assert begin == weight.shape[0]
    return result


def block_reference(ids: Array, w: Mapping[str, Array]) -> tuple[Array, Array]:
    """What `Block` computes, in float64: (residual, router logits)."""

    def norm(x: Array, weight: Array) -> Array:
        scaled: Array = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON) * weight
        return scaled

    x = w["table.weight"][ids]
    y = norm(x, w["first.weight"])
    q, k, v = (y @ w[f"attn.{name}_proj.weight"].T for name in "qkv")
    s = x + (q * np.concatenate([k, v], axis=1)) @ w["attn.o_proj.weight"].T
    return s, norm(s, w["second.weight"]) @ w["router.weight"].T
