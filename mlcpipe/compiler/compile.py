"""Checkpoint to bundle: lower, schedule, generate code, link, convert weights, describe; all or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mlcpipe import debug
from mlcpipe import env as environment
from mlcpipe.atomic import atomic_directory
from mlcpipe.bundle import (
    ENTRY_POINTS,
    MLC_CONFIG,
    FileInfo,
    KernelInfo,
    LinkerInfo,
    Manifest,
    MemoryPlan,
    ModelInfo,
    TargetInfo,
    VariantInfo,
    abi_hash,
    derive_conv_template,
    mlc_chat_config,
    write_manifest,
)
from mlcpipe.bundle.manifest import FORMAT_VERSION
from mlcpipe.checkpoint import Checkpoint, open_checkpoint, resolve
from mlcpipe.compiler.build import BuiltVariant
from mlcpipe.compiler.convert import check_memory, convert_weights, param_infos
from mlcpipe.compiler.export import context_length, export, prefill_chunk, prepare_model, with_metadata
from mlcpipe.compiler.library import LibraryWriter, find_writer
from mlcpipe.compiler.weights import check_sources, weight_table
from mlcpipe.errors import TemplateError
from mlcpipe.files import file_info
from mlcpipe.nn.causal_lm import ModelFacts
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelReport, Lowering
from mlcpipe.passes.plan_memory import workspace_bytes
from mlcpipe.progress import Progress, SilentProgress
from mlcpipe.quantization.scheme import Scheme, load_scheme
from mlcpipe.runtime.threads import use_threads
from mlcpipe.runtime.tokenizer import Tokenizer
from mlcpipe.targets import Variant, compiled_variants, load_target, triple, tvm_target
from mlcpipe.version import __version__

DEFAULT_QUANTIZATION = "q4f16_1"
_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class _Job:
    """Everything about one compile that does not change while it runs."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    scheme: Scheme
    facts: ModelFacts
    state: Lowering
    variants: tuple[Variant, ...]
    context: int
    chunk: int
    kv_dtype: str
    kv_bytes_per_token: int


