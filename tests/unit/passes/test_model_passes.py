"""fuse_parallel_matmul, quantize_weights, fuse_dequantize, fuse_gate, fuse_add_norm: the IR after each, and its numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from mlcpipe.errors import CompileError
from mlcpipe.nn import definitions
from mlcpipe.passes.fuse_add_norm import fuse_add_norm
from mlcpipe.passes.fuse_dequantize import fuse_dequantize
from mlcpipe.passes.fuse_parallel_matmul import fuse_parallel_matmul, joined_name
from mlcpipe.passes.lowering import Lowering
from mlcpipe.passes.quantize_weights import quantize_weights
from mlcpipe.passes.split_weights import split_weights
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.native_formats import native_scheme
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from mlcpipe.weights.table import Weight
from tests.unit.passes.small import (
    BLOCK_WEIGHTS,
    MODEL_PASSES,
    Block,
    apply,
    assert_same,
    block,
    block_reference,
    finish,
    lowering,
    meant,
    passes_through,
    random_weights,
    stored,
    summary,
)
from tir_schedules.op import Op, op_of

START = lowering(Block, BLOCK_WEIGHTS, n=8)


def ops(state: Lowering) -> list[Op]:
    found = [op_of(func) for func in state.mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    return [op for op in found if op is not None]


def test_parallel_matmuls_become_one() -> None:
    state = apply(START, fuse_parallel_matmul)
    found = tvm.IRModule({gv: f for gv, f in state.mod.functions.items() if gv.name_hint == "decode"})
    assert_same(found, tvm.IRModule({"decode": block("decode", "joined")}))


def test_parallel_matmuls_join_their_rows_in_the_weight_table() -> None:
    state = apply(START, fuse_parallel_matmul)
    assert [w.name for w in state.weights] == [
        "table.weight",
        "attn.qkv_proj.weight",
        "attn.o_proj.weight",
        "first.weight",
        "second.weight",
        "router.weight",
    ]
    assert state.weights[1].shape == (64, 32)
    assert state.weights[1].sources == (("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"),)


def test_parts_keep_their_columns_where_another_function_reads_them_in_another_order() -> None:
    """Prefill of `Block` computes k, v, then q; decode, which decides the order of the rows, q, k, v."""
    lines = summary(apply(START, fuse_parallel_matmul).mod, "prefill")
    slices = [re.fullmatch(r"(\w)\d* = strided_slice\(\w+, \(1\), \((\d+)\), \((\d+)\)\)", line) for line in lines]
    assert [found.groups() for found in slices if found] == [("b", "32", "48"), ("c", "48", "64"), ("a", "0", "32")]
    assert sum(" = matmul(" in line for line in lines) == 3


def test_matmuls_without_a_common_input_stay() -> None:
    @I.ir_module
    class Chain:
        @R.function
        def decode(  # type: ignore[no-untyped-def]
            x: R.Tensor((1, 8), "float32"), a: R.Tensor((8, 8), "float32"), b: R.Tensor((8, 8), "float32")
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                at = R.permute_dims(a)
                y = R.matmul(x, at)
                bt = R.permute_dims(b)
                z = R.matmul(y, bt)
                R.output(z)
            return z

    table = [Weight(f"{name}.weight", (8, 8), "float32", "scheme", ((name,),)) for name in "ab"]
    state = lowering(Chain, table)
    assert apply(state, fuse_parallel_matmul) is state


def test_plain_weights_are_not_joined_with_others() -> None:
    """A router stays in the model's dtype: joined with a projection it would be quantized."""

    @I.ir_module
    class Routed:
        @R.function
        def decode(  # type: ignore[no-untyped-def]
            x: R.Tensor((1, 8), "float32"), a: R.Tensor((8, 8), "float32"), router: R.Tensor((4, 8), "float32")
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                at = R.permute_dims(a)
                y = R.matmul(x, at)
                rt = R.permute_dims(router)
                z = R.matmul(x, rt)
                out = (y, z)
                R.output(out)
            return out

    table = [
        Weight("a.weight", (8, 8), "float32", "scheme", (("a",),)),
        Weight("router.weight", (4, 8), "float32", "plain", (("router",),)),
    ]
    state = lowering(Routed, table)
    assert apply(state, fuse_parallel_matmul) is state


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["l.0.q_proj.weight", "l.0.k_proj.weight", "l.0.v_proj.weight"], "l.0.qkv_proj.weight"),
        (["l.0.gate_proj.weight", "l.0.up_proj.weight"], "l.0.gate_up_proj.weight"),
        (["l.0.w1.weight", "l.0.w3.weight"], "l.0.w1_w3.weight"),
    ],
)
def test_joined_names_are_those_of_mlc(names: list[str], joined: str) -> None:
    assert joined_name(names) == joined


