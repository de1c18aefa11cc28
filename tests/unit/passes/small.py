"""Small Relax modules with their weight tables, and how to compare, run and read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

from mlcpipe.compiler.build import build
from mlcpipe.compiler.export import export, prepare_model
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.weights.table import Weight

Array = NDArray[Any]
HIDDEN, KV, VOCAB, EXPERTS = 32, 16, 24, 5
EPSILON = 1e-5
MODEL_PASSES = pipeline.MODEL.passes
CHUNK = 32
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def small_llama(passes: Sequence[pipeline.Pass]) -> Lowering:
    """A llama of three layers, in int4 for this CPU, after these passes."""
    target, scheme = load_target("cpu-native"), load_scheme("q4f16_1")
    return apply(export(prepare_model(CONFIG, target, scheme), target, scheme, CHUNK), *passes)


def forwards(state: Lowering) -> dict[str, relax.Function]:
    """The functions that a model's tokens go through, by name."""
    return {name: state.mod[name] for name in ("decode", "prefill")}


def block(name: str, order: str) -> relax.Function:
    """Something like a layer: lookup, norm, projections of one input, residual, norm, router.

    order: of the projections q, k and v, "qkv" or another; "joined" for one of all three. `decode` has one token.
    """
    joined, bb, op = order == "joined", relax.BlockBuilder(), relax.op
    rows = {"table": VOCAB, **({"qkv": HIDDEN + 2 * KV} if joined else {"q": HIDDEN, "k": KV, "v": KV}), "o": HIDDEN}
    shapes = {**{key: (n, HIDDEN) for key, n in rows.items()}, "first": (HIDDEN,), "second": (HIDDEN,)}
    shapes["router"] = (EXPERTS, HIDDEN)
    w = {key: relax.Var(key, relax.TensorType(shape, "float32")) for key, shape in shapes.items()}
    tokens = 1 if name == "decode" else tvm.tirx.Var("n", "int64")
    ids = relax.Var("ids", relax.TensorType((tokens,), "int32"))

    def times(x: relax.Var, weight: str, result: str) -> relax.Var:
        return bb.emit(op.matmul(x, bb.emit(op.permute_dims(w[weight]), f"{weight}t")), result)

    def norm(x: relax.Var, weight: str, result: str) -> relax.Var:
        return bb.emit(op.nn.rms_norm(x, w[weight], axes=[-1], epsilon=EPSILON), result)

    with bb.function(name, [ids, *w.values()], attrs={"num_input": 1}):
        with bb.dataflow():
            x = bb.emit(op.take(w["table"], ids, axis=0), "x")
            y = norm(x, "first", "y")
            names = {"q": "a", "k": "b", "v": "c"}
            if joined:
                every, ends = times(y, "qkv", "all"), (0, HIDDEN, HIDDEN + KV, HIDDEN + 2 * KV)
                spans = dict(zip("qkv", pairwise(ends)))
                parts = {key: bb.emit(op.strided_slice(every, [1], [i], [j])) for key, (i, j) in spans.items()}
            else:
                parts = {key: times(y, key, names[key]) for key in order}
            d = bb.emit(op.concat((parts["k"], parts["v"]), axis=1), "d")
            e = bb.emit(op.multiply(parts["q"], d), "e")
            s = bb.emit(op.add(x, times(e, "o", "f")), "s")
            out = bb.emit_output((s, times(norm(s, "second", "z"), "router", "g")))
        bb.emit_func_output(out)
    return bb.get()[name]


Block = tvm.IRModule({"decode": block("decode", "qkv"), "prefill": block("prefill", "kvq")})


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
    return pipeline.run(state, pipeline.Phase("test", passes), check=True)


def passes_through(last: str) -> tuple[pipeline.Pass, ...]:
    """The passes of the pipeline up to the one of that name; none for ""."""
    every = [one for phase in (*pipeline.SHARED, pipeline.SCHEDULE) for one in phase.passes]
    names = [one.__name__ for one in every]
    return tuple(every[: names.index(last) + 1]) if last else ()


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


def finish(state: Lowering) -> Any:
    """The VM of a state on which the passes of `pipeline.MODEL` ran, or some of them."""
    state = pipeline.run(state, pipeline.OPERATORS, pipeline.MEMORY, pipeline.SCHEDULE, check=True)
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
    return weight.layout.repack(weight.scheme, pack(weight.scheme, full), n, k)


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
                unpacked = unpack(weight.scheme, pack(weight.scheme, part), part.shape[-1])
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
