"""`mlcpipe prune`: a checkpoint with fewer numbers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import JsonOption, OverwriteOption
from mlcpipe.cli.terminal import cell, new_table, print_json, say, stderr_console, stdout_console
from mlcpipe.host.finding import byte_size
from mlcpipe.support.atomic import check_early
from mlcpipe.support.defaults import DEFAULT_QUANTIZATION, DISTILL_RECIPE, OWN_CALIBRATION, PRUNED_RATIO
from mlcpipe.support.progress import Progress, console_progress

if TYPE_CHECKING:
    from mlcpipe.bundle.quality import Comparison
    from mlcpipe.pruning.prune import Cost, Pruned

_PATTERN = (
    "note: kernels read zeros like other numbers, so 2:4 saves no byte and no time here. It costs quality: perplexity "
    "of Llama-2-7B on Wikitext-2 is 5.12 dense, 10.17 with sparsegpt and 11.02 with wanda (Sun et al. 2023)."
)


def prune_command(
    model: Annotated[str, typer.Argument(help="A checkpoint folder with safetensors, or hf://org/name[@revision].")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the smaller checkpoint.")],
    method: Annotated[
        str,
        typer.Option(
            help="What to remove: layers; heads, KV heads with the query heads that read them; width, columns of the "
            "MLP; or with wanda or sparsegpt 2 of 4 neighbours in each matrix, which become 0."
        ),
    ],
    keep: Annotated[int | None, typer.Option(help="How many layers, KV heads or MLP columns remain.")] = None,
    ratio: Annotated[
        float | None,
        typer.Option(help=f"The share to remove, instead of --keep. (default: {PRUNED_RATIO})"),
    ] = None,
    calibration: Annotated[
        str,
        typer.Option(
            help="A text file to measure importance on: the model runs on it, layer by layer. "
            f"{OWN_CALIBRATION} is the built-in text."
        ),
    ] = OWN_CALIBRATION,
    quality: Annotated[
        bool, typer.Option("--quality", help="Measure what it costs: compiles both models without rounding.")
    ] = False,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint smaller: remove what matters least on a text.

    The result is an ordinary checkpoint for `mlcpipe compile` and transformers. One layer is in memory at a time.
    Its distill.toml is the recipe for apps/distill/distill.py, which recovers some of the loss.

    Examples:

    `mlcpipe prune ./Qwen3-0.6B -o qwen3-small --method width --ratio 0.25 --quality`

    `mlcpipe prune hf://Qwen/Qwen3-0.6B -o qwen3-24 --method layers --keep 24 --calibration wiki.train.raw`
    """
    check_early(output, DISTILL_RECIPE if overwrite else "")
    from mlcpipe.cli.compile import check_texts
    from mlcpipe.pruning.prune import prune

    if quality:
        check_texts(calibration, None, None)
    with console_progress(stderr_console(), lasting=False) as progress:
        made = prune(
            model, method=method, output=output, keep=keep, ratio=ratio, calibration=calibration, overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
        measured = _measure(made, progress) if quality else None
    if as_json:
        content = asdict(made) | {"output": str(made.output), "original": str(made.original)}
        print_json(content | {"quality": None if measured is None else measured.model_dump(mode="json")})
    else:
        _show(made, measured)


def _measure(made: Pruned, progress: Progress) -> Comparison:
    """The pruned checkpoint against the original, both in float32 if memory allows."""
    from mlcpipe.quality.measure import QualityOptions, score_prefill
    from mlcpipe.quality.reference import prepare_reference
    from mlcpipe.quality.statistics import compare

    pruned, original = (prepare_reference(path, 0, progress) for path in (made.output, made.original))
    return compare(score_prefill(QualityOptions(pruned, original), progress))


def _show(made: Pruned, measured: Comparison | None) -> None:
    console, before, after = stdout_console(), made.before, made.after
    table = new_table("", "before", "after", "")
    for column in table.columns[1:]:
        column.justify = "right"
    if made.units:
        table.add_row(*map(cell, (made.units, str(made.count), str(made.kept), _part(made.kept, made.count))))
    for name, one, other in zip(_NAMES, _values(before), _values(after)):
        table.add_row(*map(cell, (name, _shown(name, one), _shown(name, other), _part(other, one))))
    table.add_row("decode, by bytes read", "", "", f"{before.read_bytes / after.read_bytes:.2f} x as fast")
    if measured is not None:
        ratio = f"{measured.ppl_ratio:.3f} x"
        table.add_row("perplexity", f"{measured.reference_ppl:.3f}", f"{measured.ppl:.3f}", ratio)
        table.add_row("KL divergence", "", f"{measured.kld:.4f}", f"± {measured.kld_error:.4f}")
        table.add_row("same top token", "", f"{100 * measured.top1:.1f} %", "")
    say(console, f"{made.output}: pruned by {made.method}")
    console.print(table)
    if not made.units:
        say(console, _PATTERN)


_NAMES = ("parameters", f"bytes in {DEFAULT_QUANTIZATION}", "bytes read for a token", "KV cache of a token, f16")


def _values(cost: Cost) -> tuple[int, ...]:
    return cost.parameters, cost.weights_bytes, cost.read_bytes, cost.kv_bytes


def _shown(name: str, value: int) -> str:
    return f"{value:,}" if name == _NAMES[0] else byte_size(value)


def _part(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"
