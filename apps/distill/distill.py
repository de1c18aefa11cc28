"""Distill the original into a pruned checkpoint: `python apps/distill/distill.py PRUNED -o FOLDER`.

PRUNED is a folder that `mlcpipe prune` wrote; its distill.toml has every number of the run. The loss is the KL
divergence of the student's next token from the teacher's (Hinton et al. 2015, arXiv:1503.02531; for pruned language
models Muralidharan et al. 2024, arXiv:2407.14679), on random rows of a text. Zeros of a 2:4 pattern stay. Needs the
`distill` extra; runs on the CPU, or with --device on another of torch's.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from mlcpipe.checkpoint import Checkpoint, open_checkpoint, resolve
from mlcpipe.checkpoint.checkpoint import CONFIG, SINGLE_FILE
from mlcpipe.checkpoint.safetensors_writer import SafetensorsWriter, narrowed
from mlcpipe.compiler.calibration.text import read_calibration
from mlcpipe.errors import MlcpipeError, UsageError
from mlcpipe.pruning.recipe import Recipe, read_recipe
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.atomic import atomic_directory, check_early
from mlcpipe.support.progress import Progress, console_progress

_HELD_OUT = 0.1  # of the text, its end: the result is measured on it
_HELD_OUT_ROWS = 16
_STAGES = 10  # of the run, each with the mean loss of the one before


@dataclass(frozen=True)
class Result:
    """KL divergence from the teacher on text that was held out, in nats a token."""

    before: float
    after: float


def distill(
    pruned: Path, recipe: Recipe, output: Path, progress: Progress, *, device: str = "cpu", overwrite: bool = False
) -> Result:
    """Write the distilled checkpoint into the folder `output`, which appears whole or not at all.

    Raises UsageError for a text that is too short, and what readers of checkpoints raise.
    """
    check_early(output, SINGLE_FILE if overwrite else "")
    student_files = open_checkpoint(pruned)
    teacher_files = open_checkpoint(resolve(recipe.teacher, progress))
    text = read_calibration(recipe.text)
    learned, held_out = rows_of(text.text, student_files, recipe)
    config = student_files.config_fitted_to(text.sha256)
    progress.stage("load both models")
    teacher, student = (_model(files.path, device) for files in (teacher_files, student_files))
    before = _evaluate(teacher, student, held_out, recipe)
    train(teacher, student, learned, recipe, progress)
    result = Result(before, _evaluate(teacher, student, held_out, recipe))
    with atomic_directory(output, replaces=SINGLE_FILE if overwrite else "") as folder:
        save(student, student_files, folder)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return result


def rows_of(text: str, checkpoint: Checkpoint, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens i64[n] to learn from, and rows i64[rows, window] that are held out.

    Raises UsageError for a text that is too short for both.
    """
    tokenizer = Tokenizer.load(
        checkpoint.path, generation_config=checkpoint.generation_config, config=checkpoint.config
    )
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    cut, window = int(len(tokens) * (1 - _HELD_OUT)), recipe.window
    if len(tokens) - cut < window:
        least = math.ceil(window / _HELD_OUT)
        raise UsageError(
            "the text is too short", where=recipe.text, expected=f"at least {least} tokens", found=len(tokens),
            next_step="give a longer one with --text",
        )  # fmt: skip
    return tokens[:cut], tokens[cut:].unfold(0, window, window)[:_HELD_OUT_ROWS]


def divergence(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """The mean KL divergence of logits f32[rows, tokens, V], times temperature squared, as gradients shrink by that."""
    expected, found = (torch.log_softmax(x.flatten(0, 1) / temperature, -1) for x in (teacher, student))
    kld = torch.nn.functional.kl_div(found, expected, reduction="batchmean", log_target=True)
    return kld * temperature**2


def rate(step: int, recipe: Recipe) -> float:
    """Learning rate: linear warm-up, then a cosine to 0."""
    rising = (step + 1) / max(1.0, recipe.warmup * recipe.steps)
    return recipe.peak_rate * min(rising, 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))


