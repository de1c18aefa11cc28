"""Checkpoint to bundle: lower, schedule, generate code, link, convert weights, describe; all or nothing."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from mlcpipe.bundle import MANIFEST, MLC_CONFIG, FileInfo, Manifest, write_manifest
from mlcpipe.bundle.integrity import file_info
from mlcpipe.bundle.origin import accept, forget
from mlcpipe.bundle.tensor_cache import TENSOR_CACHE
from mlcpipe.checkpoint import Checkpoint, open_checkpoint, resolve
from mlcpipe.checkpoint.draft_heads import NO_HEAD, with_draft_head
from mlcpipe.checkpoint.gguf.mmproj import NO_MMPROJ, with_mmproj
from mlcpipe.compiler.backends import backend_of, find_writer
from mlcpipe.compiler.backends.base import LibraryWriter
from mlcpipe.compiler.build import BuiltVariant
from mlcpipe.compiler.calibration.duration import expected_duration
from mlcpipe.compiler.calibration.outliers import Folding, folded_tensors, folding_of
from mlcpipe.compiler.calibration.quantize import calibrated
from mlcpipe.compiler.calibration.text import CalibrationText, calibration_text
from mlcpipe.compiler.export import pictures_of, with_metadata
from mlcpipe.compiler.job import Job, lower, lower_companion
from mlcpipe.compiler.manifest import CONFIG_FILES, BuiltLibrary, library_metadata, manifest, mlc_config
from mlcpipe.compiler.preflight import BUNDLE_BYTES, Purpose
from mlcpipe.compiler.stages import StagePart, check_options, lower_stages, parts_of, write_stages
from mlcpipe.compiler.text.programs import text_programs
from mlcpipe.errors import ConfigError, TargetError
from mlcpipe.host.finding import byte_size
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.native_formats import SCHEMES
from mlcpipe.quantization.packing import method_of
from mlcpipe.quantization.recipe import QuantizationRecipe, block_columns
from mlcpipe.support import debug
from mlcpipe.support.atomic import atomic_directory
from mlcpipe.support.defaults import AUTO, AWQ, DEFAULT_TARGET, GPTQ, KEEP, NO_CALIBRATION, UNIFORM_QUANTIZATION
from mlcpipe.support.progress import Progress, SilentProgress
from mlcpipe.targets import Variant, load_target
from mlcpipe.weights.convert import check_memory, convert_weights, quantized


def compile(
    checkpoint: str | Path,
    *,
    target: str = DEFAULT_TARGET,
    quantization: str | QuantizationRecipe | None = None,
    output: str | Path,
    context_length: int | None = None,
    method: str | None = None,
    calibration: str | Path | None = None,
    fold_outliers: str | Path | None = None,
    kv_cache_dtype: str = "auto",
    adapters: bool = False,
    draft_head: str | Path | None = None,
    mmproj: str | Path | None = None,
    stages: Sequence[int] | None = None,
    quick: bool = False,
    overwrite: bool = False,
    check: Callable[[Path], object] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compile a checkpoint into the bundle folder `output`, which appears whole or not at all.

    Args:
        checkpoint: a folder with config.json and safetensors, a GGUF file, `hf://org/name[@revision]`,
            `hf://org/name:TAG` for one of a folder's GGUF files, or `ollama://name[:tag]` for a model of Ollama's.
        target: the name of a target of mlcpipe, or a path to a `.toml` file. `cpu` runs on every CPU of this
            architecture: one library with a variant for each instruction set; `cpu-native` on this machine.
        quantization: q0f32 q0f16 q4f32_1 q4f16_1 q8f32_1 q8f16_1 q8f32_0 q8f16_0 q4f16_k q4f16_m q3f16_1; a recipe, or
            the path of its .toml file, gives each matrix its own; keep stores every matrix as the checkpoint has it;
            auto is the default, plus one library for each companion of the target (webgpu has one for GPUs with
            float16). Default: keep for weights that are quantized already, else q4f16_m.
        context_length: tokens of context to serve. Default: config.json's.
        method: search finds the scales of 3- and 4-bit codes that leave the least error; rtn takes the largest
            magnitude of a group, as MLC-LLM does; awq scales up columns whose errors matter; gptq lets columns
            compensate for the errors of earlier ones, which takes minutes. Default: search for 3 and 4 bits, else rtn.
        calibration: the path of a text on which the model runs layer by layer, so that search, awq and gptq know
            which columns' errors matter; own: the built-in text; none: no text. Default: own for awq and gptq, else
            none.
        fold_outliers: weights: large channels of activations are folded into the matrices before, by a look at the
            weights; a path of a text, or own: by the activations on it. The function stays, roundings lose less. Only
            of weights that are not quantized yet, and without adapters. Default: none.
        kv_cache_dtype: f32, f16, q8 (int8 with a scale for each 32 numbers) or q4 (4 bits, of rotated heads); auto is
            the target's choice, else the quantization's dtype.
        adapters: the bundle can run with LoRA adapters, chosen at run time.
        draft_head: a folder with an EAGLE-3 head, Medusa heads or an assistant of Gemma 4, or `hf://org/name`, by which
            answers are drafted; `none` leaves out the layer that drafts in the checkpoint itself.
        mmproj: the file with the tower of a GGUF model that sees, instead of the one beside it; `none` for the text
            alone.
        stages: numbers of layers: the first so many run on one device, the next on another. `target` names one target
            for each, as in "vulkan,cpu", or one for all.
        quick: link WebAssembly in seconds instead of a minute, twice as large; an error for other targets.
        overwrite: replace a folder that holds a bundle.
        check: called with the complete bundle before it appears as `output`; if it raises, no bundle is written.

    Raises an error of `mlcpipe.errors` that says what, where and what to do.
    """
    progress = progress or SilentProgress()
    purpose = Purpose(
        target.split(",")[0] if stages is not None else target, quantization, kv_cache_dtype, disk=Path(output),
        title=str(checkpoint), method=method,
    )  # fmt: skip
    source = open_checkpoint(resolve(checkpoint, progress, check=purpose.check))
    folding = folding_of(fold_outliers, source, method=method, adapters=adapters)
    if mmproj is not None:
        source = with_mmproj(source, mmproj)
    for note in source.notes:
        progress.note(note)
    if stages is not None:
        on_text = folding is not None and folding.text is not None
        fitted = on_text or calibration not in (None, NO_CALIBRATION) or method in (AWQ, GPTQ)
        given = source.quantization(quantization) if quantization is None else quantization
        check_options(given, adapters=adapters, draft_head=draft_head not in (None, NO_HEAD), fitted=fitted)
        if mmproj not in (None, NO_MMPROJ):
            raise ConfigError("an mmproj file", where=str(mmproj), expected="a model in one piece", found="stages")
        quantization = _quantization(source, quantization, progress)
        progress.stage("lower the model")
        parts = parts_of(source, target, stages)
        jobs = lower_stages(source, parts, quantization, context_length, kv_cache_dtype)
        return _compile_stages(parts, jobs, Path(output), method, folding, quick, overwrite, check, progress)
    if draft_head is not None:
        source = with_draft_head(source, NO_HEAD if draft_head == NO_HEAD else resolve(draft_head, progress))
    quantization = _quantization(source, quantization, progress)
    progress.stage("lower the model")
    described = load_target(target)
    writer = find_writer(described, quick=quick)
    if mmproj not in (None, NO_MMPROJ) and pictures_of(source, described, encoder=False) is None:
        expected = "a target whose hosts show pictures, such as cpu, and no draft head of another checkpoint"
        raise TargetError("no pictures, which --mmproj is for", where=target, expected=expected)
    job = lower(source, described, quantization, context_length, kv_cache_dtype, adapters=adapters)
    method = method_of(job.scheme, method, job.schemes)
    text = calibration_text(method, calibration)
    _announce(job, method, progress)
    texts = [one.sha256 for one in (text, folding and folding.text) if one]
    fitted_to = dict.fromkeys((*source.fitted_to, job.plan.text_sha256, *texts))
    if job.tokenizer is None:
        progress.note("the checkpoint has no tokenizer: the bundle takes token ids, and `mlcpipe chat` refuses it")
    companions = described.companions if quantization == AUTO else ()
    jobs = [*(lower_companion(job, name, kv_cache_dtype) for name in companions), job]
    check_memory(job.state.weights)
    replaces = MANIFEST if overwrite else ""
    with atomic_directory(Path(output), replaces=replaces, needed_bytes=_needed_bytes(job)) as folder:
        libraries, files = _write_libraries(jobs, folder, writer, progress)
        progress.stage("convert weights")
        files |= _convert(job, folder, method, text, folding, progress)
        progress.stage("describe the bundle")
        files |= _copy_texts(job, folder, progress)
        write_manifest(folder, manifest(libraries, files, writer, [one for one in fitted_to if one]))
        accept(folder)
        if check is not None:
            _check(folder, check)
    return Path(output)


