"""Spends bits where they help: the schemes of least KL divergence that fit `--bits-per-weight`.

Matrices that read the same input are stored alike so that they stay joined. Each such group needs one figure: the
divergence with only that group rounded to 4 bits (`sensitivity.py`). In another scheme it scales with the square of the
relative error. Divergences of groups nearly add up. Each step spends bits where a byte saves the most divergence.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.export import kept_formats
from mlcpipe.compiler.job import stored_weights
from mlcpipe.errors import UsageError
from mlcpipe.quality.matrices import rounding_errors
from mlcpipe.quality.sensitivity import Sensitivity
from mlcpipe.quantization.recipe import QuantizationRecipe, fits, load_recipe, make_recipe, matrix_scheme
from mlcpipe.support.defaults import SEARCH, UNIFORM_QUANTIZATION
from mlcpipe.support.progress import Progress
from mlcpipe.targets import Target
from mlcpipe.weights.table import Weight

# Not Q2_K: its errors are too large for squares of them to tell the divergence; its recipes were worse on the ruler.
CANDIDATES = ("Q3_K", UNIFORM_QUANTIZATION, "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0")


@dataclass(frozen=True)
class Choice:
    """A scheme of a group: its bytes, and its expected divergence."""

    scheme: str
    nbytes: int
    loss: float


@dataclass(frozen=True)
class Group:
    """Matrices that are stored alike, by their names in a recipe, and their possible schemes."""

    names: tuple[str, ...]
    choices: tuple[Choice, ...]


def spend(groups: Sequence[Group], budget: float) -> list[Choice]:
    """The choice of each group, with the least sum of losses within a byte budget.

    Greedy along the lower convex hulls of (bytes, loss): the optimum for its own number of bytes, which misses the
    budget by less than one step. Groups that exceed any budget get their smallest choice.
    """
    hulls = [_hull(group.choices) for group in groups]
    chosen, left = [0] * len(groups), budget - sum(hull[0].nbytes for hull in hulls)
    steps = [(_slope(hull[0], hull[1]), i) for i, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, i = heapq.heappop(steps)
        here, better = hulls[i][chosen[i]], hulls[i][chosen[i] + 1]
        if better.nbytes - here.nbytes > left:
            continue
        left -= better.nbytes - here.nbytes
        chosen[i] += 1
        if chosen[i] + 1 < len(hulls[i]):
            heapq.heappush(steps, (_slope(better, hulls[i][chosen[i] + 1]), i))
    return [hull[i] for hull, i in zip(hulls, chosen)]


def _slope(here: Choice, better: Choice) -> float:
    """Loss per additional byte, negative."""
    return (better.loss - here.loss) / (better.nbytes - here.nbytes)


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull, the smallest first: each step gains less per byte than the last."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one.nbytes, one.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-1], choice) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def choose_bits(
    checkpoint: Checkpoint, target: Target, bits: float, sensitivity: Sensitivity, progress: Progress
) -> tuple[QuantizationRecipe, float]:
    """The recipe of at most `bits` per weight, and its expected divergence.

    Raises UsageError for impossible bits.
    """
    weights = stored_weights(checkpoint, target, load_recipe(UNIFORM_QUANTIZATION))
    groups = _groups(checkpoint, target, weights, sensitivity, progress)
    others = sum(weight.nbytes for weight in weights if weight.kind != "scheme")
    numbers = sum(math.prod(weight.shape) for weight in weights)
    least, most = (
        8 * (others + sum(best(one.nbytes for one in group.choices) for group in groups)) / numbers
        for best in (min, max)
    )
    if not least <= bits <= most:
        raise UsageError("--bits-per-weight", expected=f"{least:.2f} to {most:.2f} for this model", found=f"{bits:g}")
    chosen = spend(groups, bits * numbers / 8 - others)
    tensors = {
        name: choice.scheme
        for group, choice in zip(groups, chosen)
        for name in group.names
        if choice.scheme != UNIFORM_QUANTIZATION
    }
    recipe = make_recipe(UNIFORM_QUANTIZATION, tensors, "--bits-per-weight")
    return recipe, sum(choice.loss for choice in chosen)


def _groups(
    checkpoint: Checkpoint, target: Target, weights: Sequence[Weight], sensitivity: Sensitivity, progress: Progress
) -> list[Group]:
    by_source = {source: w for w in weights for group in w.sources for source in group}
    layout, formats = next(w.layout for w in weights if w.layout is not None), kept_formats(target)
    progress.stage("round the matrices")
    progress.steps_total(len(sensitivity.losses))
    groups = []
    for joined, loss in sensitivity.losses:
        members = {by_source[source].name: by_source[source] for group in joined.sources for source in group}
        k = joined.shape[-1]
        schemes = [matrix_scheme(name) for name in CANDIDATES]
        schemes = [one for one in schemes if fits(one, k) and (not one.kept or one.name in formats)]
        errors = rounding_errors(joined, checkpoint, schemes, SEARCH)
        base = errors[[one.name for one in schemes].index(UNIFORM_QUANTIZATION)] or 1.0
        choices = []
        for scheme, error in zip(schemes, errors):
            size = sum(replace(w, scheme=scheme, layout=layout).nbytes for w in members.values())
            choices.append(Choice(scheme.name, size, loss * (error / base) ** 2))
        groups.append(Group(tuple(members), tuple(choices)))
        progress.advance(1)
    return groups
