"""`mlcpipe inspect` of a checkpoint: the effect of a quantization on each matrix, and its recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.cli.bits import check_bits, recipe_of_bits
from mlcpipe.cli.terminal import cell, new_table, print_json, say, stderr_console, stdout_console
from mlcpipe.errors import UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.loading import check_names
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.defaults import ANY, DEFAULT_QUANTIZATION, DEFAULT_TARGET, KEEP, SERVE
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.quality.matrices import StoredMatrix
    from mlcpipe.quantization.recipe import QuantizationRecipe


@dataclass(frozen=True)
class Asked:
    """The options; `output` is the file of the recipe."""

    model: str
    target: str
    quantization: str | None
    method: str | None
    bits: float | None
    text: str | None
    output: Path | None
    as_json: bool


def inspect_checkpoint(asked: Asked) -> None:
    """Print a table, or JSON, of the matrices, and write the recipe."""
    check_bits(asked.bits, asked.text, asked.quantization)
    target = asked.target or DEFAULT_TARGET
    check_names(target, asked.quantization or DEFAULT_QUANTIZATION)
    _check_output(asked.output)
    from mlcpipe.checkpoint import open_checkpoint, resolve
    from mlcpipe.compiler.preflight import Purpose
    from mlcpipe.quality.matrices import stored_matrices
    from mlcpipe.quantization.packing import method_of
    from mlcpipe.quantization.recipe import load_recipe
    from mlcpipe.targets import load_target

    with console_progress(stderr_console(), lasting=False) as progress:
        purpose = Purpose(target, asked.quantization, task=ANY if asked.bits is None else SERVE, title=asked.model)
        checkpoint = open_checkpoint(resolve(asked.model, progress, check=purpose.check))
        if asked.bits is None:
            recipe, how = load_recipe(checkpoint.quantization(asked.quantization)), ""
        else:
            recipe, how = recipe_of_bits(checkpoint, target, asked.bits, asked.text, progress)
        if recipe.scheme.name == KEEP and asked.output is not None:
            raise UsageError("a recipe cannot keep matrices as they are", next_step="name a --quantization")
        method = method_of(recipe.scheme, asked.method, tuple(rule.scheme for rule in recipe.rules))
        matrices = stored_matrices(checkpoint, load_target(target), recipe, method, progress)
    if asked.output is not None:
        atomic_write(asked.output, _text_of(recipe, matrices, how).encode())
    if asked.as_json:
        listed = [asdict(matrix) | {"bits": matrix.bits} for matrix in matrices]
        print_json({"quantization": recipe.name, "how": how, "matrices": listed})
    else:
        _show(matrices, how, asked.output)


def _check_output(path: Path | None) -> None:
    """Raise UsageError for a file that is no recipe, or an existing one, as it may have been edited."""
    if path is not None and path.suffix != ".toml":
        raise UsageError("--output", expected="a .toml file", found=path)
    if path is not None and path.exists():
        raise UsageError("the recipe exists already", where=path, next_step="give another path")


def _text_of(recipe: QuantizationRecipe, matrices: Sequence[StoredMatrix], how: str) -> str:
    """The recipe with a line per matrix, except matrices in the default scheme."""
    from mlcpipe.quantization.recipe import recipe_text

    default = recipe.scheme
    tensors = [(m.name, m.scheme) for m in matrices if not (default.mixed and m.scheme == default.name)]
    return recipe_text(default.name, tensors, how, recipe.text_sha256)


def _show(matrices: Sequence[StoredMatrix], how: str, recipe: Path | None) -> None:
    console = stdout_console()
    table = new_table("matrix", "shape", "scheme", "size", "bits", "relative error", whole="matrix")
    for m in matrices:
        shape = " x ".join(map(str, m.shape))
        table.add_row(*map(cell, (m.name, shape, m.scheme, byte_size(m.nbytes), f"{m.bits:.2f}", f"{m.error:.4f}")))
    console.print(table)
    nbytes, elements = sum(m.nbytes for m in matrices), sum(m.elements for m in matrices)
    error = math.sqrt(sum(m.elements * m.error**2 for m in matrices) / elements)
    sums = f"{byte_size(nbytes)}, {8 * nbytes / elements:.2f} bits, relative error {error:.4f}"
    say(console, f"\n{len(matrices)} matrices: {sums}")
    if how:
        say(console, how)
    if recipe is not None:
        from mlcpipe.support.generated import shell_word

        say(console, f"\nNow type:  mlcpipe compile CHECKPOINT --quantization {shell_word(recipe)} -o BUNDLE")
