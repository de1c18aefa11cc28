"""The whole pipeline on small models of every family: well-formed after each pass, dumped, planned, scheduled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import tvm
from tvm import relax, tirx

from mlcpipe.compiler.export import export, prepare_model
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.models import model_types
from mlcpipe.passes import pipeline
from mlcpipe.passes.annotate_bounds import annotate_bounds
from mlcpipe.passes.bundle_weights import bundle_weights
from mlcpipe.passes.lowering import KernelReport, Lowering, is_op, model_functions, weight_params, workspace_bytes
from mlcpipe.passes.schedule_kernels import schedule_kernels
from mlcpipe.quantization.scheme import load_scheme, scheme_names
from mlcpipe.targets import load_target
from tests.models import small_configs
from tests.unit.passes.small import BLOCK_WEIGHTS, MODEL_PASSES, Block, apply, lowering, passes_through
from tir_schedules.op import op_of, tag
from tir_schedules.rule import rules_in

FAMILIES = model_types()
SIZES: Mapping[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "full_attn_idxs": [1],
}
HOT = {"matmul", "gated_matmul", "expert_matmul", "rms_norm", "add_rms_norm"}
CHUNK = 32
# One full run a family; together they go through every scheme.
SCHEMES = tuple(name for name in scheme_names() if not load_scheme(name).mixed)
RUNS = [(family, SCHEMES[i % len(SCHEMES)]) for i, family in enumerate(FAMILIES)]
# Families that together have the operations of all take every scheme, the others one.
SEVERAL = ("apertus", "bloom", "cohere", "gemma2", "gpt_oss", "lfm2", "llama", "mixtral", "phi3", "qwen2")
# Latent attention, scans, delta rules, shared keys and what else these lack; the other families and schemes, whose parity
# tests/models compiles, are in the tier of all combinations.
OTHERS = ("deepseek_v3", "falcon_h1", "gemma3n_text", "kimi_linear", "mamba", "minimax", "qwen3_next", "rwkv7")
SOME = ("q0f16", "q8f16_1")


@lru_cache(4)  # a family's
def exported(family: str, scheme_name: str) -> Lowering:
    target, scheme = load_target("cpu-native"), load_scheme(scheme_name)
    fields = small_configs.config(family) if family in small_configs.KINDS else {"model_type": family, **SIZES}
    model = prepare_model({**fields, "num_kv_shared_layers": 0}, target, scheme)
    return export(model, target, scheme, CHUNK)


def test_every_family_and_scheme_is_here() -> None:
    assert len(FAMILIES) >= 10
    assert {scheme for _, scheme in RUNS} == set(SCHEMES)


@pytest.mark.parametrize(("family", "scheme"), RUNS)
@pytest.mark.fast_cases(*(f"{family}-{scheme}" for family, scheme in RUNS if family in ("mixtral", "gemma2", "qwen2")))
@pytest.mark.full_cases(*(f"{family}-{scheme}" for family, scheme in RUNS if family in OTHERS[::2]))
def test_pipeline_is_well_formed_after_every_pass(family: str, scheme: str) -> None:
    state = pipeline.run(exported(family, scheme), *pipeline.SHARED, pipeline.SCHEDULE, check=True)
    assert_scheduled(state)
    assert_planned(state)


def assert_scheduled(state: Lowering) -> None:
    """Every PrimFunc has a schedule and a line in the report; hot ones have a rule of their own."""
    functions = {gv.name_hint: f for gv, f in state.mod.functions.items() if isinstance(f, tirx.PrimFunc)}
    assert [k.name for k in state.kernels] == sorted(functions)
    assert all(func.attrs["tirx.is_scheduled"] for func in functions.values())
    assert cold(state.kernels) == []
    assert "matmul" in {k.op for k in state.kernels}
    assert {"rms_norm", "layer_norm"} & {k.op for k in state.kernels}
    attention = {k.rule for k in state.kernels if k.op in ("store_pages", "attend_few")}
    assert attention == ({"by hand", "cpu.attention"} if attention else set())  # Mamba has none
    assert all(k.reason for k in state.kernels)


def cold(kernels: tuple[KernelReport, ...]) -> list[KernelReport]:
    """Hot operations that got the fallback, and dequantizations that nothing fused."""
    return [k for k in kernels if (k.op in HOT and k.rule == "cpu.elementwise") or k.op == "dequantize"]


def assert_planned(state: Lowering) -> None:
    """Workspace is static for every model function, and weights are one tuple."""
    plan = workspace_bytes(state.mod)
    for name in ("decode", "prefill"):
        assert plan[name] > 0
        *_, packed = state.mod[name].params
        assert packed.name == "packed_params"
        assert len(packed.ty.fields) == sum(len(w.arrays()) for w in state.weights)
    assert plan["decode"] < 4 * plan["prefill"]


def test_the_kind_of_rows_follows_from_the_function() -> None:
    """Tokens of a prompt are many rows; those of decode and verification, and rows with logits, are few."""
    state = pipeline.run(exported("qwen3_moe", "q4f16_1"), pipeline.MODEL)
    products = {}
    for name in ("decode", "prefill"):
        bindings = [binding.value for block in state.mod[name].body.blocks for binding in block.bindings]
        calls = [value.args[0] for value in bindings if is_op(value, "relax.call_tir")]
        tags = [op for op in (op_of(state.mod[call]) for call in calls) if op is not None]
        products[name] = [(op.many_rows, op.int("n")) for op in tags if op.kind in ("matmul", "gated_matmul")]
    few, many = products.values()
    assert not any(is_many for is_many, _ in few)
    assert all(is_many for is_many, _ in many[:-1])
    assert few[-1] == many[-1] == (False, SIZES["vocab_size"])
    assert [n for _, n in few] == [n for _, n in many]


@pytest.mark.parametrize(
    ("family", "scheme"), [(family, one) for family, own in RUNS for one in (SCHEMES if family in SEVERAL else (own,))]
)
@pytest.mark.fast_cases(*(f"llama-{scheme}" for scheme in SCHEMES), *(f"{family}-q4f16_1" for family in SEVERAL))
@pytest.mark.full_cases(
    *(f"{family}-{scheme}" for family in SEVERAL for scheme in SOME),
    *(f"{family}-{scheme}" for family, scheme in RUNS if family in OTHERS),
)
def test_hot_kernels_never_fall_back(family: str, scheme: str) -> None:
    """Every operation with every scheme, through the passes that choose operations and the rules that schedule them."""
    state = pipeline.run(of_layer(family, scheme), pipeline.MODEL, pipeline.SCHEDULE)
    assert cold(state.kernels) == []
    packed = {w.name for w in state.weights if w.scheme is not None and w.kind == "scheme"}
    sources = {source for w in state.weights for group in w.sources for source in group}
    joined = any(name.endswith(("qkv_proj.weight", "self_attn.in_proj.weight")) or ".q_k_v_" in name for name in packed)
    assert joined or not any(source.endswith("self_attn.v_proj.weight") for source in sources)
    assert not any(name.endswith("shared_expert.gate_proj.weight") for name in packed)  # joined, beside a router


def of_layer(family: str, scheme: str) -> Lowering:
    """The function of decode alone: that of prompts has the same operations with other sizes."""
    same_dtype = next(name for name in SCHEMES if load_scheme(name).model_dtype == load_scheme(scheme).model_dtype)
    state = exported(family, same_dtype)
    keep = {gv: f for gv, f in state.mod.functions.items() if isinstance(f, tirx.PrimFunc)}
    keep |= {state.mod.get_global_var(name): state.mod[name] for name in ("decode",)}
    keep = {
        gv: f
        for gv, f in keep.items()
        if not str(gv.name_hint).startswith(("attend_many", "sample", "argsort", "softmax"))
    }
    return replace(state, mod=tvm.IRModule(keep), scheme=load_scheme(scheme))


def test_model_functions_share_one_weight_table() -> None:
    state = apply(exported("llama", "q4f16_1"), *MODEL_PASSES)
    expected = [(name, shape, dtype) for w in state.weights for name, (shape, dtype) in w.arrays().items()]
    found = model_functions(state.mod)
    assert {gv.name_hint for gv, _ in found} == {"decode", "prefill"}
    for _, func in found:
        params = weight_params(func)
        assert [(p.name, tuple(int(e) for e in p.ty.shape), str(p.ty.dtype)) for p in params] == expected


def test_projections_join_with_their_sources() -> None:
    state = apply(exported("llama", "q4f16_1"), *MODEL_PASSES)
    sources = {w.name: w.sources for w in state.weights}
    attention_names = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    assert sources["model.layers.1.self_attn.qkv_proj.weight"] == (attention_names,)
    assert sources["model.layers.0.mlp.gate_up_proj.weight"] == (
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    )
    assert not any(name.endswith(("q_proj.weight", "up_proj.weight")) and "gate_up" not in name for name in sources)


def test_a_residual_of_every_layer_goes_into_a_norm() -> None:
    """Llama: two additions a layer, each followed by a norm; only the first norm of all has none before it."""
    state = apply(exported("llama", "q4f16_1"), *MODEL_PASSES)
    calls = [b.value.args[0].name_hint for block in state.mod["decode"].body.blocks for b in block.bindings
             if isinstance(b.value, relax.Call) and b.value.op.name == "relax.call_tir"]  # fmt: skip
    assert sum(name.startswith("add_rms_norm") for name in calls) == 2 * SIZES["num_hidden_layers"]
    assert sum(name.startswith("rms_norm") for name in calls) == 1
    assert sum(name.startswith("matmul") for name in calls) == 3 * SIZES["num_hidden_layers"] + 1
    assert sum(name.startswith("gated_matmul") for name in calls) == SIZES["num_hidden_layers"]


def test_bounds_reach_every_function() -> None:
    state = annotate_bounds(lowering(Block, BLOCK_WEIGHTS, n=8))
    for name in ("decode", "prefill"):
        assert {str(k): int(v) for k, v in state.mod[name].attrs["tir_var_upper_bound"].items()} == {"n": 8}


def test_the_workspace_grows_with_the_bound_and_with_nothing_else() -> None:
    plans = {}
    for n in (8, 16):
        plans[n] = workspace_bytes(pipeline.run(lowering(Block, BLOCK_WEIGHTS, n=n), *pipeline.SHARED).mod)
    assert plans[8]["decode"] == plans[16]["decode"]
    assert plans[16]["prefill"] == 2 * plans[8]["prefill"]
    # x, y or s, qkv and its parts: a few rows of 32 floats a token, at least two alive at once.
    assert 8 * 2 * 32 * 4 <= plans[8]["prefill"] <= 8 * 12 * 32 * 4


def test_weights_become_the_last_argument() -> None:
    state = bundle_weights(lowering(Block, BLOCK_WEIGHTS))
    func = state.mod["prefill"]
    assert [p.name for p in func.params] == ["ids", "packed_params"]
    shapes = [tuple(int(e) for e in field.shape) for field in func.params[1].ty.fields]
    assert shapes == [w.shape for w in BLOCK_WEIGHTS]


def unscheduled(state: Lowering, func: tirx.PrimFunc) -> Lowering:
    return state.with_mod(tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}))


def test_the_report_says_why_a_rule_declined() -> None:
    from mlcpipe.nn import definitions

    odd = definitions.rms_norm(33, 1e-5, "float32", "float32")
    state = schedule_kernels(unscheduled(lowering(Block, ()), odd))
    assert state.kernels == (KernelReport("kernel", "rms_norm", "cpu.elementwise", "cpu.norm: size 33 is odd"),)


def test_a_layout_without_a_kernel_declines() -> None:
    from mlcpipe.nn import definitions
    from mlcpipe.quantization.layout import load_layout

    row = definitions.matmul(load_scheme("q4f16_1"), load_layout("row"), 16, 32, "float32")
    (report,) = schedule_kernels(unscheduled(lowering(Block, ()), row)).kernels
    assert report.rule == "cpu.elementwise"
    assert report.reason.endswith("cpu.matmul: weight layout row has no CPU kernel")


def test_a_function_that_came_with_its_schedule_is_left_alone() -> None:
    from mlcpipe.nn import definitions

    func = tag(definitions.rms_norm(16, 1e-5, "float32", "float32"), "mine").with_attr("tirx.is_scheduled", True)
    before = unscheduled(lowering(Block, ()), func)
    state = schedule_kernels(before)
    assert state.kernels == (KernelReport("kernel", "mine", "by hand", "written with its schedule"),)
    tvm.ir.assert_structural_equal(state.mod, before.mod)


def test_scheduling_changes_no_call() -> None:
    """Same names, same signatures: only bodies differ."""
    before = apply(lowering(Block, BLOCK_WEIGHTS, n=8), *passes_through("RewriteDataflowReshape"))
    after = schedule_kernels(before)
    assert {gv.name_hint for gv in before.mod.functions} == {gv.name_hint for gv in after.mod.functions}
    for gv, func in before.mod.functions.items():
        if isinstance(func, relax.Function):
            tvm.ir.assert_structural_equal(func, after.mod[gv.name_hint])
        else:
            assert signature(func) == signature(after.mod[gv.name_hint])


def signature(func: tirx.PrimFunc) -> list[tuple[int, str]]:
    """Dimensions and dtype of every buffer argument."""
    return [(len(p.ty.shape), str(p.ty.dtype)) for p in func.params]


def test_an_activation_dtype_without_kernels_is_refused() -> None:
    half = replace(load_target("cpu"), activation_dtype="float16")
    with pytest.raises(TargetError, match="activation dtype in cpu; expected float32; found float16"):
        prepare_model({"model_type": "llama", **SIZES}, half, load_scheme("q4f16_1"))


def test_an_ill_formed_module_is_found_when_checked() -> None:
    def lose_a_binding(state: Lowering) -> Lowering:
        func = state.mod["decode"]
        (block,) = func.body.blocks
        body = relax.SeqExpr([relax.DataflowBlock(block.bindings[1:])], func.body.body)
        broken = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        return state.with_mod(tvm.IRModule({"decode": broken}))

    with pytest.raises(CompileError, match="pass lose_a_binding failed"):
        apply(lowering(Block, BLOCK_WEIGHTS), lose_a_binding)


@pytest.mark.parametrize("kernels", ["cpu", "gpu"])
def test_the_special_rule_is_asked_before_the_general_one(kernels: str) -> None:
    rules = rules_in(kernels)
    names = [rule.name for rule in rules]
    assert len(set(names)) == len(names) > 7
    assert [rule.name for rule in rules if not rule.kinds] == names[-1:], "the last rule takes everything"
    for rule in rules:
        assert not rule.before or names.index(rule.name) < names.index(rule.before)
