"""`mlcpipe compile`: a checkpoint becomes a bundle."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.bits import check_bits, recipe_of_bits
from mlcpipe.cli.options import (
    BestOption,
    BitsOption,
    BitsTextOption,
    CalibrationOption,
    CheckpointArgument,
    CompileTargetOption,
    ContextOption,
    DraftHeadOption,
    FoldOutliersOption,
    JsonOption,
    KvCacheDtypeOption,
    MethodOption,
    MmprojOption,
    OverwriteOption,
    QuantizationOption,
    StagesOption,
    check_at_least_one,
    method_of_best,
    stages_of,
)
from mlcpipe.cli.quality import REQUIRE_HELP, TextOption, quality_lines
from mlcpipe.cli.terminal import print_json, print_rows, say, stderr_console, stdout_console
from mlcpipe.errors import UsageError, naming
from mlcpipe.host.finding import byte_size
from mlcpipe.loading import check_names, check_runs_here
from mlcpipe.support.atomic import check_early
from mlcpipe.support.defaults import (
    ANY,
    AUTO,
    DEFAULT_QUANTIZATION,
    DEFAULT_TARGET,
    FOLD_BY_WEIGHTS,
    NO_CALIBRATION,
    QUALITY_TOKENS,
    SERVE,
)
from mlcpipe.support.progress import ConsoleProgress, Progress, console_progress

if TYPE_CHECKING:
    from mlcpipe.bundle import Manifest
    from mlcpipe.quality.requirements import Requirement
    from mlcpipe.quantization.recipe import QuantizationRecipe


def compile_command(
    model: CheckpointArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle's folder.")],
    target: CompileTargetOption = DEFAULT_TARGET,
    quantization: QuantizationOption = None,
    method: MethodOption = None,
    best: BestOption = False,
    calibration: CalibrationOption = None,
    fold_outliers: FoldOutliersOption = None,
    bits_per_weight: BitsOption = None,
    bits_text: BitsTextOption = None,
    context: ContextOption = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Let the bundle run with LoRA adapters, chosen at run time.")
    ] = False,
    draft_head: DraftHeadOption = None,
    mmproj: MmprojOption = None,
    stages: StagesOption = None,
    no_tokenizer: Annotated[
        bool,
        typer.Option("--no-tokenizer", help="The bundle takes token ids alone: the checkpoint needs no tokenizer."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Link for browsers in seconds, not a minute; the library is twice as large.")
    ] = False,
    overwrite: OverwriteOption = False,
    require: Annotated[
        str, typer.Option(help=f"{REQUIRE_HELP}, and there is no bundle. Measured as `mlcpipe quality` does.")
    ] = "",
    text: TextOption = None,
    tokens: Annotated[
        int | None, typer.Option(help=f"Tokens of the text to use with --require. (default: {QUALITY_TOKENS})")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a model for a device: quantize the weights, generate the kernels, put all of it in one folder.

    The folder, a bundle, holds everything that `mlcpipe chat` and `mlcpipe bench` need. It appears whole or
    not at all.

    Examples:

    `mlcpipe compile ./Qwen3-0.6B -o qwen3`

    `mlcpipe compile hf://Qwen/Qwen3-0.6B --quantization q8f16_1 --context 4096 -o qwen3-q8`

    `mlcpipe compile ./Qwen3-0.6B --best -o qwen3-best`

    `mlcpipe compile ./Qwen3-0.6B --bits-per-weight 4.8 -o qwen3-mixed`

    `mlcpipe compile ./Qwen3-0.6B --target webgpu --quantization auto -o qwen3-web`

    `mlcpipe compile ./Qwen3-0.6B --target vulkan,cpu --stages 20,8 -o qwen3-in-stages`

    `mlcpipe compile ./Qwen3-0.6B --quantization q3f16_1 --require "kld<=0.1,top1>=0.9" -o qwen3-small`
    """
    check_at_least_one(context=context, tokens=tokens)
    method = method_of_best(best, method)
    target = target or DEFAULT_TARGET
    from mlcpipe.bundle import MANIFEST, read_manifest

    check_early(output, MANIFEST if overwrite else "")
    targets, counts = target.split(","), stages_of(stages)
    if counts is None and len(targets) > 1:
        raise UsageError(
            "--target names several targets", found=target, expected="--stages, such as 12,4",
            next_step="`mlcpipe inspect MODEL --devices vulkan,cpu` plans them",
        )  # fmt: skip
    for name in targets:
        check_names(name, DEFAULT_QUANTIZATION if quantization is None else quantization, kv_cache_dtype or AUTO)
    check_bits(bits_per_weight, bits_text, quantization)
    import mlcpipe
    from mlcpipe.checkpoint import open_checkpoint, resolve
    from mlcpipe.checkpoint.draft_heads import NO_HEAD
    from mlcpipe.compiler.preflight import Purpose
    from mlcpipe.quality.requirements import parse_requirements

    requirements = parse_requirements(require)
    if requirements:
        for name in targets:
            check_runs_here(name)
    elif text or tokens:
        raise UsageError(f"--{'text' if text else 'tokens'} has no effect", next_step="use it with --require")
    check_texts(calibration, bits_text, text, fold_outliers)
    with console_progress(stderr_console()) as progress:
        task = ANY if no_tokenizer else SERVE
        purpose = Purpose(
            targets[0], quantization, kv_cache_dtype or AUTO, task, context, output, title=model, method=method
        )
        checkpoint = resolve(model, progress, check=purpose.check)
        with naming(model, checkpoint):
            purpose.check(open_checkpoint(checkpoint))
        head = draft_head if draft_head in (None, NO_HEAD) else resolve(draft_head, progress)
        check = (
            _quality_check(checkpoint, requirements, text, tokens or QUALITY_TOKENS, progress) if requirements else None
        )
        with naming(model, checkpoint):
            bundle = mlcpipe.compile(
                checkpoint,
                target=target,
                quantization=_recipe(checkpoint, targets[0], bits_per_weight, bits_text, progress) or quantization,
                output=output,
                method=method,
                calibration=calibration,
                fold_outliers=fold_outliers,
                context_length=context,
                kv_cache_dtype=kv_cache_dtype or AUTO,
                adapters=adapters,
                draft_head=head,
                mmproj=mmproj,
                stages=counts,
                quick=quick,
                overwrite=overwrite,
                check=check,
                progress=progress,
            )
    manifest = read_manifest(bundle)
    bits = _bits_per_weight(bundle, manifest, checkpoint, head)
    if as_json:
        print_json(_summary(bundle, manifest, bits, progress))
    else:
        _show(bundle, manifest, bits, progress)