def _compile_stages(
    parts: Sequence[StagePart], jobs: Sequence[Job], output: Path, method: str | None, folding: Folding | None,
    quick: bool, overwrite: bool, check: Callable[[Path], object] | None, progress: Progress,
) -> Path:  # fmt: skip
    """`compile` of the stages of a model, whose weights are converted one stage after the other."""
    writers = {part.target.name: find_writer(part.target, quick=quick) for part in parts}
    needed = sum(job.weights_bytes for job in jobs) + BUNDLE_BYTES
    with atomic_directory(output, replaces=MANIFEST if overwrite else "", needed_bytes=needed) as folder:

        def write(job: Job, own: Path) -> Manifest:
            check_memory(job.state.weights)
            libraries, files = _write_libraries([job], own, writers[job.target.name], progress)
            progress.stage("convert weights")
            files |= _convert(job, own, method_of(job.scheme, method, job.schemes), None, folding, progress)
            return manifest(libraries, files, writers[job.target.name], job.checkpoint.fitted_to)

        write_stages(parts, jobs, folder, write, lambda job, own: _copy_texts(job, own, progress))
        if check is not None:
            _check(folder, check)
    return output


def _check(folder: Path, check: Callable[[Path], object]) -> None:
    """Let `check` open a bundle before it appears; a refused bundle is no longer trusted."""
    try:
        check(folder)
    except BaseException:
        forget(folder)
        raise


