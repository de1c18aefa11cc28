"""`--bits-per-weight`, of `mlcpipe compile` and `mlcpipe inspect`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.errors import UsageError
from mlcpipe.support.defaults import UNIFORM_QUANTIZATION
from mlcpipe.support.files import text_hash
from mlcpipe.support.progress import Progress

if TYPE_CHECKING:
    from mlcpipe.checkpoint import Checkpoint
    from mlcpipe.quantization.recipe import QuantizationRecipe

NO_TEXT = "none"


def check_bits(bits: float | None, text: str | None, quantization: str | None) -> None:
    """Raise UsageError for bits with a quantization, which implies its bits, and for a text without bits."""
    if text is not None and bits is None:
        raise UsageError("--bits-text has no effect", next_step="use it with --bits-per-weight")
    if bits is not None and quantization not in (None, UNIFORM_QUANTIZATION):
        raise UsageError(
            "--bits-per-weight and --quantization both set the bits", found=quantization, next_step="leave one out"
        )


def recipe_of_bits(
    checkpoint: Checkpoint, target: str, bits: float, text: str | None, progress: Progress
) -> tuple[QuantizationRecipe, str]:
    """The recipe for a number of bits, and how it was found.

    `text` is a path, NO_TEXT, or None for the calibration text; the recipe names it by its hash.
    Raises UsageError for impossible bits, and for an unsuitable text.
    """
    from mlcpipe.compiler.calibration.text import OWN_TEXT
    from mlcpipe.quality.bits import choose_bits
    from mlcpipe.quality.measure import WINDOW, read_text
    from mlcpipe.quality.sensitivity import guess, measure_sensitivity
    from mlcpipe.targets import load_target

    described = load_target(target)
    sha256 = ""
    if text == NO_TEXT:
        sensitivity = guess(checkpoint)
    else:
        path = OWN_TEXT if text is None else Path(text)
        sha256 = text_hash(read_text(path))  # checked before the work
        context = checkpoint.config.get("max_position_embeddings")
        if isinstance(context, int) and context < WINDOW:
            raise UsageError(
                "--bits-per-weight measures texts", expected=f"a model with a context of {WINDOW} tokens or more",
                found=context, next_step=f"add --bits-text {NO_TEXT}",
            )  # fmt: skip
        sensitivity = measure_sensitivity(checkpoint, path, progress)
    recipe, loss = choose_bits(checkpoint, described, bits, sensitivity, progress)
    recipe = replace(recipe, text_sha256=sha256)
    how = f"{bits:g} bits per weight; sensitivity {sensitivity.how}"
    return recipe, how if text == NO_TEXT else f"{how}; expected KL divergence {loss:.5f}"
