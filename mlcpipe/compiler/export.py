"""A model definition becomes an IRModule with its weight table, for one target and quantization."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax
from tvm.ir import StringImm

from mlcpipe.compiler.weights import weight_table
from mlcpipe.errors import ConfigError, TargetError
from mlcpipe.models import build_model
from mlcpipe.nn.causal_lm import CausalLM, ModelFacts
from mlcpipe.nn.kv_cache import PAGE_SIZE
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.targets import Target, compiled_variants

MAX_BATCH = 8


KV_CACHE_DTYPES = {"auto": "", "f32": "float32", "f16": "float16", "q8": "q8"}


def prepare_model(config: Mapping[str, Any], target: Target, scheme: Scheme, kv_cache_dtype: str = "auto") -> CausalLM:
    """The module of a config.json, told which dtypes and kernels it will have.

    `kv_cache_dtype` is one of KV_CACHE_DTYPES; auto is the scheme's dtype where the target's kernels can keep it.
    Raises ConfigError for another, TargetError where they cannot.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError("KV cache dtype", expected=", ".join(KV_CACHE_DTYPES), found=kv_cache_dtype)
    model = build_model(config)
    attention = importlib.import_module(f"tir_schedules.{target.kernels}.attention")
    known = attention.ACTIVATION_DTYPES
    if target.activation_dtype not in known:
        raise TargetError(
            "activation dtype", where=target.name, expected=" or ".join(known), found=target.activation_dtype
        )
    possible = attention.kv_dtypes(target.activation_dtype)
    wanted = KV_CACHE_DTYPES[kv_cache_dtype]
    if wanted and wanted not in possible:
        raise TargetError("KV cache dtype", where=target.name, expected=", ".join(possible), found=kv_cache_dtype)
    model.dtype = target.activation_dtype
    model.to(target.activation_dtype)
    model.kv_dtype = wanted or (scheme.model_dtype if scheme.model_dtype in possible else possible[0])
    model.kernels = target.kernels
    return model


def context_length(model: CausalLM, target: Target, wanted: int | None) -> int:
    """The context in tokens that a bundle serves: what is wanted, or the model's, at most what the device binds.

    Raises ConfigError for one outside 16 ... 2**24, TargetError for one that was asked for and does not fit.
    """
    most = _cached_tokens(model, target)
    length = min(model.facts.context_length, most) if wanted is None else wanted
    if not 16 <= length <= 1 << 24:
        raise ConfigError("context length", expected="16 to 16777216 tokens", found=length)
    if length > most:
        raise TargetError(
            "the KV cache of a layer does not fit a binding",
            where=target.name,
            expected=f"a context of at most {most} tokens",
            found=length,
            next_step="ask for less with --context, or raise limits.max_binding_bytes in a target file of your own",
        )
    return length


def _cached_tokens(model: CausalLM, target: Target) -> int:
    """Tokens whose keys and values of a layer fit in one binding; TVM's cache has a page more than it needs."""
    limit = target.limits.get("max_binding_bytes")
    if limit is None:
        return 1 << 24
    page = PAGE_SIZE * int(model.attention_shape().bytes_per_token)
    return max(0, limit // page - 1) * PAGE_SIZE


def prefill_chunk(facts: ModelFacts, target: Target, context: int) -> int:
    """Tokens of one prefill call: bounded by the target, the context and the sliding window.

    A chunk within the window needs no window mask inside itself (tir_schedules/cpu/attention.py).
    """
    return min(target.limits["max_prefill_chunk"], context, facts.window or context)


def export(model: CausalLM, target: Target, scheme: Scheme, chunk: int) -> Lowering:
    """The IRModule with all entry points and the weight table, before any pass."""
    mod, params = model.export_tvm(spec=model.spec())
    mod = _with_sampling(mod, target, model.facts.vocab_size)
    return Lowering(
        mod,
        tuple(weight_table(params)),
        target,
        compiled_variants(target)[0],
        scheme,
        load_layout(target.weight_layout),
        bounds={"n": chunk, "b": MAX_BATCH},
    )


def _with_sampling(mod: tvm.IRModule, target: Target, vocab_size: int) -> tvm.IRModule:
    """Add the sampling functions: in-place ones as they are, the others as functions that return.

    Browsers sort with one function and draw with another; `sample` is for hosts of our own.
    """
    functions = importlib.import_module(f"tir_schedules.{target.kernels}.sampling").sampling_functions(vocab_size)
    if target.link == "wasm":
        del functions["sample"]
    bb = relax.BlockBuilder(mod)
    for name, func in functions.items():
        if name.endswith("_inplace"):
            bb.update_func(bb.add_func(func, name), func.with_attr("global_symbol", name))
            continue
        _emit_sampling(bb, name, bb.add_func(func, f"{name}_kernel"), vocab_size)
    return bb.get()


def _emit_sampling(bb: relax.BlockBuilder, name: str, kernel: tvm.ir.GlobalVar, vocab: int) -> None:
    """A Relax function around a sampling kernel whose last buffers are outputs."""
    b, n = tvm.tirx.Var("b", "int64"), tvm.tirx.Var("n", "int64")

    def tensor(shape: tuple[Any, ...], dtype: str) -> relax.TensorType:
        return relax.TensorType(shape, dtype)

    f32, i32 = "float32", "int32"
    signatures: dict[str, tuple[list[relax.TensorType], list[relax.TensorType]]] = {
        "sample": (
            [tensor((b, 1, vocab), f32), *[tensor((b,), d) for d in (f32, f32, i32, f32, f32)]],
            [tensor((b,), i32)],
        ),
        "softmax_with_temperature": ([tensor((b, 1, vocab), f32), tensor((b,), f32)], [tensor((b, 1, vocab), f32)]),
        "argsort_probs": ([tensor((b, vocab), f32)], [tensor((b, vocab), f32), tensor((b, vocab), i32)]),
        "sample_with_top_p": (
            [tensor((b, vocab), f32), tensor((b, vocab), i32), tensor((n,), f32), tensor((n,), i32), tensor((b,), f32)],
            [tensor((n,), i32)],
        ),
    }
    inputs, outputs = signatures[name]
    params = [relax.Var(f"arg{i}", kind) for i, kind in enumerate(inputs)]
    with bb.function(name, params, attrs={"num_input": len(params)}):
        with bb.dataflow():
            result = bb.emit_output(relax.call_tir(kernel, params, outputs if len(outputs) > 1 else outputs[0]))
        bb.emit_func_output(result)


def with_metadata(mod: tvm.IRModule, metadata: Mapping[str, Any]) -> tvm.IRModule:
    """Add `_metadata() -> str`, which MLC's hosts read."""
    bb = relax.BlockBuilder(mod)
    with bb.function("_metadata", params=[]):
        bb.emit_func_output(StringImm(json.dumps(metadata)))
    return bb.get()