def compile_code(checkpoint: Path, *, target: str, output: Path) -> Path:
    """A bundle without weights and tokenizer, for measurements whose weights are made on the device.

    Reads only the checkpoint's config.json and the names and shapes of tensors. Raises what `compile` raises.
    """
    described = load_target(target)
    writer = find_writer(described, quick=False)
    job = lower(open_checkpoint(checkpoint), described, UNIFORM_QUANTIZATION)
    with atomic_directory(output) as folder:
        libraries, files = _write_libraries([job], folder, writer, SilentProgress())
        write_manifest(folder, manifest(libraries, files, writer, ()))
        accept(folder)
    return output


def convert(
    checkpoint: str | Path,
    *,
    target: str = DEFAULT_TARGET,
    quantization: str | QuantizationRecipe | None = None,
    output: str | Path,
    method: str | None = None,
    calibration: str | Path | None = None,
    fold_outliers: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write only the weights of a bundle: packed shards, `tensor-cache.json` and configuration, laid out for `target`.

    `method`, `calibration` and `fold_outliers` are as in `compile`. `overwrite` replaces a folder with a
    `tensor-cache.json`.
    """
    progress = progress or SilentProgress()
    purpose = Purpose(target, quantization, disk=Path(output), title=str(checkpoint), method=method)
    source = open_checkpoint(resolve(checkpoint, progress, check=purpose.check))
    folding = folding_of(fold_outliers, source, method=method)
    quantization = _quantization(source, quantization, progress)
    progress.stage("lower the model")
    job = lower(source, load_target(target), quantization)
    method = method_of(job.scheme, method, job.schemes)
    text = calibration_text(method, calibration)
    _announce(job, method, progress)
    check_memory(job.state.weights)
    replaces = TENSOR_CACHE if overwrite else ""
    with atomic_directory(Path(output), replaces=replaces, needed_bytes=_needed_bytes(job)) as folder:
        progress.stage("convert weights")
        _convert(job, folder, method, text, folding, progress)
        _copy_texts(job, folder, progress)
    return Path(output)


def _convert(
    job: Job, folder: Path, method: str, text: CalibrationText | None, folding: Folding | None, progress: Progress
) -> dict[str, FileInfo]:
    """Write the weights of a job, quantized by a method. Raises ConfigError for a model that embeds texts."""
    weights, source = job.state.weights, job.checkpoint
    fitted = "a calibration text" if text is not None else "--fold-outliers" if folding is not None else ""
    if fitted and (job.embedding is not None or job.speech is not None):
        raise ConfigError(
            f"{fitted} is for models that write text", where=source.path, found=job.facts.model_type,
            next_step="leave out --fold-outliers" if text is None else "add --method search --calibration none",
        )  # fmt: skip
    tensors = None if folding is None else folded_tensors(folding, weights, source, job.tokenizer, progress)
    if text is None:
        arrays = quantized(weights, tensors or source, method)
    else:
        arrays = calibrated(weights, source, job.tokenizer, text, method, tensors)
    return convert_weights(weights, arrays, source, folder, job.target, progress)


def _quantization(
    source: Checkpoint, requested: str | QuantizationRecipe | None, progress: Progress
) -> str | QuantizationRecipe:
    """The quantization to store weights in; notes a second rounding in the progress. Raises UsageError."""
    quantization = requested if isinstance(requested, QuantizationRecipe) else source.quantization(requested)
    if source.quantized_as is not None and quantization not in ("q0f32", KEEP):
        name = quantization.name if isinstance(quantization, QuantizationRecipe) else quantization
        progress.note(f"weights of {source.quantized_as} are rounded a second time, to {name}")
    elif quantization == KEEP and not source.keeps_all:
        progress.note(f"some weights of {source.quantized_as} are rounded a second time: no kernel reads their form")
    return quantization


_ROW = Fraction(1, 1000)  # of a table, at most, is what a token reads


def _announce(job: Job, method: str, progress: Progress) -> None:
    """Note matrices that a scheme's block format cannot hold, large ones of which a token reads a row, and how long
    gptq will take.
    """
    matrices = [weight for weight in job.state.weights if weight.kind == "scheme"]
    left = [weight for weight in matrices if job.scheme.mixed and weight.scheme == job.scheme]
    if left:
        rows = ", ".join(str(k) for k in sorted({weight.shape[-1] for weight in left}))
        progress.note(
            f"{len(left)} of {len(matrices)} matrices are stored as {UNIFORM_QUANTIZATION}: {job.scheme.blocks} needs "
            f"rows of a multiple of {block_columns(SCHEMES[job.scheme.blocks])} numbers, and theirs have {rows}"
        )
    tables: Counter[str] = Counter()
    for weight in (weight for weight in matrices if weight.reads <= _ROW):
        mapped = weight.gathered or job.target.kernels == "cpu"
        tables["the mapped file" if mapped else "the GPU's memory, all of them"] += weight.nbytes
    for place, nbytes in tables.items():
        if nbytes > job.weights_bytes / 8:
            progress.note(
                f"{byte_size(nbytes)} of the weights are tables of which a token reads a row: they are in {place}"
            )
    if method == GPTQ:
        progress.note(expected_duration(job.state.weights))


def _needed_bytes(job: Job) -> int:
    """Disk space for the weights and everything else."""
    return job.weights_bytes + BUNDLE_BYTES


def _write_libraries(
    jobs: Sequence[Job], folder: Path, writer: LibraryWriter, progress: Progress
) -> tuple[list[BuiltLibrary], dict[str, FileInfo]]:
    """Write the libraries of a bundle into `lib/`, in the order of `jobs` -> the built libraries, and the files."""
    progress.stage("compile the kernels")
    (folder / "lib").mkdir()
    libraries = [_write_library(job, folder, writer, progress) for job in jobs]
    return libraries, {f"lib/{path.name}": file_info(path) for path in sorted((folder / "lib").iterdir())}


def _write_library(job: Job, folder: Path, writer: LibraryWriter, progress: Progress) -> BuiltLibrary:
    state = job.state.with_mod(with_metadata(job.state.mod, library_metadata(job)))
    path, built = writer.write(state, job.variants, folder / "lib", job.library, progress)
    debug.show(debug.RULES, lambda: "\n".join(_rules(variant) for variant in built))
    debug.show(debug.SOURCE, lambda: "\n".join(_source(state, variant) for variant in job.variants))
    return BuiltLibrary(job, f"lib/{path.name}", tuple(built))


def _rules(built: BuiltVariant) -> str:
    return "\n".join(f"{built.variant.name} | {k.name} | {k.rule} | {k.reason}" for k in built.kernels)


def _source(state: Lowering, variant: Variant) -> str:
    scheduled = pipeline.run(replace(state, variant=variant, dump=None), pipeline.SCHEDULE)
    return f"# {variant.name}\n{backend_of(state.target).source(scheduled)}"


def _copy_texts(job: Job, folder: Path, progress: Progress) -> dict[str, FileInfo]:
    """Copy the configuration files; write the tokenizer with all its files, and MLC's chat config.

    Except for browsers, also write the tables of tokenizer and template for the native runtime.
    """
    source, tokenizer = job.checkpoint, job.tokenizer
    names = [name for name in CONFIG_FILES if (source.folder / name).is_file()]
    for name in names:
        shutil.copyfile(source.folder / name, folder / name)
    if tokenizer is not None:
        texts = tokenizer.files()
        if job.speech is None:  # which MLC's hosts do not know
            config = mlc_config(job, tokenizer, texts)
            texts[MLC_CONFIG] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", newline="")
        names += texts
    if tokenizer is not None and not job.target.in_browsers and job.embedding is None and job.speech is None:
        for name, content in text_programs(tokenizer, progress, required=job.target.archive).items():
            (folder / name).write_bytes(content)
            names.append(name)
    return {name: file_info(folder / name) for name in names}
