"""Schemes of single matrices: the checkpoint's own formats (`--quantization keep`), or those of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.errors import CheckpointError, ConfigError, TargetError
from mlcpipe.quantization.native_formats import family_of, native_scheme
from mlcpipe.quantization.recipe import QuantizationRecipe, block_columns, fits
from mlcpipe.quantization.scheme import Scheme, plain_scheme
from mlcpipe.support.defaults import UNIFORM_QUANTIZATION
from mlcpipe.support.json_files import shown
from mlcpipe.targets import Target
from mlcpipe.weights.table import Weight

_ROUNDED = f"add --quantization {UNIFORM_QUANTIZATION} or q8f16_1, which round the weights a second time"


def keep(
    weights: Sequence[Weight], checkpoint: Checkpoint, target: Target, formats: Collection[str]
) -> tuple[Weight, ...]:
    """The weights with lossless schemes: codes unchanged, float16, else float32.

    `formats` are the block formats that the target's kernels read. Raises TargetError for a matrix in another one.
    """
    return tuple(
        weight if weight.kind in ("vector", "float32") else _kept(weight, checkpoint, target, formats)
        for weight in weights
    )


def _kept(weight: Weight, checkpoint: Checkpoint, target: Target, formats: Collection[str]) -> Weight:
    if parts := _parts(weight, checkpoint):
        return replace(weight, parts=tuple(_kept(part, checkpoint, target, formats) for part in parts))
    return replace(weight, scheme=_scheme(weight, checkpoint, target, formats), columns=_columns(weight, checkpoint))


def _parts(weight: Weight, checkpoint: Checkpoint) -> list[Weight]:
    """Separate weights for an expert's sources, such as gate and up, if their formats differ; else none."""
    places = list(zip(*weight.sources, strict=True))
    if len(places) == 1 or _is_plain(stored := _formats(weight, checkpoint)) or len(stored) == 1:
        return []
    stem, (*experts, _, k) = weight.name.removesuffix("weight"), weight.shape
    return [
        replace(
            weight,
            name=f"{stem}part{i}.weight",
            shape=(*experts, checkpoint.tensors[sources[0]].shape[0], k),
            sources=tuple((source,) for source in sources),
        )
        for i, sources in enumerate(places)
    ]


def _formats(weight: Weight, checkpoint: Checkpoint) -> set[str]:
    return {checkpoint.tensors[source].dtype for group in weight.sources for source in group}


def _is_plain(stored: set[str]) -> bool:
    return stored <= {"float32", "float16", "bfloat16"}


def _columns(weight: Weight, checkpoint: Checkpoint) -> bytes:
    """The column order of a weight, or of each of its experts; empty if columns are in their own order."""
    if weight.kind == "plain":  # read as numbers, which are in their own order
        return b""
    orders = [_order(weight.name, group, checkpoint) for group in weight.sources]
    own = np.arange(weight.shape[-1], dtype=np.int32).tobytes()
    return b"".join(order or own for order in orders) if any(orders) else b""


def _order(name: str, group: tuple[str, ...], checkpoint: Checkpoint) -> bytes:
    """The column order that all sources of a matrix share."""
    found = [checkpoint.columns(source) for source in group]
    orders = {b"" if order is None else order.tobytes() for order in found}
    if len(orders) > 1:
        raise CheckpointError(
            f"the columns of {name} are sorted in several ways", where=f"tensor {group[0]}",
            expected="one column order for joined matrices", next_step="take a checkpoint without desc_act",
        )  # fmt: skip
    return orders.pop()


def _scheme(weight: Weight, checkpoint: Checkpoint, target: Target, formats: Collection[str]) -> Scheme:
    stored = _formats(weight, checkpoint)
    if _is_plain(stored):
        return plain_scheme("float16" if stored == {"float16"} else "float32")
    if len(stored) > 1:
        raise TargetError(
            f"the experts of {weight.name} are stored in several formats",
            expected="one", found=", ".join(sorted(stored)), next_step=_ROUNDED,
        )  # fmt: skip
    (name,) = stored
    if weight.kind == "plain":  # routers: small, and their kernels read numbers
        return plain_scheme("float32")
    if family_of(name) not in formats:
        raise TargetError(
            f"no kernel of {target.name} reads {name}",
            where=f"tensor {weight.sources[0][0]}", expected=" ".join(["F32 F16 BF16", *sorted(formats)]),
            next_step=_ROUNDED,
        )  # fmt: skip
    return native_scheme(name)


def planned(
    weights: Sequence[Weight], recipe: QuantizationRecipe, target: Target, formats: Collection[str], output: str | None
) -> tuple[Weight, ...]:
    """The weights; a matrix whose scheme differs from the recipe's default gets that scheme.

    `formats` are the block formats that the target's kernels read; `output` names the logits matrix.
    Raises TargetError for another format, ConfigError for a rule that names no matrix or one whose rows do not fit.
    """
    made = tuple(
        _planned(weight, recipe, target, formats, output=weight.name == output) if weight.kind == "scheme" else weight
        for weight in weights
    )
    matrices = [weight.name for weight in weights if weight.kind == "scheme"]
    used = {recipe.rule_of(name) for name in matrices}
    idle = next((rule for rule in recipe.rules if rule not in used), None)
    if idle is not None:
        raise ConfigError(
            f"the pattern {shown(idle.pattern)} names no matrix, or none that earlier ones leave", where=recipe.source,
            expected=f"patterns of names such as {matrices[-1]}",
            next_step="`mlcpipe inspect CHECKPOINT` lists them",
        )  # fmt: skip
    return made


def _planned(
    weight: Weight, recipe: QuantizationRecipe, target: Target, formats: Collection[str], *, output: bool
) -> Weight:
    k = weight.shape[-1]
    scheme = recipe.scheme_of(weight.name, k, output=output)
    if scheme.name == recipe.scheme.name:
        return weight
    if not fits(scheme, k):
        raise ConfigError(
            f"{weight.name} does not fit {scheme.name}", where=recipe.source,
            expected=f"rows of a multiple of {block_columns(scheme)} columns", found=k,
            next_step="give it another scheme",
        )  # fmt: skip
    if scheme.kept and scheme.name not in formats:
        raise TargetError(
            f"no kernel of {target.name} reads {scheme.name}, in which {recipe.scheme.name} has {weight.name}",
            next_step=f"add --quantization {UNIFORM_QUANTIZATION}",
        )
    return replace(weight, scheme=scheme)
