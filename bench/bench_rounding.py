"""What rounding activations to int8 costs, of prompts and in decode, with and without outliers and folding.

    python -m bench.bench_rounding CHECKPOINT TEXT WORK [--calibration FILE] [--only q4f16_1,q8f16_1]
        [--factors 1,20,100] [--tokens 4096] [--cpu cascadelake]

Each row is one bundle on the CPU: KL divergence of the same weights with and without rounded activations, of prompts and
in decode, and KL divergence of each from the checkpoint in float32. Factors plant four large channels in front of every
projection (`bench/outliers.py`). WORK is a folder for the bundles.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlcpipe
from bench.outliers import plant_outliers
from bench.program import command_line, run_program
from mlcpipe.cli.terminal import stderr_console, stdout_console
from mlcpipe.quality.measure import QualityOptions, score_decode, score_prefill
from mlcpipe.quality.reference import prepare_reference
from mlcpipe.support.defaults import FOLD_BY_WEIGHTS
from mlcpipe.support.progress import Progress, console_progress

CHANNELS = 4
_TARGET = 'base = "cpu-native"\n[tvm]\nmcpu = "{}"\n[schedule]\nint8_activations = {}\n'


@dataclass(frozen=True)
class Row:
    """KL divergences of one bundle: of int8 activations from float ones, and of all roundings from float32."""

    name: str
    prompt: float
    decode: float
    all_prompt: float
    all_decode: float
    weights_alone: float


def compile_both(
    checkpoint: Path, quantization: str, folding: str | None, cpu: str, work: Path, progress: Progress
) -> tuple[Path, Path]:
    """The bundle of a checkpoint, and the same with activations in float32. `cpu` is LLVM's name."""
    work.mkdir(parents=True, exist_ok=True)
    bundles = []
    for kind, knob in (("int8", 1), ("float", 0)):
        target = work / f"{kind}.toml"
        target.write_text(_TARGET.format(cpu, knob), encoding="utf-8")
        made = mlcpipe.compile(
            checkpoint, target=str(target), quantization=quantization, fold_outliers=folding, output=work / kind,
            overwrite=True, progress=progress,
        )  # fmt: skip
        bundles.append(made)
    return bundles[0], bundles[1]


def measure(
    name: str, rounded: Path, exact: Path, checkpoint: Path, text: Path, tokens: int, progress: Progress
) -> Row:
    """Score both bundles on the first tokens of a text."""
    whole = prepare_reference(checkpoint, 0, progress)
    of_int8, of_all, of_weights = (
        QualityOptions(*pair, text, tokens, tokens) for pair in ((rounded, exact), (rounded, whole), (exact, whole))
    )
    prompt, all_prompt, alone = (
        float(score_prefill(plan, progress).kld.mean()) for plan in (of_int8, of_all, of_weights)
    )
    decode, all_decode = (float(score_decode(plan, progress).kld.mean()) for plan in (of_int8, of_all))
    return Row(name, prompt, decode, all_prompt, all_decode, alone)


def table(rows: list[Row]) -> str:
    """A Markdown table with one line for each row."""
    heads = ("weights", "int8: prompts", "decode", "all roundings: prompts", "decode", "weights alone", "all / alone")
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for row in rows:
        found = (row.prompt, row.decode, row.all_prompt, row.all_decode, row.weights_alone)
        numbers = " | ".join(f"{number:.5f}" for number in found)
        lines.append(f"`{row.name}` | {numbers} | {row.all_prompt / row.weights_alone:.3f}")
    return "".join(f"| {line} |\n" for line in lines)


def main() -> None:
    """Compile, score and print."""
    parser = command_line(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--calibration", default=None, help="a row more of each: factors by activations on this text")
    parser.add_argument("--only", default="q4f16_1,q4f16_m,q8f16_1")
    parser.add_argument("--factors", default="1,20,100")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cpu", default="native", help="LLVM's name of the CPU; cascadelake has no AMX")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    with console_progress(stderr_console(), lasting=False) as progress:
        for factor in map(int, options.factors.split(",")):
            checkpoint, planted = options.checkpoint, options.work / f"planted-{factor}"
            if factor > 1:
                checkpoint = planted if planted.exists() else plant_outliers(
                    checkpoint, planted, factor=factor, channels=CHANNELS
                )  # fmt: skip
            for quantization in options.only.split(","):
                for how in (None, FOLD_BY_WEIGHTS, *([options.calibration] if options.calibration else [])):
                    name = f"{quantization}-x{factor}" + {None: "", FOLD_BY_WEIGHTS: "-by-weights"}.get(how, "-by-text")
                    both = compile_both(checkpoint, quantization, how, options.cpu, options.work / name, progress)
                    rows.append(measure(name, *both, checkpoint, options.text, options.tokens, progress))
                    stderr_console().print(rows[-1])
    stdout_console().print(table(rows), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    run_program(main)
