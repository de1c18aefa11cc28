"""Compares quantizations and methods on the ruler: bits per weight, KL divergence, and that beside today's default.

    python -m bench.bench_quality RULER [--tokens 16384] [--only q4f16_1,q4f16_k] [--bits 4.6,5] [--outliers]
        [--llama-bench PATH]

RULER is the folder that `python apps/demo_model/ruler.py -o RULER` fills. All rows score the same positions of its held-out
text, so that differences are known better than the divergences themselves: the ratio's error is of pairs. With llama-bench,
as bench.build_llama_cpp builds it, llama.cpp quantizes the same checkpoint, also with an importance matrix of RULER's
calibration text, and its files are kept bit for bit. With --bits recipes of `--bits-per-weight` are rows too; sensitivity is
measured on the same text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

import mlcpipe
from bench.build_llama_cpp import importance, quantize
from bench.make_gguf import make_gguf
from bench.outliers import plant_outliers
from bench.prepare import FILE_TYPES
from bench.program import command_line, run_program
from mlcpipe.bundle import read_manifest
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.cli.terminal import stderr_console, stdout_console
from mlcpipe.errors import UsageError
from mlcpipe.quality.bits import choose_bits
from mlcpipe.quality.measure import QualityOptions, score_prefill
from mlcpipe.quality.reference import prepare_reference
from mlcpipe.quality.sensitivity import measure_sensitivity
from mlcpipe.quality.statistics import Scores, compare
from mlcpipe.quantization.recipe import QuantizationRecipe
from mlcpipe.support.defaults import AWQ, GPTQ, KEEP, LOCAL_TARGET, QUALITY_TOKENS, RTN, SEARCH
from mlcpipe.support.progress import Progress, console_progress
from mlcpipe.targets import load_target

# Quantization, method, and whether it is calibrated on the ruler's text. The first is what the others are compared with.
METHODS = (
    *((name, method, calibrated) for name in ("q4f16_1", "q4f16_k", "q4f16_m", "q3f16_1")
      for method, calibrated in ((RTN, False), (SEARCH, False), (SEARCH, True), (AWQ, True), (GPTQ, True))),
    ("q8f16_1", RTN, False),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One way to store the ruler's weights; `seconds` are those of the compilation, `scores` of each position."""

    name: str
    bits: float
    seconds: float
    scores: Scores


def ratio(scores: Scores, base: Scores) -> tuple[float, float]:
    """Mean KL divergence beside that of `base` on the same positions, and its standard error (delta method)."""
    own, other = scores.kld, base.kld
    value = float(own.mean() / other.mean())
    deviation = float((own - value * other).std(ddof=1))
    return value, deviation / (float(other.mean()) * math.sqrt(len(own)))