def test_quantized_weights_are_followed_by_dequantize() -> None:
    lines = summary(apply(START, fuse_parallel_matmul, quantize_weights).mod, "decode")
    assert [line for line in lines if "dequantize" in line or "astype" in line] == [
        "lv = dequantize(table.q_weight, table.q_scale)",
        "lv1 = dequantize1(attn.qkv_proj.q_weight, attn.qkv_proj.q_scale)",
        "lv2 = dequantize2(attn.o_proj.q_weight, attn.o_proj.q_scale)",
        "lv3 = astype(first.weight)",
        "lv4 = astype(second.weight)",
        "lv5 = dequantize3(router.weight)",
    ]


@pytest.mark.parametrize("scheme", ["q4f16_1", "q3f16_1", "q8f32_1", "q8f16_0", "q0f16", "q0f32"])
def test_the_weight_table_says_how_arrays_are_stored(scheme: str) -> None:
    state = apply(lowering(Block, BLOCK_WEIGHTS, scheme), quantize_weights)
    dtype = load_scheme(scheme).model_dtype
    names = {name: value for w in state.weights for name, value in w.arrays().items()}
    groups = {"q4f16_1": (4, 1), "q3f16_1": (4, 1), "q8f32_1": (8, 1), "q8f16_0": (8, 1)}.get(scheme)
    if groups is None:
        assert names["attn.k_proj.weight"] == ((1, 32, 16), dtype)
    else:
        assert names["attn.k_proj.q_weight"] == ((1, groups[0], 16), "uint32")
        assert names["attn.k_proj.q_scale"] == ((1, groups[1], 16), dtype)
    assert names["router.weight"] == ((1, 32, 16), dtype)
    assert names["first.weight"] == ((32,), dtype)
    # Every function takes exactly these arrays, in this order.
    for name in ("decode", "prefill"):
        params = state.mod[name].params[1:]
        found = [(tuple(int(extent) for extent in p.ty.shape), str(p.ty.dtype)) for p in params]
        assert found == list(names.values())


def test_dequantize_goes_into_what_reads_it() -> None:
    state = apply(START, fuse_parallel_matmul, quantize_weights, fuse_dequantize)
    lines = summary(state.mod, "decode")
    assert [line for line in lines if "weight" in line and "astype" not in line] == [
        "x = take(table.q_weight, table.q_scale, ids)",
        "lv11 = matmul(y, attn.qkv_proj.q_weight, attn.qkv_proj.q_scale)",
        "f = matmul1(e, attn.o_proj.q_weight, attn.o_proj.q_scale)",
        "g = matmul2(z, router.weight)",
    ]
    assert not any("dequantize" in line or "permute_dims" in line for line in lines)
    kinds = sorted((op.kind, op.int("n"), op.int("bits")) for op in ops(state))
    assert kinds == [("matmul", 5, 0), ("matmul", 32, 4), ("matmul", 64, 4), ("take", 24, 4)]


def called(state: Lowering, name: str) -> set[str]:
    """The kernels that a model function calls."""
    return {match for line in summary(state.mod, name) for match in re.findall(r" = (\w+)\(", line)}


@pytest.mark.parametrize("target", ("cpu", "vulkan", "webgpu"))
def test_decode_and_prefill_share_their_kernels(target: str) -> None:
    state = apply(replace(START, target=load_target(target)), *MODEL_PASSES)
    kernels = {gv.name_hint for gv, func in state.mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc)}
    few, shared = {"matmul", "matmul1", "matmul2"}, {"take", "rms_norm", "add_rms_norm"}
    many = {f"matmul_many{i or ''}" for i in range(3)} if target == "cpu" else few
    if target == "vulkan":  # over pages of the runtime a GPU's norms, too, are for one kind of rows
        few, many = ({f"matmul_{rows}{i or ''}" for i in range(3)} for rows in ("few", "many"))
        few, many = few | {"rms_norm_few", "add_rms_norm_few"}, many | {"rms_norm_many", "add_rms_norm_many"}
        shared = {"take"}
    assert kernels == shared | few | many
    assert kernels & called(state, "decode") == shared | few
    assert kernels & called(state, "prefill") == shared | many


