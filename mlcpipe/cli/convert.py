"""`mlcpipe convert`: only the weights, quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlcpipe.cli.options import (
    BestOption,
    CalibrationOption,
    CheckpointArgument,
    CompileTargetOption,
    FoldOutliersOption,
    MethodOption,
    OverwriteOption,
    QuantizationOption,
    method_of_best,
)
from mlcpipe.cli.terminal import say, stderr_console, stdout_console
from mlcpipe.errors import naming
from mlcpipe.host.finding import byte_size
from mlcpipe.loading import check_names
from mlcpipe.support.atomic import check_early
from mlcpipe.support.defaults import DEFAULT_QUANTIZATION, DEFAULT_TARGET
from mlcpipe.support.progress import console_progress


def convert_command(
    model: CheckpointArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the weights.")],
    target: CompileTargetOption = DEFAULT_TARGET,
    quantization: QuantizationOption = None,
    method: MethodOption = None,
    best: BestOption = False,
    calibration: CalibrationOption = None,
    fold_outliers: FoldOutliersOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Quantize the weights and nothing else: parameter shards, their index and the configuration.

    One tensor is in memory at a time, so a model may be larger than the memory.

    Examples:

    `mlcpipe convert ./Qwen3-0.6B -o qwen3-weights`

    `mlcpipe convert hf://Qwen/Qwen3-0.6B --quantization q3f16_1 -o qwen3-q3`
    """
    import mlcpipe
    from mlcpipe.bundle.tensor_cache import TENSOR_CACHE
    from mlcpipe.checkpoint import open_checkpoint, resolve
    from mlcpipe.compiler.preflight import Purpose

    target, method = target or DEFAULT_TARGET, method_of_best(best, method)
    check_early(output, TENSOR_CACHE if overwrite else "")
    check_names(target, DEFAULT_QUANTIZATION if quantization is None else quantization)
    with console_progress(stderr_console()) as progress:
        purpose = Purpose(target, quantization, disk=output, title=model, method=method)
        checkpoint = resolve(model, progress, check=purpose.check)
        with naming(model, checkpoint):
            made = mlcpipe.convert(
                checkpoint, target=target, quantization=quantization, output=output, method=method,
                calibration=calibration, fold_outliers=fold_outliers, overwrite=overwrite, progress=progress,
            )  # fmt: skip
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    say(stdout_console(), f"{made}: {byte_size(size)}, {open_checkpoint(checkpoint).quantization(quantization)}")