def compile(
    checkpoint: str | Path,
    *,
    target: str = "cpu",
    quantization: str = DEFAULT_QUANTIZATION,
    output: str | Path,
    context_length: int | None = None,
    kv_cache_dtype: str = "auto",
    quick: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Compile a Hugging Face checkpoint into the bundle folder `output`, which appears whole or not at all.

    Args:
        checkpoint: a folder with config.json and safetensors, or `hf://org/name[@revision]`.
        target: a target that comes with mlcpipe, or a path to a `.toml` file. `cpu` is for every CPU of this
            architecture: one library with a variant for each level of instructions; `cpu-native` for this machine's.
        quantization: q0f32 q0f16 q4f32_1 q4f16_1 q8f32_1 q8f16_1 q8f32_0 q8f16_0 q3f16_1.
        context_length: tokens of context to serve; None is what config.json says.
        kv_cache_dtype: f32, f16 or q8 (int8 with a scale for each 32 numbers); auto is the quantization's dtype.
        quick: link WebAssembly in seconds instead of a minute, twice as large; other targets have no such choice.
        overwrite: replace a folder that is not empty.

    Raises an error of `mlcpipe.errors` that says what, where and what to do.
    """
    progress = progress or SilentProgress()
    source = open_checkpoint(resolve(checkpoint, progress))
    progress.stage("lower the model")
    writer = find_writer(load_target(target), quick)
    job = _lower(source, target, quantization, context_length, kv_cache_dtype)
    check_memory(job.state.weights)
    with atomic_directory(Path(output), overwrite=overwrite, needed_bytes=_needed_bytes(job)) as folder:
        progress.stage("compile the kernels")
        files, built = _write_library(job, folder, writer, progress)
        progress.stage("convert weights")
        files |= convert_weights(job.state.weights, source, folder, progress)
        progress.stage("describe the bundle")
        files |= _copy_texts(job, folder)
        write_manifest(folder, _manifest(job, files, built, writer))
    return Path(output)


def convert(
    checkpoint: str | Path,
    *,
    target: str = "cpu",
    quantization: str = DEFAULT_QUANTIZATION,
    output: str | Path,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Only the weights: packed shards, `tensor-cache.json` and config of a checkpoint, in the layout of `target`."""
    progress = progress or SilentProgress()
    source = open_checkpoint(resolve(checkpoint, progress))
    progress.stage("lower the model")
    job = _lower(source, target, quantization, None)
    check_memory(job.state.weights)
    with atomic_directory(Path(output), overwrite=overwrite, needed_bytes=_needed_bytes(job)) as folder:
        progress.stage("convert weights")
        convert_weights(job.state.weights, source, folder, progress)
        _copy_texts(job, folder)
    return Path(output)


def _lower(
    source: Checkpoint, target_name: str, quantization: str, context: int | None, kv_cache_dtype: str = "auto"
) -> _Job:
    use_threads()  # before TVM folds a constant and makes its pool with another number
    target, scheme = load_target(target_name), load_scheme(quantization)
    model = prepare_model(source.config, target, scheme, kv_cache_dtype)
    context = context_length(model.facts, context)
    chunk = prefill_chunk(model.facts, target, context)
    tokenizer = _tokenizer(source)
    check_sources(weight_table(model.named_parameters()), source, tied=model.facts.tied)
    variants = compiled_variants(target)
    state = export(model, target, scheme, chunk)
    state, seconds = pipeline.run(state, pipeline.SHARED, dump=environment.env().dump)
    debug.show(debug.TIMINGS, lambda: _timings(seconds))
    debug.show(debug.IR, lambda: str(state.mod.script(show_meta=False)))
    kv_bytes = model.facts.num_layers * model.attention_shape().bytes_per_token
    return _Job(source, tokenizer, scheme, model.facts, state, variants, context, chunk, model.kv_dtype, kv_bytes)


def _timings(seconds: Mapping[str, float], what: str = "") -> str:
    return "\n".join(f"{1e3 * s:8.1f} ms  {what}{name}" for name, s in seconds.items())


def _tokenizer(source: Checkpoint) -> Tokenizer | None:
    if not any((source.path / name).is_file() for name in (_TOKENIZER, "vocab.json")):
        return None
    return Tokenizer.load(source.path, generation_config=source.generation_config, config=source.config)


def _needed_bytes(job: _Job) -> int:
    return sum(w.nbytes for w in job.state.weights) + (64 << 20)


def _write_library(
    job: _Job, folder: Path, writer: LibraryWriter, progress: Progress
) -> tuple[dict[str, FileInfo], list[BuiltVariant]]:
    metadata = {
        "model_type": job.facts.model_type,
        "quantization": job.scheme.name,
        "context_window_size": job.context,
        "sliding_window_size": -1,
        "attention_sink_size": -1,
        "prefill_chunk_size": job.chunk,
        "tensor_parallel_shards": 1,
        "kv_state_kind": "kv_cache",
        "params": [
            {"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "preprocs": []}
            for p in param_infos(job.state.weights)
        ],
        "memory_usage": workspace_bytes(job.state.mod),
        # ours: the runtime compares these with the manifest
        "model": _model_info(job).model_dump(mode="json"),
        "variants": [{"name": v.name, "features": list(v.features)} for v in job.variants],
    }
    state = job.state.with_mod(with_metadata(job.state.mod, metadata))
    (folder / "lib").mkdir()
    path, built = writer.write(state, job.variants, folder / "lib", progress)
    debug.show(debug.TIMINGS, lambda: "\n".join(_timings(b.seconds, f"{b.variant.name}: ") for b in built))
    debug.show(debug.RULES, lambda: "\n".join(_rules(b) for b in built))
    debug.show(debug.SOURCE, lambda: "\n".join(_source(writer, state, variant) for variant in job.variants))
    return {f"lib/{path.name}": file_info(path)}, built


def _rules(one: BuiltVariant) -> str:
    return "\n".join(f"{one.variant.name} | {k.name} | {k.rule} | {k.reason}" for k in one.kernels)


def _source(writer: LibraryWriter, state: Lowering, variant: Variant) -> str:
    scheduled, _ = pipeline.run(replace(state, variant=variant), pipeline.PER_VARIANT)
    return f"# {variant.name}\n{writer.source(scheduled)}"


def _copy_texts(job: _Job, folder: Path) -> dict[str, FileInfo]:
    """Configuration and tokenizer files, and MLC's chat config where there is a tokenizer.json."""
    source, tokenizer = job.checkpoint, job.tokenizer
    names = [name for name in _CONFIG_FILES if (source.path / name).is_file()]
    if tokenizer is not None:
        names += [path.name for path in tokenizer.files()]
    for name in names:
        shutil.copyfile(source.path / name, folder / name)
    if tokenizer is not None and _TOKENIZER in names:
        names.append(MLC_CONFIG)
        config = _mlc_config(job, tokenizer, names)
        (folder / MLC_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {name: file_info(folder / name) for name in names}


def _mlc_config(job: _Job, tokenizer: Tokenizer, names: Sequence[str]) -> dict[str, Any]:
    source = job.checkpoint
    parsed = json.loads((source.path / _TOKENIZER).read_text(encoding="utf-8"))
    conv_template = None
    if tokenizer.chat_templates:
        try:
            template = tokenizer.chat_template()
            conv_template = derive_conv_template(
                lambda messages, generation: template.render(messages, add_generation_prompt=generation),
                name=job.facts.model_type,
                bos_token=tokenizer.special_tokens.get("bos_token"),
                special_tokens={t["content"]: t["id"] for t in parsed.get("added_tokens", [])},
                stop_token_ids=sorted(tokenizer.eos_token_ids),
            )
        except TemplateError:
            conv_template = None  # our engine renders the Jinja template; MLC's hosts get plain completion
    # The compiled cache keeps all pages and masks by position, so MLC's sliding window stays off.
    return mlc_chat_config(
        model=_model_info(job).model_copy(update={"sliding_window": None}),
        quantization=job.scheme.name,
        model_config=source.config,
        tokenizer_files=[name for name in names if name not in (*_CONFIG_FILES, MLC_CONFIG)],
        tokenizer_json=parsed,
        conv_template=conv_template,
        generation_config=source.generation_config,
    )


def _model_info(job: _Job) -> ModelInfo:
    f = job.facts
    longrope = next((rope.switch_length for rope in f.ropes if rope.long_inv_freq), None)
    return ModelInfo(
        model_type=f.model_type,
        vocab_size=f.vocab_size,
        hidden_size=f.hidden_size,
        num_layers=f.num_layers,
        num_attention_heads=f.num_heads,
        num_key_value_heads=f.num_kv_heads,
        head_dim=f.head_dim,
        context_length=job.context,
        sliding_window=f.window,
        dtype=job.state.target.activation_dtype,
        kv_dtype=job.kv_dtype,
        prefill_chunk=job.chunk,
        recompute_above=longrope,
    )


def _variants(job: _Job, built: Sequence[BuiltVariant]) -> tuple[VariantInfo, ...]:
    return tuple(
        VariantInfo(
            name=one.variant.name,
            features=one.variant.features,
            tvm_target=str(tvm_target(job.state.target, one.variant)),
            bytes=one.nbytes,
        )
        for one in built
    )


def _kernels(built: Sequence[BuiltVariant]) -> tuple[KernelInfo, ...]:
    """What the rules said, once for all variants that they said it of."""
    by_report: dict[KernelReport, list[str]] = {}
    for one in built:
        for report in one.kernels:
            by_report.setdefault(report, []).append(one.variant.name)
    return tuple(
        KernelInfo(variants=tuple(names), name=k.name, op=k.op, rule=k.rule, reason=k.reason)
        for k, names in sorted(by_report.items(), key=lambda item: item[0].name)
    )


def _manifest(
    job: _Job, files: Mapping[str, FileInfo], built: Sequence[BuiltVariant], writer: LibraryWriter
) -> Manifest:
    state = job.state
    return Manifest(
        format_version=FORMAT_VERSION,
        mlcpipe_version=__version__,
        abi=abi_hash(),
        target=TargetInfo(
            name=state.target.name,
            triple=triple(state.target),
            variants=_variants(job, built),
        ),
        model=_model_info(job),
        quantization=job.scheme.name,
        weight_layout=state.layout.name,
        entry_points=ENTRY_POINTS,
        params=tuple(param_infos(state.weights)),
        memory_plan=MemoryPlan(
            weights_bytes=sum(w.nbytes for w in state.weights),
            decode_weights_bytes=sum(w.decode_nbytes for w in state.weights),
            kv_bytes_per_token=job.kv_bytes_per_token,
            workspace_bytes=workspace_bytes(state.mod),
        ),
        kernels=_kernels(built),
        linker=LinkerInfo(name=writer.name, version=writer.version),
        checkpoint_hash=job.checkpoint.content_hash(environment.env().cache_dir / "hashes"),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        files=dict(files),
    )