def _recipe(
    checkpoint: Path, target: str, bits: float | None, text: str | None, progress: Progress
) -> QuantizationRecipe | None:
    """The recipe of --bits-per-weight, with a note that says how it was found."""
    if bits is None:
        return None
    from mlcpipe.checkpoint import open_checkpoint

    recipe, how = recipe_of_bits(open_checkpoint(checkpoint), target, bits, text, progress)
    progress.note(how)
    return recipe


def check_texts(calibration: str | None, bits_text: str | None, text: Path | None, folding: str | None = None) -> None:
    """Raise UsageError if one of these texts is, or is part of, the text that quality is measured on."""
    from mlcpipe.compiler.calibration.text import read_calibration
    from mlcpipe.quality.measure import OWN_TEXT, read_text

    for option, given in (("--calibration", calibration), ("--bits-text", bits_text), ("--fold-outliers", folding)):
        if given in (None, NO_CALIBRATION, FOLD_BY_WEIGHTS):
            continue
        fitted, measured = read_calibration(given).text.strip(), read_text(text or OWN_TEXT).strip()
        if fitted in measured or measured in fitted:
            raise UsageError(
                f"the text of {option} is one that quality is measured on", where=given,
                expected="another text", next_step=f"give another {option}" + (" or --text" if text else ""),
            )  # fmt: skip


