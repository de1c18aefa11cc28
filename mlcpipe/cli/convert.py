"""`mlcpipe convert`: only the weights, quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlcpipe.cli.bundles import DEFAULT_QUANTIZATION, DEFAULT_TARGET, check_names
from mlcpipe.cli.compile import check_output
from mlcpipe.cli.console import byte_size, say, stderr_console, stdout_console
from mlcpipe.progress import console_progress


def convert_command(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or hf://org/name[@revision].")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for the weights.")],
    target: Annotated[str, typer.Option(help="Whose layout the weights get.")] = DEFAULT_TARGET,
    quantization: Annotated[str, typer.Option(help="How to store the weights.")] = DEFAULT_QUANTIZATION,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace weights that are there.")] = False,
) -> None:
    """Quantize the weights and nothing else: parameter shards, their index and the configuration.

    One tensor is in memory at a time, so that a model may be larger than the memory.

    Examples:

    `mlcpipe convert ./Qwen3-0.6B -o qwen3-weights`

    `mlcpipe convert hf://Qwen/Qwen3-0.6B --quantization q3f16_1 -o qwen3-q3`
    """
    import mlcpipe
    from mlcpipe.checkpoint import resolve

    check_output(output, overwrite=overwrite)
    check_names(target, quantization)
    with console_progress(stderr_console()) as progress:
        checkpoint = resolve(model, progress)
        made = mlcpipe.convert(
            checkpoint,
            target=target,
            quantization=quantization,
            output=output,
            overwrite=overwrite,
            progress=progress,
        )
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    say(stdout_console(), f"{made}: {byte_size(size)}, {quantization}")