def test_a_weight_that_something_else_reads_keeps_its_dequantize() -> None:
    @I.ir_module
    class Summed:
        @R.function
        def decode(x: R.Tensor((1, 32), "float32"), w: R.Tensor((16, 32), "float32")):  # type: ignore[no-untyped-def]
            R.func_attr({"num_input": 1})
            with R.dataflow():
                t = R.permute_dims(w)
                y = R.matmul(x, t)
                total = R.sum(w)
                out = (y, total)
                R.output(out)
            return out

    table = (Weight("w.weight", (16, 32), "float32", "scheme", (("w",),)),)
    lines = summary(apply(lowering(Summed, table), quantize_weights, fuse_dequantize).mod, "decode")
    assert lines[:3] == [
        "lv = dequantize(w.q_weight, w.q_scale)",
        "y = matmul(x, w.q_weight, w.q_scale)",
        "total = sum(lv)",
    ]


def experts_module(experts: int, n: int, k: int, top: int, same_input: bool) -> tvm.IRModule:
    """`decode`, which multiplies one token with the experts w [experts, n, k] that `ids` names."""
    plain = definitions.expert_matmul(
        load_scheme("q0f32"), load_layout("row"), experts, n, k, top, same_input, "float32"
    )
    bb = tvm.relax.BlockBuilder()
    x = tvm.relax.Var("x", tvm.relax.TensorType((1 if same_input else top, k), "float32"))
    ids = tvm.relax.Var("ids", tvm.relax.TensorType((1, top), "int32"))
    w = tvm.relax.Var("w", tvm.relax.TensorType((experts, n, k), "float32"))
    out = tvm.relax.TensorType((top, n), "float32")
    with bb.function("decode", [x, ids, w], attrs={"num_input": 2}):
        with bb.dataflow():
            y = bb.emit_output(tvm.relax.call_tir(bb.add_func(plain, "expert_matmul"), [x, w, ids], out))
        bb.emit_func_output(y)
    return bb.get()


@pytest.mark.parametrize("same_input", [True, False])
def test_expert_matmul_reads_packed_experts(same_input: bool) -> None:
    experts, n, k, top = 3, 16, 32, 2
    table = (Weight("w.weight", (experts, n, k), "float32", "scheme", (("a",), ("b",), ("c",))),)
    state = apply(lowering(experts_module(experts, n, k, top, same_input), table), quantize_weights, fuse_dequantize)
    (line,) = summary(state.mod, "decode")
    assert line.endswith("(x, w.q_weight, w.q_scale, ids)")
    (op,) = ops(state)
    facts = {name: op.int(name) for name in ("experts", "top", "shared", "n", "k", "bits")}
    assert facts == {"experts": experts, "top": top, "shared": int(same_input), "n": n, "k": k, "bits": 4}
    assert op.str("layout") == "rows16"