def measure(
    source: Path, name: str, quantization: str | QuantizationRecipe, method: str | None, plan: QualityOptions, progress: Progress,
    calibration: Path | None = None,
) -> Row:  # fmt: skip
    """Compile a checkpoint to its own bundle, as no name may be loaded twice, and score it."""
    plan = replace(plan, bundle=plan.bundle.with_name(name.replace(" ", "-")))
    began = time.perf_counter()
    mlcpipe.compile(
        source, target=LOCAL_TARGET, quantization=quantization, method=method, calibration=calibration,
        output=plan.bundle, overwrite=True, progress=progress,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    numbers = read_manifest(plan.reference).memory_plan.weights_bytes / 4
    bits = 8 * read_manifest(plan.bundle).memory_plan.weights_bytes / numbers
    return Row(name, bits, seconds, score_prefill(plan, progress))


def recipes_of(checkpoint: Path, text: Path, bits: Sequence[float], progress: Progress) -> list[QuantizationRecipe]:
    """The recipes of so many bits; the sensitivity is measured once."""
    source, target = open_checkpoint(checkpoint), load_target(LOCAL_TARGET)
    sensitivity = measure_sensitivity(source, text, progress) if bits else None
    return [choose_bits(source, target, each, sensitivity, progress)[0] for each in bits if sensitivity is not None]


def files_of(checkpoint: Path, text: Path, work: Path, llama_bench: Path) -> Iterator[tuple[str, Path]]:
    """The checkpoint as GGUF files that llama.cpp quantized, made once."""
    whole, matrix = work / "f16.gguf", work / "imatrix.gguf"
    if not whole.exists():
        make_gguf(checkpoint, whole, bits=16)
    if not matrix.exists():
        importance(whole, text, matrix, llama_bench)
    for name, known in (("Q4_0", None), ("Q4_K_M", None), ("Q4_K_M", matrix), ("Q6_K", None)):
        path = work / f"{name}{'-imatrix' if known else ''}.gguf"
        label = f"{name}{' imatrix' if known else ''} of llama.cpp"
        yield label, path if path.exists() else quantize(whole, path, FILE_TYPES[name], llama_bench, known)


def table(rows: Sequence[Row]) -> Table:
    """One line for each row."""
    made = Table("weights", "bits", "KL divergence", f"beside {rows[0].name}", "99.9 %", "same top", "perplexity", "s")
    for row in rows:
        found, (value, error) = compare(row.scores), ratio(row.scores, rows[0].scores)
        made.add_row(
            row.name, f"{row.bits:.2f}", f"{found.kld:.5f} ± {found.kld_error:.5f}", f"{value:.3f} ± {error:.3f}",
            f"{found.kld_99_9:.3f}", f"{100 * found.top1:.1f} %", f"x {found.ppl_ratio:.4f}", f"{row.seconds:.1f}",
        )  # fmt: skip
    return made


def main() -> None:
    """Compile, score and print."""
    parser = command_line(__doc__)
    parser.add_argument("ruler", type=Path)
    parser.add_argument("--tokens", type=int, default=QUALITY_TOKENS)
    parser.add_argument("--only", default="", help="quantizations to compare with the first row: q4f16_1,q4f16_k")
    parser.add_argument("--bits", default="", help="recipes of --bits-per-weight: 4.6,5")
    parser.add_argument("--outliers", action="store_true", help="plant outlier channels first")
    parser.add_argument("--llama-bench", type=Path, default=None)
    options = parser.parse_args()
    checkpoint, text = options.ruler / "checkpoint", options.ruler / "heldout.txt"
    for path in (checkpoint / "config.json", text):
        if not path.is_file():
            raise UsageError("there is no ruler", where=path, next_step="python apps/demo_model/ruler.py -o FOLDER")
    work = options.ruler / "outliers" if options.outliers else options.ruler / "quality"
    if options.outliers:
        planted = work / "checkpoint"
        checkpoint = planted if planted.exists() else plant_outliers(checkpoint, planted)
    work.mkdir(exist_ok=True)
    with console_progress(stderr_console(), lasting=False) as progress:
        reference = prepare_reference(checkpoint, 0, progress)
        plan = QualityOptions(work / "bundle", reference, text, options.tokens)
        chosen = options.only.split(",") if options.only else [quantization for quantization, _, _ in METHODS]
        rows = []
        for quantization, method, calibrated in (row for row in METHODS if row == METHODS[0] or row[0] in chosen):
            known = options.ruler / "calibration.txt" if calibrated else None
            name = f"{quantization} {method}{' calibrated' if calibrated else ''}"
            rows.append(measure(checkpoint, name, quantization, method, plan, progress, known))
        bits = [float(each) for each in options.bits.split(",") if each]
        calibration = options.ruler / "calibration.txt"
        for each, mixed in zip(bits, recipes_of(checkpoint, calibration, bits, progress)):
            for method, known in ((SEARCH, None), (SEARCH, calibration), (GPTQ, calibration)):
                name = f"{each:g} bits {method}{' calibrated' if known else ''}"
                rows.append(measure(checkpoint, name, mixed, method, plan, progress, known))
        if options.llama_bench is not None:
            for name, path in files_of(checkpoint, calibration, work, options.llama_bench):
                rows.append(measure(path, name, KEEP, None, plan, progress))
    found = compare(rows[0].scores)
    stdout_console().print(table(rows))
    stdout_console().print(f"{found.tokens} positions; perplexity of the reference {found.reference_ppl:.2f}")


if __name__ == "__main__":
    run_program(main)
