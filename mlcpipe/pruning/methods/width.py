"""Removes columns of the MLP's hidden layer; the others compensate for them by least squares."""

from __future__ import annotations

from collections.abc import Iterator

from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.pruning.units import Units, remove_units
from mlcpipe.pruning.work import PrunedTensor, Work

GRAM, UNITS = True, "MLP columns"
_MULTIPLE = 32  # columns that share a scale in 4 bits


def allowed(model: CausalLM) -> list[int]:
    """Possible numbers of columns: multiples of a group's, and all."""
    count = _count(model)
    return [*range(_MULTIPLE, count, _MULTIPLE), count]


def pruned(work: Work) -> Iterator[PrunedTensor]:
    """See the package."""
    work.config["intermediate_size"] = work.keep
    producers = {f"mlp.{of}_proj.{part}": 1 for of in ("gate", "up") for part in ("weight", "bias")}
    return remove_units(work, Units(_count(work.model), 1, "mlp.down_proj.weight", producers))


def _count(model: CausalLM) -> int:
    return int(model.model.layers[0].mlp.down_proj.weight.shape[1])