def _quality_check(
    checkpoint: Path, requirements: tuple[Requirement, ...], text: Path | None, tokens: int, progress: Progress
) -> Callable[[Path], None]:
    """A function that measures a bundle against its checkpoint, writes the result into it and raises QualityError."""
    from mlcpipe.bundle import read_manifest
    from mlcpipe.quality.measure import OWN_TEXT, QualityOptions, measure, read_text, record
    from mlcpipe.quality.reference import prepare_reference
    from mlcpipe.quality.requirements import check

    text = text or OWN_TEXT
    read_text(text)  # checked before the work
    reference = prepare_reference(checkpoint, 0, progress)

    def measured(folder: Path) -> None:
        quality = measure(QualityOptions(folder, reference, text, tokens), progress).quality
        check(quality, requirements)
        record(folder, read_manifest(folder), quality)

    return measured


def _bits_per_weight(bundle: Path, manifest: Manifest, checkpoint: Path, draft_head: Path | str | None) -> float:
    """Stored bits, including scales and second copies, per number of the used tensors."""
    from mlcpipe.bundle.stages import read_parts
    from mlcpipe.checkpoint import open_checkpoint
    from mlcpipe.checkpoint.draft_heads import with_draft_head

    used = {s for part in read_parts(bundle, manifest) for param in part.manifest.params for s in param.sources}
    opened = open_checkpoint(checkpoint)
    tensors = (opened if draft_head is None else with_draft_head(opened, draft_head)).tensors
    numbers = sum(math.prod(tensors[name].shape) for name in used if name in tensors)
    return 8 * manifest.memory_plan.stored_bytes / numbers if numbers else 0.0


def _summary(bundle: Path, manifest: Manifest, bits: float, progress: ConsoleProgress) -> dict[str, object]:
    return {
        "bundle": str(bundle),
        "bytes": sum(info.bytes for info in manifest.files.values()),
        "target": manifest.target.model_dump(mode="json"),
        "model": manifest.model.model_dump(mode="json"),
        "quantization": manifest.quantization,
        "bits_per_weight": bits,
        "memory_plan": manifest.memory_plan.model_dump(mode="json"),
        "kv_bytes_per_token": manifest.kv_bytes_per_token,
        "stages": [{"name": stage.name, "seconds": stage.seconds} for stage in progress.stages],
    }


def _show(bundle: Path, manifest: Manifest, bits: float, progress: ConsoleProgress) -> None:
    plan = manifest.memory_plan
    kv = manifest.kv_bytes_per_token
    rows = [
        ("bundle", str(bundle)),
        ("size", byte_size(sum(info.bytes for info in manifest.files.values()))),
        ("model", f"{manifest.model.model_type}, {manifest.model.num_layers} layers"),
        ("target", f"{manifest.target.name}: {manifest.target.triple}" if not manifest.stages
                   else f"{len(manifest.stages)} stages: {', '.join(manifest.stages)}"),
        ("quantization", f"{manifest.quantization}, {bits:.2f} bits per weight"),
        ("weights in memory", byte_size(plan.weights_bytes)),
        ("KV cache", f"{byte_size(kv)} a token, {byte_size(kv * manifest.model.context_length)} for all "
                     f"{manifest.model.context_length}"),
        *((f"quality of {kind}", text) for kind, text in quality_lines(manifest)),
        ("workspace", byte_size(max(plan.workspace_bytes.values(), default=0))),
        *((stage.name, f"{stage.seconds:.1f} s") for stage in progress.stages),
    ]  # fmt: skip
    from mlcpipe.bundle.tasks import next_command

    console = stdout_console()
    print_rows(console, rows)
    say(console, f"\nNow type:  {next_command(bundle, manifest)}")
