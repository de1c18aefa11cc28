"""`mlcpipe quality`: measures how much a bundle differs from its reference."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import DeviceOption, JsonOption, ThreadsOption, bundle_folder, check_at_least_one
from mlcpipe.cli.terminal import cell, new_table, print_json, print_rows, say, stderr_console, stdout_console
from mlcpipe.host.finding import byte_size
from mlcpipe.loading import engine_device
from mlcpipe.support.defaults import AUTO, QUALITY_DECODE_TOKENS, QUALITY_TOKENS
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from rich.table import Table

    from mlcpipe.bundle import Manifest
    from mlcpipe.bundle.quality import Comparison
    from mlcpipe.quality.measure import Report

TextOption = Annotated[
    Path | None, typer.Option(help="A text in UTF-8 to measure on. (default: prose of mlcpipe's documentation)")
]
REQUIRE_HELP = "Limits such as kld<=0.03,top1>=0.92, for prefill and for decode; beyond one the exit code is 3"


def quality_command(
    bundle: Annotated[Path, typer.Argument(help="A compiled model's folder.", parser=bundle_folder, metavar="bundle")],
    reference: Annotated[
        str,
        typer.Option(help="What it was compiled from: a checkpoint folder, GGUF file, hf:// or ollama:// name."),
    ],
    other_reference: Annotated[
        bool,
        typer.Option(
            "--other-reference",
            help="Let the reference be another checkpoint, such as the one before pruning or somebody's quantization.",
        ),
    ] = False,
    text: TextOption = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = QUALITY_TOKENS,
    decode_tokens: Annotated[
        int, typer.Option(help="How many of them to compute token by token too.")
    ] = QUALITY_DECODE_TOKENS,
    require: Annotated[str, typer.Option(help=f"{REQUIRE_HELP}.")] = "",
    threads: ThreadsOption = None,
    device: DeviceOption = AUTO,
    as_json: JsonOption = False,
) -> None:
    """Measure how much a bundle differs from its reference: perplexity and KL divergence, of prefill and of decode.

    The reference is compiled for this CPU in q0f32, without any rounding, and kept in the cache. Both models compute
    the same windows of the text. The definitions are those of llama-perplexity. The result is written into the bundle's
    manifest, where `mlcpipe inspect` shows it.

    Examples:

    `mlcpipe quality ./qwen3 --reference hf://Qwen/Qwen3-0.6B`

    `mlcpipe quality ./qwen3 --reference ./Qwen3-0.6B --text wiki.test.raw --require "kld<=0.03,top1>=0.92"`
    """
    check_at_least_one(tokens=tokens, decode_tokens=decode_tokens, threads=threads)
    from mlcpipe.bundle import read_manifest
    from mlcpipe.quality.measure import OWN_TEXT, QualityOptions, measure, record
    from mlcpipe.quality.reference import prepare_reference
    from mlcpipe.quality.requirements import check, parse_requirements

    requirements = parse_requirements(require)
    manifest = read_manifest(bundle)
    with console_progress(stderr_console(), lasting=False) as progress:
        drafts = manifest.model.has_draft_head  # its files count in the hash
        own = None if other_reference or drafts else manifest.checkpoint_hash
        exact = prepare_reference(reference, manifest.memory_plan.weights_bytes, progress, own)
        asked = QualityOptions(bundle, exact, text or OWN_TEXT, tokens, decode_tokens, threads, engine_device(device))
        report = measure(asked, progress)
    unwritten = record(bundle, manifest, report.quality)
    if as_json:
        print_json(asdict(report) | {"quality": report.quality.model_dump(mode="json")})
    else:
        _show(bundle, report)
    if unwritten:
        say(stderr_console(), f"note: {unwritten}")
    check(report.quality, requirements)


def _show(bundle: Path, report: Report) -> None:
    quality, console = report.quality, stdout_console()
    share = "" if report.share is None else f", {100 * report.share:.0f} % of the read bandwidth"
    rows = [
        ("bundle", f"{bundle}, {byte_size(report.bundle_bytes)}, {quality.bits_per_weight:.2f} bits per weight"),
        ("reference", f"{quality.reference} in {quality.reference_quantization}"),
        ("text", f"{quality.text}: {report.notes[-1]}"),
        ("decode", f"{report.decode_tok_s:,.1f} tok/s{share}"),
    ]
    print_rows(console, rows)
    console.print()
    console.print(quality_table(quality.prefill, quality.decode))
    for note in report.notes[:-1]:
        say(console, f"\n{note}")


def quality_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """("prefill" or "decode", its figures in a line); empty for a bundle that was not measured."""
    quality = manifest.quality
    return [] if quality is None else [("prefill", _line(quality.prefill)), ("decode", _line(quality.decode))]


def _line(c: Comparison) -> str:
    top = f"{100 * c.top1:.1f} % same top token"
    return f"KL divergence {c.kld:.5f} ± {c.kld_error:.5f}, {top}, perplexity x {c.ppl_ratio:.4f}, {c.tokens} tokens"


def quality_table(prefill: Comparison, decode: Comparison) -> Table:
    """Both comparisons side by side."""
    table = new_table("", "prefill", "decode")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, one, other in zip(_names(), _values(prefill), _values(decode)):
        table.add_row(*map(cell, (name, one, other)))
    return table


def _names() -> tuple[str, ...]:
    return ("tokens", "perplexity", "of the reference", "ratio", "KL divergence", "median", "99 %", "99.9 %", "maximum",
            "same top token", "RMS of Δp")  # fmt: skip


def _values(c: Comparison) -> tuple[str, ...]:
    return (
        str(c.tokens),
        f"{c.ppl:.4f}",
        f"{c.reference_ppl:.4f}",
        f"{c.ppl_ratio:.5f} ± {c.ppl_ratio_error:.5f}",
        f"{c.kld:.6f} ± {c.kld_error:.6f}",
        *(f"{kld:.6f}" for kld in (c.kld_median, c.kld_99, c.kld_99_9, c.kld_max)),
        f"{100 * c.top1:.2f} ± {100 * c.top1_error:.2f} %",
        f"{100 * c.rms_dp:.3f} ± {100 * c.rms_dp_error:.3f} %",
    )
