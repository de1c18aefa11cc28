"""Checkpoint to bundle: lower, schedule, generate code, link, convert weights, describe; all or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlcpipe import debug
from mlcpipe import env as environment
from mlcpipe.atomic import atomic_directory
from mlcpipe.bundle import MLC_CONFIG, FileInfo, write_manifest
from mlcpipe.checkpoint import Checkpoint, open_checkpoint, resolve
from mlcpipe.compiler.build import BuiltVariant
from mlcpipe.compiler.convert import check_memory, convert_weights, param_infos
from mlcpipe.compiler.describe import CONFIG_FILES, TOKENIZER, Job, Library, manifest, mlc_config, model_info
from mlcpipe.compiler.export import context_length, export, prefill_chunk, prepare_model, with_metadata
from mlcpipe.compiler.library import LibraryWriter, find_writer
from mlcpipe.compiler.weights import check_sources, weight_table
from mlcpipe.errors import TargetError
from mlcpipe.files import file_info
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.passes.plan_memory import workspace_bytes
from mlcpipe.progress import Progress, SilentProgress
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.runtime.threads import use_threads
from mlcpipe.runtime.tokenizer import Tokenizer
from mlcpipe.targets import Variant, compiled_variants, load_target
from mlcpipe.tuning.devices import tuned_here

AUTO = "auto"
DEFAULT_QUANTIZATION = "q4f16_1"


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
        quantization: q0f32 q0f16 q4f32_1 q4f16_1 q8f32_1 q8f16_1 q8f32_0 q8f16_0 q3f16_1; auto is q4f16_1, and for
            a target with companions (of webgpu, the one for GPUs with float16) a library for each beside the plain one.
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
    companions = load_target(target).companions if quantization == AUTO else ()
    jobs = [*(_companion(job, name, kv_cache_dtype) for name in companions), job]
    check_memory(job.state.weights)
    with atomic_directory(Path(output), overwrite=overwrite, needed_bytes=_needed_bytes(job)) as folder:
        progress.stage("compile the kernels")
        (folder / "lib").mkdir()
        libraries = [_write_library(one, folder, writer, progress, beside=job) for one in jobs]
        files = {library.path: file_info(folder / library.path) for library in libraries}
        progress.stage("convert weights")
        files |= convert_weights(job.state.weights, source, folder, job.state.target, progress)
        progress.stage("describe the bundle")
        files |= _copy_texts(job, folder)
        write_manifest(folder, manifest(libraries, files, writer))
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
        convert_weights(job.state.weights, source, folder, job.state.target, progress)
        _copy_texts(job, folder)
    return Path(output)


def _lower(
    source: Checkpoint,
    target_name: str,
    quantization: str,
    context: int | None,
    kv_cache_dtype: str = "auto",
    like: Job | None = None,
) -> Job:
    """The lowered model; `like` has been lowered from the same checkpoint."""
    use_threads()  # before TVM folds a constant and makes its pool with another number
    target = load_target(target_name)
    scheme = load_scheme(DEFAULT_QUANTIZATION if quantization == AUTO else quantization)
    model = prepare_model(source.config, target, scheme, kv_cache_dtype)
    context = context_length(model, target, context)
    chunk = prefill_chunk(model.facts, target, context)
    tokenizer = _tokenizer(source) if like is None else like.tokenizer
    check_sources(weight_table(model.named_parameters()), source, tied=model.facts.tied)
    variants = compiled_variants(target)
    state = replace(export(model, target, scheme, chunk), tuned=tuned_here(target, environment.env().cache_dir))
    state, seconds = pipeline.run(state, pipeline.SHARED, dump=environment.env().dump)
    debug.show(debug.TIMINGS, lambda: _timings(seconds))
    debug.show(debug.IR, lambda: str(state.mod.script(show_meta=False)))
    kv_bytes = model.facts.num_layers * model.attention_shape().bytes_per_token
    return Job(source, tokenizer, scheme, model.facts, state, variants, context, chunk, model.kv_dtype, kv_bytes)


def _companion(job: Job, name: str, kv_cache_dtype: str) -> Job:
    """The same model for a companion of its target. Raises TargetError where it would need other weights."""
    other = _lower(job.checkpoint, name, job.scheme.name, job.context, kv_cache_dtype, like=job)
    if param_infos(other.state.weights) != param_infos(job.state.weights):
        raise TargetError(
            f"the companion {name} stores weights in another way", where=job.state.target.name,
            expected=f"layout {job.state.layout.name}", found=other.state.layout.name,
        )  # fmt: skip
    return other


def _timings(seconds: Mapping[str, float], what: str = "") -> str:
    return "\n".join(f"{1e3 * s:8.1f} ms  {what}{name}" for name, s in seconds.items())


def _tokenizer(source: Checkpoint) -> Tokenizer | None:
    if not any((source.path / name).is_file() for name in (TOKENIZER, "vocab.json")):
        return None
    return Tokenizer.load(source.path, generation_config=source.generation_config, config=source.config)


def _needed_bytes(job: Job) -> int:
    return sum(w.nbytes for w in job.state.weights) + (64 << 20)


def _write_library(job: Job, folder: Path, writer: LibraryWriter, progress: Progress, beside: Job) -> Library:
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
        "model": model_info(job).model_dump(mode="json"),
        "variants": [{"name": v.name, "features": list(v.features)} for v in job.variants],
    }
    state = job.state.with_mod(with_metadata(job.state.mod, metadata))
    path, built = writer.write(state, job.variants, folder / "lib", progress)
    if job is not beside:  # webgpu-f16 beside another target for webgpu: model-f16
        suffix = job.state.target.name.removeprefix(f"{beside.state.target.tvm['kind']}-")
        path = path.rename(path.with_stem(f"{path.stem}-{suffix}"))
    debug.show(debug.TIMINGS, lambda: "\n".join(_timings(b.seconds, f"{b.variant.name}: ") for b in built))
    debug.show(debug.RULES, lambda: "\n".join(_rules(b) for b in built))
    debug.show(debug.SOURCE, lambda: "\n".join(_source(writer, state, variant) for variant in job.variants))
    return Library(job, f"lib/{path.name}", tuple(built))


def _rules(one: BuiltVariant) -> str:
    return "\n".join(f"{one.variant.name} | {k.name} | {k.rule} | {k.reason}" for k in one.kernels)


def _source(writer: LibraryWriter, state: Lowering, variant: Variant) -> str:
    scheduled, _ = pipeline.run(replace(state, variant=variant), pipeline.PER_VARIANT)
    return f"# {variant.name}\n{writer.source(scheduled)}"


def _copy_texts(job: Job, folder: Path) -> dict[str, FileInfo]:
    """Configuration and tokenizer files, and MLC's chat config where there is a tokenizer.json."""
    source, tokenizer = job.checkpoint, job.tokenizer
    names = [name for name in CONFIG_FILES if (source.path / name).is_file()]
    if tokenizer is not None:
        names += [path.name for path in tokenizer.files()]
    for name in names:
        shutil.copyfile(source.path / name, folder / name)
    if tokenizer is not None and TOKENIZER in names:
        names.append(MLC_CONFIG)
        config = mlc_config(job, tokenizer, names)
        (folder / MLC_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {name: file_info(folder / name) for name in names}