def test_experts_in_two_formats_are_two_products() -> None:
    formats = {"Q8_0": 8, "Q4_0": 16}  # rows
    parts = tuple(
        Weight(f"w.part{i}.weight", (2, rows, 32), "float32", "scheme", (("a",), ("b",)), scheme=native_scheme(name))
        for i, (name, rows) in enumerate(formats.items())
    )
    table = (Weight("w.weight", (2, 24, 32), "float32", "scheme", (("a", "c"), ("b", "d")), parts=parts),)
    start = lowering(experts_module(2, 24, 32, 1, True), table)
    state = apply(start, fuse_parallel_matmul, split_weights, quantize_weights, fuse_dequantize)
    assert [weight.name for weight in state.weights] == ["w.part0.weight", "w.part1.weight"]
    lines = summary(state.mod, "decode")
    reads = [re.sub(r".* = expert_matmul\d*", "", line) for line in lines[:2]]
    assert reads == [f"(x, w.part{i}.q_weight, w.part{i}.q_scale, ids)" for i in range(2)]
    assert lines[2].endswith("concat(({}, {}))".format(*(line.split(" = ")[0] for line in lines[:2])))
    assert {op.str("scheme"): op.int("n") for op in ops(state)} == formats


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("swapped", [True, False])
def test_a_gate_goes_into_its_projection(joined: bool, swapped: bool) -> None:
    """Gate and up as two weights and as one; up * act(gate) in that order, and act(up) * gate, stay as they are."""
    x = tvm.relax.Var("x", tvm.relax.TensorType((1, 32), "float32"))
    shapes = {"gate_up": (32, 32)} if joined else {"gate_proj": (16, 32), "up_proj": (16, 32)}
    weights = [tvm.relax.Var(name, tvm.relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    bb, op = tvm.relax.BlockBuilder(), tvm.relax.op
    with bb.function("decode", [x, *weights], attrs={"num_input": 1}):
        with bb.dataflow():
            projected = [bb.emit(op.matmul(x, bb.emit(op.permute_dims(w)))) for w in weights]
            if joined:
                both = bb.emit(op.split(projected[0], 2, axis=1))
                projected = [bb.emit(both[0]), bb.emit(both[1])]
            gate, up = projected[::-1] if swapped else projected
            y = bb.emit_output(op.multiply(bb.emit(op.nn.silu(gate)), up))
        bb.emit_func_output(y)
    table = [Weight(f"{name}.weight", shape, "float32", "scheme", ((name,),)) for name, shape in shapes.items()]
    lines = summary(apply(lowering(bb.get(), table), *MODEL_PASSES).mod, "decode")
    if swapped:
        assert any("silu" in line for line in lines)
    else:
        (line,) = lines
        assert re.fullmatch(r"\w+ = gated_matmul\(x, gate_up(_proj)?\.q_weight, gate_up(_proj)?\.q_scale\)", line)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("order", "bias"), [("qkv", ""), ("qkv", "float32"), ("qkv", "float16"), ("vkq", ""), ("qkv", "rows")]
)
def test_rope_reads_the_projection(joined: bool, order: str, bias: str) -> None:
    """Of one weight or three, with biases or without; in another order, or plus matrices, the parts stay as they are."""
    heads, dim = {"q": 2, "k": 1, "v": 1}, 8
    x = tvm.relax.Var("x", tvm.relax.TensorType((1, 32), "float32"))
    cos, sin = (tvm.relax.Var(name, tvm.relax.TensorType((1, dim // 2), "float32")) for name in ("cos", "sin"))
    shapes = {"qkv_proj": (4 * dim, 32)} if joined else {f"{of}_proj": (heads[of] * dim, 32) for of in order}
    types = {name: (shape, "float32") for name, shape in shapes.items()}
    if bias == "rows":
        types |= {f"{of}_bias": ((1, heads[of] * dim), "float32") for of in "qkv"}
    elif bias:
        types |= {f"{of}_bias": ((heads[of] * dim,), bias) for of in "qkv"}
    weights = {name: tvm.relax.Var(name, tvm.relax.TensorType(*type_)) for name, type_ in types.items()}
    bb, op = tvm.relax.BlockBuilder(), tvm.relax.op
    with bb.function("decode", [x, cos, sin, *weights.values()], attrs={"num_input": 3}):
        with bb.dataflow():
            projected = [bb.emit(op.matmul(x, bb.emit(op.permute_dims(weights[name])))) for name in shapes]
            if joined:
                ends = np.cumsum([heads[of] * dim for of in order])[:2].tolist()
                split = bb.emit(op.split(projected[0], ends, axis=1))
                projected = [bb.emit(split[i]) for i in range(3)]
            parts = dict(zip(order, projected))
            if bias:
                added = {of: weights[f"{of}_bias"] for of in "qkv"}
                if bias == "float16":
                    added = {of: bb.emit(op.astype(one, "float32")) for of, one in added.items()}
                parts = {of: bb.emit(op.add(parts[of], added[of])) for of in "qkv"}
            parts = {of: bb.emit(op.reshape(parts[of], (1, heads[of], dim))) for of in "qkv"}
            func = definitions.apply_rope(2, 1, dim, dim, "float32", "float32")
            call = tvm.relax.call_tir(
                bb.add_func(func, "rope"), [*parts.values(), cos, sin], tvm.relax.TensorType((1, 4, dim), "float32")
            )
            y = bb.emit_output(bb.emit(call))
        bb.emit_func_output(y)
    table = [
        Weight(f"{n}.weight", s, t, "scheme" if s[0] > 1 and s[1:] else "vector", ((n,),))
        for n, (s, t) in types.items()
    ]
    lines = summary(apply(lowering(bb.get(), table), *MODEL_PASSES).mod, "decode")
    if order == "qkv" and bias != "rows":
        biases = ", q_bias.weight, k_bias.weight, v_bias.weight" if bias else ""
        assert re.fullmatch(rf"\w+ = rope_of_projection\(\w+, cos, sin{biases}\)", lines[-1])
        assert len(lines) == 2
    else:
        assert " rope(" in lines[-1]


def test_norms_take_the_addition_before_them() -> None:
    state = apply(START, *MODEL_PASSES)
    lines = summary(state.mod, "decode")
    assert lines[1] == "y = rms_norm(x, first.weight)"
    at = next(i for i, line in enumerate(lines) if "add_rms_norm" in line)
    pair = lines[at].split(" = ")[0]
    total, normed = (line.split(" = ")[0] for line in lines[at + 1 : at + 3])
    assert lines[at : at + 3] == [
        f"{pair} = add_rms_norm(x, f, second.weight)",
        f"{total} = {pair}[0]",
        f"{normed} = {pair}[1]",
    ]
    # The residual is read from the fused kernel: no addition is left.
    assert not any(" = add(" in line for line in lines)
    assert lines[-1].endswith(f"({total}, g)")
    norms = {op.kind: op for op in ops(state) if "norm" in op.kind}
    assert {kind: op.str("weight_dtype") for kind, op in norms.items()} == {
        "rms_norm": "float16",
        "add_rms_norm": "float16",
    }


def test_an_addition_that_broadcasts_is_not_a_residual() -> None:
    @I.ir_module
    class Bias:
        @R.function
        def decode(  # type: ignore[no-untyped-def]
            x: R.Tensor((2, 8), "float32"), b: R.Tensor((8,), "float32"), w: R.Tensor((8,), "float32")
        ):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                s = R.add(x, b)
                y = R.nn.rms_norm(s, w, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

    table = [Weight(name, (8,), "float32", "vector", ((name,),)) for name in "bw"]
    lines = summary(apply(lowering(Bias, table, "q0f32"), fuse_add_norm).mod, "decode")
    assert lines[0] == "s = add(x, b)"
    assert "rms_norm(s, w)" in lines[1] and "add_rms_norm" not in lines[1]


def test_a_norm_of_three_dimensions_is_left_to_tvm() -> None:
    @I.ir_module
    class Heads:
        @R.function
        def decode(x: R.Tensor((2, 4, 8), "float32"), w: R.Tensor((8,), "float32")):  # type: ignore[no-untyped-def]
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.nn.rms_norm(x, w, axes=[-1], epsilon=1e-5)
                R.output(y)
            return y

    table = (Weight("w", (8,), "float32", "vector", (("w",),)),)
    assert_same(apply(lowering(Heads, table, "q0f32"), fuse_add_norm).mod, Heads)


@pytest.mark.fast_cases("-q4f16_1", "split_weights-q4f16_1", "fuse_dequantize-q4f16_1", "fuse_dequantize-q0f32")
@pytest.mark.full_cases("fuse_dequantize-q3f16_1")
@pytest.mark.parametrize(
    ("last", "scheme"),
    [
        *((last, "q4f16_1") for last in ("", "fuse_parallel_matmul", "split_weights", "quantize_weights")),
        *(("fuse_dequantize", name) for name in ("q4f16_1", "q3f16_1", "q8f32_1", "q8f16_0", "q0f32")),
    ],
)
def test_numbers_stay_after_every_pass(last: str, scheme: str) -> None:
    """decode and prefill of `Block`, run on llvm after the passes up to `last`, are float64's."""
    state = apply(lowering(Block, BLOCK_WEIGHTS, scheme, n=8), *passes_through(last))
    tensors = random_weights(BLOCK_WEIGHTS)
    arrays, w = stored(state.weights, tensors), meant(state.weights, tensors)
    # The passes that are tested are not run a second time by the rest of the pipeline.
    vm = finish(state)
    for name, ids in (("decode", [7]), ("prefill", [3, 0, 23, 3, 11])):
        found = vm[name](tvm.runtime.tensor(np.array(ids, np.int32)), arrays)
        for part, expected in zip(found, block_reference(np.array(ids), w)):
            np.testing.assert_allclose(part.numpy(), expected, rtol=0, atol=2e-5)


def test_a_pass_that_fails_is_named() -> None:
    def break_it(state: Lowering) -> Lowering:
        raise ValueError("first line\nno such thing")

    with pytest.raises(CompileError, match="pass break_it failed in target cpu-native; found no such thing"):
        apply(START, break_it)
