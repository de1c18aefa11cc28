"""Model definition to IRModule and weight table, for one target and quantization."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax
from tvm.ir import StringImm

from mlcpipe.bundle.model_info import MAX_ASKED, DiffusionInfo, WholeAnswerInfo
from mlcpipe.checkpoint.checkpoint import Checkpoint, PictureTower
from mlcpipe.checkpoint.draft_heads import DraftHead, OwnHead
from mlcpipe.compiler.draft_heads import build_draft_head
from mlcpipe.encoders import build_encoder
from mlcpipe.errors import ConfigError, TargetError
from mlcpipe.models import build_model
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.entry_points import entry_points
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.module_builder import exported
from mlcpipe.nn.speech_model import SpeechModel
from mlcpipe.nn.text_encoder import TextEncoder
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import Scheme, kv_dtype
from mlcpipe.sound import build_speech, hears
from mlcpipe.support.defaults import KEEP
from mlcpipe.targets import Target, Variant, compiled_variants
from mlcpipe.vision import build_tower
from mlcpipe.weights.table import weight_table
from tir_schedules.paged import PAGE, QUANTIZED
from tir_schedules.sampling import DRAWS, FORBID, SIGNATURES, Signature, TensorType, dimensions, sampling_names

MAX_BATCH = 64  # sequences of a batched call; the workspace of 64 is an eighth of that of a prompt's chunk
LOGITS_BYTES = 64 << 20  # of a prompt's rows whose logits one call gives, where they are more than MAX_BATCH

_RANGES = 64  # of ids that one kernel forbids: each is a part of its code
OUTPUT_NAMES = ("lm_head.weight", "model.embed_tokens.weight")  # the matrix of the logits: its own, or the embedding


def fitted_target(
    config: Mapping[str, Any], target: Target, kv_cache_dtype: str = "auto", *, encoder: bool = False
) -> Target:
    """The target, with pages of the runtime for a model or a dtype of keys that TVM's cache cannot serve.

    WebLLM runs libraries over that cache, the chat page's own engine those over pages. Raises ConfigError.
    """
    if target.own_pages or encoder or hears(config):
        return target
    pages, model = replace(target, kv_cache="pages"), build_model(config)
    try:
        model.check_uniform(target.name)
    except ConfigError:
        return pages
    return pages if kv_dtype(kv_cache_dtype) in QUANTIZED else target


def prepare_model(
    config: Mapping[str, Any],
    target: Target,
    scheme: Scheme,
    kv_cache_dtype: str = "auto",
    *,
    encoder: bool = False,
    draft_head: DraftHead | None = None,
    pictures: PictureTower | None = None,
) -> LanguageModel:
    """Build the model of a config.json and set its dtypes and its folder of kernels.

    `kv_cache_dtype` is f32, f16, q8, q4 or auto; auto is the target's or else the scheme's dtype, float16 for
    weights that are kept, if the target's kernels support it. An `encoder` keeps them for the time of a layer only, and
    auto rounds them least. The model drafts with a `draft_head`, and sees with the tower of `pictures`.
    Raises ConfigError for an unknown dtype, TargetError for one that the kernels do not support.
    """
    wanted = kv_dtype(kv_cache_dtype)
    if hears(config):
        _check_hears(target)
    build = build_speech if hears(config) else build_encoder if encoder else build_model
    model: LanguageModel = build(config)
    attention = importlib.import_module(f"tir_schedules.{target.kernels}.attention")
    known = attention.ACTIVATION_DTYPES
    if target.activation_dtype not in known:
        raise TargetError(
            "activation dtype", where=target.name, expected=" or ".join(known), found=target.activation_dtype
        )
    dims = [math.gcd(of.head_dim, of.v_dim) for of in model.attentions()]
    if any(of.distances for of in model.attentions()) and target.kernels != "cpu":
        raise TargetError("no biases of distances", where=target.name, expected="a CPU", found=model.facts.model_type)
    each = [attention.kv_dtypes(target.activation_dtype, dim, target.own_pages) for dim in dims]
    each += [("float32", "float16") for of in model.attentions() if of.slopes]  # positions among keys have no codes
    possible = [dtype for dtype in each[0] if all(dtype in one for one in each)] if each else ["float32"]
    if wanted is not None and wanted not in possible:
        raise TargetError("KV cache dtype", where=target.name, expected=", ".join(possible), found=kv_cache_dtype)
    if isinstance(draft_head, OwnHead) and (encoder or target.in_browsers):
        draft_head = None
    if draft_head is not None:
        if not isinstance(model, CausalLM):
            raise ConfigError("a draft head is for models that write text", where=draft_head.path)
        if target.in_browsers:
            raise TargetError("no draft heads", where=target.name, expected="a target whose hosts draft, such as cpu")
        built = build_draft_head(draft_head, model)
        if built is not None:
            model.add_draft_head(built)
    if pictures is not None:
        assert isinstance(model, CausalLM)
        model.tower = build_tower(pictures.config, pictures.preprocessor)
        model.tower.dtype = model.tower.kv_dtype = target.activation_dtype
        model.tower.kernels = target.kernels
    if model.facts.diffusion is not None and not encoder:
        _check_denoises(target, draft_head)
    model.dtype = target.activation_dtype
    model.to(target.activation_dtype)
    usual = kv_dtype(target.kv_cache_dtype) or ("float16" if scheme.name == KEEP else scheme.model_dtype)
    if encoder and target.in_browsers:
        raise TargetError("no embeddings", where=target.name, expected="a target whose hosts embed texts, such as cpu")
    usual = target.activation_dtype if encoder else usual
    model.kv_dtype = wanted or (usual if usual in possible else possible[0])
    model.kernels = target.kernels
    if not target.own_pages:
        model.check_uniform(target.name)
    return model


def _check_denoises(target: Target, draft_head: DraftHead | None) -> None:
    """Raises TargetError for a target without the kernels, or whose hosts write one token after the other."""
    if target.kernels != "cpu" or not target.own_pages or target.archive or target.in_browsers:
        raise TargetError("no text by diffusion", where=target.name, expected="a CPU with Python, such as cpu")
    if draft_head is not None:
        raise ConfigError("a draft head is for models that write one token after the other", where=draft_head.path)


def _check_hears(target: Target) -> None:
    """Raise TargetError for a target whose hosts do not turn sound into text: Python does, on CPUs."""
    if target.kernels != "cpu" or target.archive or target.in_browsers:
        raise TargetError("no speech", where=target.name, expected="a target whose hosts hear, such as cpu")


def pictures_of(checkpoint: Checkpoint, target: Target, *, encoder: bool) -> PictureTower | None:
    """The checkpoint's tower, if hosts of the target show pictures to a model: Python's, on CPUs, without a draft head
    of another checkpoint, whose rows no pictures have.
    """
    if not isinstance(checkpoint.draft_head, OwnHead | None):
        return None
    if encoder or target.kernels != "cpu" or target.archive or target.in_browsers:
        return None
    return checkpoint.pictures


def kept_formats(target: Target) -> frozenset[str]:
    """GGUF's block formats that the target's kernels read."""
    kept: frozenset[str] = importlib.import_module(f"tir_schedules.{target.kernels}.formats").KEPT
    return kept


def output_of(model: LanguageModel) -> str | None:
    """The name of the matrix that the logits are computed from; None for a model that embeds texts."""
    if isinstance(model, TextEncoder):
        return None
    if isinstance(model, SpeechModel):
        return "model.decoder.embed_tokens.weight"
    return OUTPUT_NAMES[model.facts.tied]


def context_length(model: LanguageModel, target: Target, wanted: int | None) -> int:
    """Tokens of context that a bundle serves: `wanted`, or as many of the model's as one binding of the device holds.

    Raises ConfigError outside of 16 to 2**24 and beyond the model's bound, TargetError if `wanted` does not fit a
    binding.
    """
    max_tokens = _cached_tokens(model, target)
    length = min(model.facts.context_length, max_tokens) if wanted is None else wanted
    how = model.facts.diffusion
    least = max(16, 2 * how.block) if isinstance(how, DiffusionInfo) else 16
    if not least <= length <= 1 << 24:
        raise ConfigError("context length", expected=f"{least} to 16777216 tokens", found=length)
    if length > (model.facts.bound or length):
        expected = (
            f"at most {model.facts.bound} tokens for {model.facts.model_type}, which attends within chunks of them"
        )
        raise ConfigError("context length", expected=expected, found=length, next_step="ask for less with --context")
    if length > max_tokens:
        raise TargetError(
            "the KV cache of a layer does not fit a binding",
            where=target.name,
            expected=f"a context of at most {max_tokens} tokens",
            found=length,
            next_step="ask for less with --context, or raise limits.max_binding_bytes in a target file of your own",
        )
    return length


def _cached_tokens(model: LanguageModel, target: Target) -> int:
    """Tokens whose keys and values of one layer fit a binding; TVM's cache allocates one page to spare."""
    limit = target.limits.get("max_binding_bytes")
    if limit is None:
        return 1 << 24
    page = max((state.unit_bytes for state in model.states() if state.kind == "pages"), default=1)
    return max(0, limit // page - (not target.own_pages)) * PAGE


def prefill_chunk(model: LanguageModel, target: Target, context: int) -> int:
    """Tokens of one prefill call, bounded by the target, the context and, with TVM's cache, the sliding window.

    There, within one window, tokens of a chunk need no window mask between them (gpu/attention/prefill.py). A picture
    whose rows see each other is in one call, and so is a text whose tokens all do.
    """
    if isinstance(model.facts.diffusion, WholeAnswerInfo):
        return context
    windows = [of.window for of in model.attentions() if of.window and not target.own_pages]
    chunk = min(target.limits["max_prefill_chunk"], context, *windows)
    tower = model.tower if isinstance(model, CausalLM) else None
    return max(chunk, tower.info.rows) if tower is not None and tower.info.ahead else chunk


def export(
    model: LanguageModel,
    target: Target,
    scheme: Scheme,
    chunk: int,
    variant: Variant | None = None,
    no_tokens: Sequence[tuple[int, int]] = (),
) -> Lowering:
    """The IRModule with all entry points and the weight table, before any pass.

    `variant` None is the target's best. Ids in the ranges [begin, end) of `no_tokens` are never drawn, nor is a mask.
    """
    vocab = model.facts.vocab_size
    mod, params = exported(model, entry_points(model, target.own_pages))
    rows = min(chunk, max(MAX_BATCH, LOGITS_BYTES // (4 * vocab)))
    if isinstance(model, TextEncoder):
        rows = chunk
    elif not isinstance(model, SpeechModel) and (model.stage is None or model.stage.last):
        how, draw = model.facts.diffusion, "sample"
        if how is not None:
            no_tokens, draw = [*no_tokens, (how.mask, how.mask + 1)], DRAWS[how.denoises]
        if isinstance(how, WholeAnswerInfo):
            rows = max(rows, min(chunk, MAX_ASKED))
        mod = _with_sampling(mod, target, vocab, no_tokens, draw)
    tower = model.tower if isinstance(model, CausalLM) else None
    most = {} if tower is None else {**tower.bounds(), "e": chunk}
    most |= {"t": model.shape.rows} if isinstance(model, SpeechModel) else {}
    return Lowering(
        mod,
        tuple(weight_table(params, target.gathers_rows)),
        target,
        variant or compiled_variants(target)[0],
        scheme,
        load_layout(target.weight_layout),
        bounds={"n": chunk, "v": chunk, "b": MAX_BATCH, "d": MAX_BATCH, "r": rows, **most},
    )


def _with_sampling(
    mod: tvm.IRModule, target: Target, vocab_size: int, no_tokens: Sequence[tuple[int, int]], draw: str
) -> tvm.IRModule:
    """Add the sampling functions: in-place kernels as they are, the others wrapped to return their outputs."""
    kernels = importlib.import_module(f"tir_schedules.{target.kernels}.sampling")
    functions = kernels.sampling_functions(vocab_size)
    bb = relax.BlockBuilder(mod)
    forbid = [
        bb.add_func(kernels.forbid_inplace(vocab_size, no_tokens[at : at + _RANGES]), f"{FORBID.name}_kernel")
        for at in range(0, len(no_tokens), _RANGES)
    ]
    for name in sampling_names(target.own_pages, draw):
        func = functions[name]
        if name.endswith("_inplace"):
            bb.update_func(bb.add_func(func, name), func.with_attr("global_symbol", name))
            continue
        takes_logits = SIGNATURES[name].inputs[0] == FORBID.inputs[0]
        _emit_sampling(
            bb, SIGNATURES[name], bb.add_func(func, f"{name}_kernel"), vocab_size, forbid if takes_logits else ()
        )
    return bb.get()


def _emit_sampling(
    bb: relax.BlockBuilder,
    signature: Signature,
    kernel: tvm.ir.GlobalVar,
    vocab: int,
    before: Sequence[tvm.ir.GlobalVar],
) -> None:
    """Add a Relax function that calls a sampling kernel and returns its last buffers.

    The kernels `before` change its first argument in place.
    """
    sizes: dict[str, Any] = dict(dimensions(vocab))

    def types(tensors: tuple[TensorType, ...]) -> list[relax.TensorType]:
        symbols = {size for tensor in tensors for size in tensor.shape if isinstance(size, str)} - set(sizes)
        sizes.update({symbol: tvm.tirx.Var(symbol, "int64") for symbol in sorted(symbols)})
        return [
            relax.TensorType([size if isinstance(size, int) else sizes[size] for size in t.shape], t.dtype)
            for t in tensors
        ]

    params = [relax.Var(f"arg{i}", kind) for i, kind in enumerate(types(signature.inputs))]
    outputs = types(signature.outputs)
    with bb.function(signature.name, params, attrs={"num_input": len(params)}):
        with bb.dataflow():
            first, *others = params
            for change in before:
                first = bb.emit(relax.op.call_tir_inplace(change, [first], [0], params[0].ty))
            call = relax.call_tir(kernel, [first, *others], outputs if len(outputs) > 1 else outputs[0])
            result = bb.emit_output(call)
        bb.emit_func_output(result)


def with_metadata(mod: tvm.IRModule, metadata: Mapping[str, Any]) -> tvm.IRModule:
    """Add `_metadata() -> str`, JSON that the runtime and MLC's hosts read."""
    bb = relax.BlockBuilder(mod)
    with bb.function("_metadata", params=[]):
        bb.emit_func_output(StringImm(json.dumps(metadata)))
    return bb.get()
