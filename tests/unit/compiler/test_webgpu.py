"""What can be said of a WebGPU compile without a compiler for WebAssembly, a driver or a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tvm import IRModule, tirx
from tvm.ir import GlobalVar

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler.backends import find_writer
from mlcpipe.compiler.backends.wasm import emscripten, wgsl
from mlcpipe.compiler.build import build_for_device, build_kernels, generated_source
from mlcpipe.compiler.export import context_length, export, fitted_target, prepare_model
from mlcpipe.errors import CompileError, ConfigError, TargetError
from mlcpipe.nn import definitions
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule, Lowering
from mlcpipe.quantization import load_layout, load_scheme
from mlcpipe.targets import Target, compiled_variants, load_target, tvm_target
from tests.conftest import TinyLlama, write_llama
from tir_schedules.gpu.matmul.tiled import matmul
from tir_schedules.op import op_of

_HOT = {"matmul", "gated_matmul", "take", "rms_norm", "add_rms_norm", "expert_matmul"}


def _scheduled(folder: Path, target: Target, scheme: str, model_of: TinyLlama | None = None) -> Lowering:
    source = open_checkpoint(write_llama(folder / "checkpoint", model_of or TinyLlama()))
    model = prepare_model(source.config, target, load_scheme(scheme))
    state = pipeline.run(export(model, target, load_scheme(scheme), 64), *pipeline.SHARED, pipeline.SCHEDULE)
    return state


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Lowering:
    return _scheduled(tmp_path_factory.mktemp("webgpu"), load_target("webgpu"), "q4f16_1")


def test_no_hot_kernel_gets_the_rule_for_everything_else(scheduled: Lowering) -> None:
    rules = {(kernel.op, kernel.rule) for kernel in scheduled.kernels}
    assert not [pair for pair in rules if pair[0] in _HOT and pair[1] == "gpu.elementwise"]
    assert {op for op, _ in rules} >= {"matmul", "take", "rms_norm", "kv_cache_decode", "argsort_probs"}


def test_shaders_keep_to_the_limits_of_the_target(scheduled: Lowering) -> None:
    limits = scheduled.target.limits
    source = generated_source(build_for_device(scheduled), webgpu="wgsl", llvm="")
    shaders = re.split(r"^// Function: ", source, flags=re.MULTILINE)[1:]
    assert len(shaders) > 20
    for shader in shaders:
        name = shader.split()[0]
        sizes = re.findall(r"var<workgroup> \w+ : array<(\w+), (\d+)>", shader)
        assert {dtype for dtype, _ in sizes} <= {"f32", "i32"}, name
        assert 4 * sum(int(size) for _, size in sizes) <= limits["max_shared_bytes"], name
        assert len(re.findall(r"var<storage", shader)) <= limits["max_storage_buffers"], name
        x, y, z = (
            map(int, re.findall(r"@workgroup_size\((\d+), (\d+), (\d+)\)", shader)[0])
            if "@compute" in shader
            else (1, 1, 1)
        )
        assert x * y * z <= limits["max_invocations"], name
    # Not every adapter has shader-f16.
    assert "f16" not in re.sub(r"//.*", "", source)


def test_one_shader_serves_products_of_many_sizes() -> None:
    target = load_target("webgpu")
    variant = compiled_variants(target)[0]
    scheme, layout = load_scheme("q4f16_1"), load_layout(target.weight_layout)
    definitions_ = {
        "wide": definitions.matmul(scheme, layout, 512, 256, "float32"),
        "square": definitions.matmul(scheme, layout, 256, 256, "float32"),
        "tall": definitions.matmul(scheme, layout, 256, 768, "float32"),
        "head": definitions.matmul(scheme, layout, 3072, 256, "float32"),
        "gated": definitions.gated_matmul(scheme, layout, 1536, 256, "silu", "float32"),
        "large": definitions.matmul(scheme, layout, 1024, 1024, "float32"),
    }
    functions = {}
    for name, definition in definitions_.items():
        op = op_of(definition)
        assert op is not None
        kernel = matmul(op, "float32", variant.schedule)
        assert isinstance(kernel, tirx.PrimFunc)
        functions[GlobalVar(name)] = kernel.with_attr("global_symbol", name)
    module = build_kernels(KernelModule(IRModule(functions), tvm_target(target, variant)))
    shaders = re.findall(r"^fn (\w+)\(", module.imports[0].inspect_source("wgsl"), flags=re.MULTILINE)
    # The large one has tiles of its own.
    own = ["large_kernel", "large_kernel_1"]
    assert sorted(shaders) == sorted(["wide_kernel", "wide_kernel_1", "gated_kernel_2", *own])


def test_float16_is_used_where_the_target_has_it(tmp_path: Path) -> None:
    state = _scheduled(tmp_path, load_target("webgpu-f16"), "q4f16_1")
    source = generated_source(build_for_device(state), webgpu="wgsl", llvm="")
    assert "array<f16>" in source
    plain = _scheduled(tmp_path / "again", load_target("webgpu"), "q4f16_1")
    # One download serves both libraries.
    assert [w.arrays() for w in state.weights] == [w.arrays() for w in plain.weights]


@pytest.mark.full
def test_subgroups_of_32_keep_to_the_limits_where_heads_are_large(tmp_path: Path) -> None:
    """Eight heads of 256 for one of keys, whose sums are shared by the subgroups of a workgroup."""
    target = load_target("webgpu-subgroups32")
    model = TinyLlama(layers=1, hidden_size=512, heads=8, kv_heads=1, head_dim=256)
    state = _scheduled(tmp_path, target, "q4f16_1", model)
    rules = {kernel.op: kernel.rule for kernel in state.kernels}
    assert (rules["matmul"], rules["kv_cache_decode"]) == ("gpu.subgroup_matmul", "gpu.subgroup_attention")
    source = wgsl.all_kernels_of(
        generated_source(build_for_device(state), webgpu="wgsl", llvm="")
    )  # TVM counts the shared memory
    assert "mlcpipe." not in source
    sizes = [x * y * z for x, y, z in _workgroups(source)]
    assert max(sizes) <= target.limits["max_invocations"]
    # Subgroups are whole.
    shaders = source.split("@compute ")[1:]
    assert all(size % 32 == 0 for size, shader in zip(sizes, shaders) if "subgroup_invocation_id" in shader)
    # What fills four numbers of a weight is one load.
    assert "var<storage, read> _ptr_2 : array<vec4<u32>>;" in source and "array<vec4<f16>>;" in source


def _workgroups(source: str) -> list[tuple[int, ...]]:
    found = re.findall(r"@workgroup_size\((\d+), (\d+), (\d+)\)", source)
    return [tuple(map(int, sizes)) for sizes in found]


@pytest.mark.parametrize("name", ["webgpu-f16", "vulkan-f16"])
@pytest.mark.fast_cases("webgpu-f16")
def test_experts_are_lowered_with_activations_in_float16(tmp_path: Path, name: str) -> None:
    """Their weights were expected in float32."""
    fields = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {**TinyLlama(config=fields).config_json(), "architectures": ["Qwen3MoeForCausalLM"]}
    target, scheme = load_target(name), load_scheme("q4f16_1")
    state = pipeline.run(
        export(prepare_model(config, target, scheme), target, scheme, 64), *pipeline.SHARED, pipeline.SCHEDULE
    )
    rules = [kernel.rule for kernel in state.kernels if kernel.op == "expert_matmul"]
    kinds = 2 if target.own_pages else 1  # few rows, and many: over TVM's cache a kernel has both
    assert rules == ["gpu.expert_matmul"] * 2 * kinds


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emscripten.shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match="no compiler for WebAssembly.*apt-get install .*emscripten"):
        find_writer(load_target("webgpu"))


def test_a_cache_that_shaders_cannot_read_is_refused(tmp_path: Path) -> None:
    source = open_checkpoint(write_llama(tmp_path))
    with pytest.raises(TargetError, match="KV cache dtype in webgpu; expected float32; found q8"):
        prepare_model(source.config, load_target("webgpu"), load_scheme("q4f16_1"), "q8")


def test_what_webllm_cannot_run_gets_pages() -> None:
    llama, target = TinyLlama().config_json(), load_target("webgpu")
    codes = fitted_target(llama, target, "q8")
    assert (fitted_target(llama, target, "f32"), codes.kv_cache) == (target, "pages")
    assert prepare_model(llama, codes, load_scheme("q4f16_1"), "q8").kv_dtype == "q8"
    windows = {**llama, "model_type": "gemma3_text", "sliding_window": 64}
    slots = {**llama, "model_type": "lfm2", "full_attn_idxs": [1], "block_multiple_of": 16}
    assert fitted_target(windows, target) == target
    assert fitted_target(slots, target).kv_cache == "pages"
    assert fitted_target(slots, load_target("vulkan")) == load_target("vulkan")
    with pytest.raises(ConfigError, match="architecture"):
        fitted_target({"model_type": "unknown"}, target)


def test_the_context_is_what_a_binding_holds(tmp_path: Path) -> None:
    """Keys and values of a layer are one buffer: 8 heads of 64 numbers, 4 KiB a token in float32."""
    shape = TinyLlama(hidden_size=512, heads=8, kv_heads=8, head_dim=64, layers=1, positions=131072)
    config, scheme = shape.config_json(), load_scheme("q4f16_1")
    for name, most in (("webgpu", 32752), ("webgpu-f16", 65520), ("cpu", 131072)):
        target = load_target(name)
        model = prepare_model(config, target, scheme)
        assert context_length(model, target, None) == most
        # TVM's cache has one page of 16 tokens that nothing is kept in.
        per_token = model.states()[0].unit_bytes // 16
        assert (most + 16) * per_token <= target.limits.get("max_binding_bytes", 1 << 40)
    target = load_target("webgpu")
    with pytest.raises(TargetError, match="does not fit a binding.*at most 32752 tokens; found 32768.*--context"):
        context_length(prepare_model(config, target, scheme), target, 32768)


def test_a_weight_whose_rows_do_not_fit_is_refused(tmp_path: Path) -> None:
    board = tmp_path / "board.toml"
    board.write_text('base = "webgpu"\n[limits]\nmax_binding_bytes = 1000\n', encoding="utf-8")
    with pytest.raises(TargetError, match=r"weight model.embed_tokens.weight \[304, 64\] does not fit a binding"):
        _scheduled(tmp_path, load_target(str(board)), "q4f16_1")


def test_a_workspace_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """64 tokens of 128 numbers: queries, keys and values."""
    board = tmp_path / "board.toml"
    board.write_text('base = "webgpu"\n[limits]\nmax_binding_bytes = 10000\n', encoding="utf-8")
    with pytest.raises(TargetError, match="the workspace of prefill does not fit.*10,000.*found 32,768.*prefill_chunk"):
        _scheduled(tmp_path, load_target(str(board)), "q4f16_1", TinyLlama(vocab_size=272))


@pytest.mark.parametrize("base", ["cpu", "vulkan"])
def test_only_browsers_get_the_cache_of_tvm(tmp_path: Path, base: str) -> None:
    board = tmp_path / "board.toml"
    board.write_text(f'base = "{base}"\nkv_cache = "tvm"\n', encoding="utf-8")
    with pytest.raises(TargetError, match="only browsers bring TVM's KV cache"):
        load_target(str(board))