def train(teacher: Any, student: Any, tokens: torch.Tensor, recipe: Recipe, progress: Progress) -> None:
    """Run the recipe on the student in place."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(student.parameters(), lr=recipe.peak_rate, betas=(0.9, 0.95), weight_decay=0.0)
    keep_zeros = _zeros(student) if recipe.pattern else lambda: None
    stage, losses = max(1, recipe.steps // _STAGES), list[float]()
    for step in range(recipe.steps):
        if step % stage == 0:
            shown = f", loss {np.mean(losses):.4f}" if losses else ""
            progress.stage(f"step {step} of {recipe.steps}{shown}")
            progress.steps_total(min(stage, recipe.steps - step))
            losses.clear()
        starts = torch.randint(0, len(tokens) - recipe.window, (recipe.rows,), generator=generator)
        batch = torch.stack([tokens[start : start + recipe.window] for start in starts.tolist()])
        loss = _loss(teacher, student, batch, recipe)
        if not torch.isfinite(loss):
            raise UsageError(
                "the loss is not finite", found=f"step {step}", next_step="lower peak_rate in distill.toml"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, recipe)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        keep_zeros()
        losses.append(float(loss.detach()))
        progress.advance(1)


def _loss(teacher: Any, student: Any, batch: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    batch = batch.to(student.device)
    with torch.no_grad():
        expected = teacher(batch, use_cache=False).logits
    return divergence(expected, student(batch, use_cache=False).logits, recipe.temperature)


def _evaluate(teacher: Any, student: Any, rows: torch.Tensor, recipe: Recipe) -> float:
    plain = replace(recipe, temperature=1.0)
    with torch.no_grad():
        return float(np.mean([float(_loss(teacher, student, row[None], plain)) for row in rows]))


def _model(folder: Path, device: str) -> Any:
    auto: Any = AutoModelForCausalLM  # untyped in transformers
    return auto.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def _zeros(model: Any) -> Callable[[], None]:
    """A function that keeps the current zeros of the layers' matrices at 0."""
    matrices = [w for name, w in model.named_parameters() if ".layers." in name and w.dim() == 2]
    zeros = [w.detach() == 0 for w in matrices]

    def apply() -> None:
        with torch.no_grad():
            for w, zero in zip(matrices, zeros):
                w[zero] = 0

    return apply


def save(model: Any, files: Checkpoint, folder: Path) -> None:
    """The model's weights in the dtypes of a checkpoint, whose other files are copied."""
    state = model.state_dict()
    for path in files.path.iterdir():
        if path.is_file() and path not in files.weight_files:
            shutil.copyfile(path, folder / path.name)
    with (folder / SINGLE_FILE).open("wb") as file:
        writer = SafetensorsWriter(file, files.tensors.values())
        for name, info in files.tensors.items():
            if name in state:
                values = state[name].float().cpu().numpy()
                writer.add(name, info.dtype, info.shape, narrowed(values, info.dtype, name).data)
            else:
                writer.add(name, info.dtype, info.shape, files.read_raw(name))
        writer.finish()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pruned", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--text", help="a text in UTF-8, in place of the recipe's")
    parser.add_argument("--teacher", help="the original checkpoint, in place of the recipe's")
    parser.add_argument("--steps", type=int, help="in place of the recipe's")
    parser.add_argument("--device", default="cpu", help="a device of torch's")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint")
    given = parser.parse_args()
    try:
        options = {"text": given.text, "teacher": given.teacher, "steps": given.steps}
        recipe = replace(read_recipe(given.pruned), **{k: v for k, v in options.items() if v is not None})
        with console_progress(Console(stderr=True), lasting=False) as progress:
            result = distill(
                given.pruned, recipe, given.output, progress, device=given.device, overwrite=given.overwrite
            )
    except MlcpipeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    print(f"{given.output}: KL divergence from the original {result.before:.4f} -> {result.after:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
