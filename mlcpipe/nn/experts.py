"""Experts of layers that another device holds: the forwards of a stage call them, hidden states go there and back.

Attention, routers and shared experts stay in the stage. What crosses are the rows that experts read, as float32, the
chosen experts and their weights, and the sum of what they make of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Object, Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.language_model import blocks_of
from mlcpipe.nn.moe import Mixture
from mlcpipe.nn.rows import float32_rows

PROMPT_ROWS = "n"  # the symbol of a prompt's rows, whose arithmetic differs from that of decoded ones
CALL = "mlcpipe.experts"  # the function of the runtime that a forward calls


class ExpertsElsewhere(Object):  # type: ignore[misc]
    """What the runtime gives a forward, to call experts with."""


class Calls:
    """Calls of a layer's experts in the forward that is being exported, which has `handle`."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.handle: ExpertsElsewhere | None = None

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As `Mixture.mixed`."""
        assert self.handle is not None
        rows = x if x.dtype == "float32" else op.astype(x, "float32")
        of_prompt = getattr(x.shape[0], "name", "") == PROMPT_ROWS
        numbers = [relax.prim_value(self.layer), relax.prim_value(int(of_prompt))]
        call = relax.call_dps_packed(
            CALL, [self.handle._expr, *numbers, rows._expr, weights._expr, ids._expr],
            out_ty=relax.TensorType(x.shape, "float32"),
        )  # fmt: skip
        y = Tensor(_expr=relax.BlockBuilder.current().emit(call))
        return y if x.dtype == "float32" else op.astype(y, x.dtype)


def mixtures(model: CausalLM, layers: Sequence[int]) -> Iterator[tuple[int, Mixture]]:
    """The mixtures of some layers, with their layers. Raises ConfigError for layers without any, or with several."""
    found = [(index, one) for index in layers for one in blocks_of(model.model.layers[index], Mixture)]
    if not found or len({index for index, _ in found}) < len(found):
        raise ConfigError(
            f"experts of {model.facts.model_type} on a device of their own", expected="layers with one mixture each",
            found="no experts" if not found else "layers with several", next_step="cut the model by layers alone",
        )  # fmt: skip
    yield from found


def move(model: CausalLM, layers: Sequence[int]) -> None:
    """Leave the experts of some layers to another device."""
    for index, mixture in mixtures(model, layers):
        mixture.experts_gate_up = mixture.experts_down = None
        mixture.elsewhere = Calls(index)


def keep_alone(model: CausalLM, layers: Sequence[int]) -> None:
    """Leave only the experts of some layers in a model; they keep their names."""
    kept = {id(matrix) for _, one in mixtures(model, layers) for matrix in (one.experts_gate_up, one.experts_down)}
    _prune(model, kept)


def _prune(module: nn.Module, kept: set[int]) -> bool:
    """Whether a module is one of `kept` or has some, after the others were taken out of it."""
    if id(module) in kept:
        return True
    found = False
    for name, value in list(vars(module).items()):
        if isinstance(value, nn.ModuleList):
            several = [(one, _prune(one, kept)) for one in value]
            setattr(module, name, nn.ModuleList([one if has else nn.Module() for one, has in several]))
            found |= any(has for _, has in several)
        elif isinstance(value, nn.Module):
            has = _prune(value, kept)
            found |= has
            if not has:
                setattr(module, name, None)
        elif isinstance(value, nn.Parameter):
            setattr(module, name, None)
    return found


def functions(model: CausalLM) -> dict[str, Callable[..., Any]]:
    """The functions of a part that has experts alone, by name: of decoded rows and of prompts, for each layer."""
    assert model.stage is not None
    return {
        f"experts_{kind}_{index}": partial(mix, model, mixture)
        for index, mixture in mixtures(model, model.stage.layers)
        for kind in ("decode", "prefill")
    }


def mix(model: CausalLM, mixture: Mixture, rows: Tensor, weights: Tensor, ids: Tensor, handed: Tensor) -> Tensor:
    """Rows f32[m, hidden] for experts i32[m, chosen] with weights f32[m, chosen] -> f32[m, hidden], into `handed`."""
    x = rows if model.dtype == "float32" else op.astype(rows, model.dtype)
    return float32_rows(mixture.mix(x, weights, ids))


def specs(model: CausalLM) -> dict[str, Any]:
    """Argument specifications of `functions`. Rows of a decode step may be those of a prompt that give logits: "r"."""
    assert model.stage is not None
    tensor, hidden, found = nn.spec.Tensor, model.facts.hidden_size, {}
    for index, mixture in mixtures(model, model.stage.layers):
        top = mixture.routing.chosen
        for kind, size in (("decode", "r"), ("prefill", PROMPT_ROWS)):
            found[f"experts_{kind}_{index}"] = {
                "rows": tensor([size, hidden], "float32"),
                "weights": tensor([size, top], "float32"),
                "ids": tensor([size, top], "int32"),
                "handed": tensor([size, hidden], "float32"),
                "$": {"param_mode": "plain", "effect_mode": "none"},
            }
    return found
