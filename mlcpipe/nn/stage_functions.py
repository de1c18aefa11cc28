"""The functions of a stage over states that the runtime owns: those of `state_functions.py` for a run of layers.

`rows` are the step's: tokens i32[m] in the first stage, else the hidden states f32[m, hidden] that the one before
wrote to `handed`. The last stage writes logits instead. A stage whose experts are elsewhere gets what calls them:
`experts`, its last argument but the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import step_states
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.experts import Calls, ExpertsElsewhere
from mlcpipe.nn.language_model import blocks_of
from mlcpipe.nn.moe import Mixture
from mlcpipe.nn.rows import float32_rows


def functions(model: CausalLM) -> dict[str, Callable[..., Any]]:
    """The functions by name."""
    assert model.stage is not None
    decode, prefill = (decode_last, prefill_last) if model.stage.last else (hand_decoded, hand_prefilled)
    return {
        "decode": partial(decode, model),
        "prefill": partial(prefill, model),
        "copy_pages": partial(step_states.copy_pages, model),
    }


def hand_decoded(
    model: CausalLM,
    rows: Tensor,
    step: Tensor,
    handed: Tensor,
    states: list[Tensor],
    experts: ExpertsElsewhere | None = None,
) -> Tensor:
    """Rows of a decode step -> hidden states f32[b, hidden], which are written to `handed`."""
    return float32_rows(_hidden(model, rows, step, states, experts, prefill_rows=False))


def hand_prefilled(
    model: CausalLM,
    rows: Tensor,
    step: Tensor,
    handed: Tensor,
    states: list[Tensor],
    experts: ExpertsElsewhere | None = None,
) -> Tensor:
    """Rows of prompts -> hidden states f32[n, hidden], which are written to `handed`."""
    return float32_rows(_hidden(model, rows, step, states, experts, prefill_rows=True))


def decode_last(
    model: CausalLM,
    rows: Tensor,
    step: Tensor,
    logits: Tensor,
    states: list[Tensor],
    experts: ExpertsElsewhere | None = None,
) -> Tensor:
    """Rows of a decode step -> logits f32[b, vocab], which are written to `logits`."""
    return model.logits(_hidden(model, rows, step, states, experts, prefill_rows=False))


def prefill_last(
    model: CausalLM,
    rows: Tensor,
    wanted: Tensor,
    step: Tensor,
    logits: Tensor,
    states: list[Tensor],
    experts: ExpertsElsewhere | None = None,
) -> Tensor:
    """Rows of prompts -> logits f32[r, vocab] of the rows `wanted` i32[r], which are written to `logits`."""
    return model.logits(_hidden(model, rows, step, states, experts, prefill_rows=True, wanted=wanted))


def _hidden(
    model: CausalLM,
    rows: Tensor,
    step: Tensor,
    states: list[Tensor],
    experts: ExpertsElsewhere | None,
    prefill_rows: bool,
    wanted: Tensor | None = None,
) -> Tensor:
    assert model.stage is not None
    for calls in _calls(model):
        calls.handle = experts
    kv = step_states.StepStates(model, model.states(), step, states, prefill_rows)
    if model.stage.first:
        x = model.embed(rows)
    else:
        x = rows if model.dtype == "float32" else op.astype(rows, model.dtype)
    hidden: list[Tensor] = model.model(x, kv, (), None, wanted)
    return hidden[-1]


def _calls(model: CausalLM) -> list[Calls]:
    """Those of the experts that are elsewhere."""
    found = (one.elsewhere for one in blocks_of(model.model, Mixture))
    return [one for one in found if isinstance(one, Calls)]


def specs(model: CausalLM) -> dict[str, Any]:
    """Argument specifications of the functions, for `nn.Module.export_tvm`."""
    assert model.stage is not None
    stage, tensor, facts, table = model.stage, nn.spec.Tensor, model.facts, model.states()
    states = step_states.argument(table, model.windows())
    experts = {"experts": nn.spec.Object(object_type=ExpertsElsewhere)} if _calls(model) else {}

    def forward(size: str, out: str) -> dict[str, Any]:
        rows = tensor([size], "int32") if stage.first else tensor([size, facts.hidden_size], "float32")
        result = {"logits": tensor([out, facts.vocab_size], "float32")}
        if not stage.last:
            result = {"handed": tensor([size, facts.hidden_size], "float32")}
        plain = {"param_mode": "plain", "effect_mode": "none"}
        return {"rows": rows, "step": tensor(["k"], "int32"), **result, "states": states, **experts, "$": plain}

    prefill = forward("n", "r")
    return {
        "decode": forward("b", "b"),
        "prefill": {**prefill, "wanted": tensor(["r"], "int32")} if stage.last else prefill,
        "copy_pages": {
            "pairs": step_states.pairs_argument(model.windows()),
            "states": states,
            "$": {"param_mode": "none", "effect_mode": "none"},
        },
    }
