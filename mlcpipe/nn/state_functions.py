"""The functions of a language model over states that the runtime owns: `prefill`, `decode`, `copy_pages`.

`step` and `states` are those of `StepStates`; a forward adds its tokens to the states. A model that denoises blocks has
no `decode`: all its rows have the arithmetic of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import step_states
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.rows import columns, rows_added, rows_instead, rows_of, write_rows


def functions(model: CausalLM) -> dict[str, Callable[..., Any]]:
    """The functions by name, without those of its draft head."""
    made: dict[str, Callable[..., Any]] = {function.__name__: partial(function, model) for function in _FUNCTIONS}
    return made if model.tower is None else made | {"encode_picture": model.tower.encode_picture}


def decode(model: CausalLM, tokens: Tensor, step: Tensor, logits: Tensor, states: list[Tensor]) -> Tensor:
    """tokens i32[b], with decode's arithmetic -> logits f32[b, vocab], which are written to `logits`."""
    return model.logits(_hidden(model, tokens, step, states, prefill_rows=False)[-1])


def prefill(
    model: CausalLM, tokens: Tensor, rows: Tensor, step: Tensor, logits: Tensor, states: list[Tensor]
) -> Tensor:
    """tokens i32[n] of prompts -> logits f32[r, vocab] of the rows i32[r], which are written to `logits`."""
    return model.logits(_hidden(model, tokens, step, states, prefill_rows=True, wanted=rows)[-1])


def prefill_pictures(
    model: CausalLM, tokens: Tensor, places: Tensor, pictures: Tensor, rows: Tensor, step: Tensor, logits: Tensor,
    states: list[Tensor],
) -> Tensor:  # fmt: skip
    """As `prefill`, of prompts with pictures: where places i32[n] is not negative it is the row of `pictures` f32[e,
    width] that stands for the token's embedding. What rows have beyond it is added after the first layers.
    """
    return model.logits(
        _hidden(model, tokens, step, states, prefill_rows=True, wanted=rows, others=(pictures, places))[-1]
    )


def decode_hidden(
    model: CausalLM, tokens: Tensor, hidden: Tensor, step: Tensor, logits: Tensor, states: list[Tensor]
) -> Tensor:
    """As `decode`; the draft head's input of each row is written to `hidden` f32[b, kept * hidden]."""
    return model.logits(_kept(model, tokens, hidden, step, states, prefill_rows=False))


def prefill_hidden(
    model: CausalLM, tokens: Tensor, rows: Tensor, hidden: Tensor, step: Tensor, logits: Tensor, states: list[Tensor]
) -> Tensor:
    """As `prefill`; the draft head's input of each row is written to `hidden` f32[n, kept * hidden]."""
    kept = _kept(model, tokens, hidden, step, states, prefill_rows=True)
    return model.logits(op.tensor_expr_op(rows_of, "rows", [kept, rows]))


def copy_pages(model: CausalLM, pairs: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    """In the states of group g, page pairs[g][i, 1] = page pairs[g][i, 0]."""
    return step_states.copy_pages(model, pairs, states)


_FUNCTIONS = (decode, prefill, prefill_pictures, decode_hidden, prefill_hidden, copy_pages)


def _kept(
    model: CausalLM, tokens: Tensor, hidden: Tensor, step: Tensor, states: list[Tensor], prefill_rows: bool
) -> Tensor:
    """Write all kept rows to `hidden` -> those [m, hidden] that logits are computed from."""
    assert model.draft_head is not None
    rows = _hidden(model, tokens, step, states, prefill_rows, model.draft_head.layers)
    written, d = write_rows(rows, hidden), model.facts.hidden_size
    return columns(written, (len(rows) - 1) * d, d, rows[-1].dtype)


def _hidden(
    model: CausalLM,
    tokens: Tensor,
    step: Tensor,
    states: list[Tensor],
    prefill_rows: bool,
    kept: Sequence[int] = (),
    wanted: Tensor | None = None,
    others: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor]:
    ahead = "" if others is None or model.tower is None else model.tower.info.ahead
    kv = step_states.StepStates(model, model.states(), step, states, prefill_rows, ahead=ahead)
    kv.moved = model.tower is not None and model.tower.layout is not None
    x, added = model.embed(tokens), list[Callable[[Tensor], Tensor]]()
    if others is not None:
        assert model.tower is not None
        kv.layout, hidden = model.tower.layout, model.facts.hidden_size
        x = op.tensor_expr_op(rows_instead, "rows_instead", [x, *others])
        added = [partial(_add_rows, others, begin) for begin in range(hidden, model.tower.info.width, hidden)]
    rows: list[Tensor] = model.model(x, kv, kept, tokens, wanted, added)
    return rows


def _add_rows(others: tuple[Tensor, Tensor], begin: int, x: Tensor) -> Tensor:
    """x [m, hidden] with the columns from `begin` on of the rows of pictures (DeepStack, Meng et al. 2024)."""
    return op.tensor_expr_op(partial(rows_added, begin=begin), "rows_added", [x, *others])


def specs(model: CausalLM) -> dict[str, Any]:
    """Argument specifications of the functions, for `nn.Module.export_tvm`."""
    tensor, vocab, table = nn.spec.Tensor, model.facts.vocab_size, model.states()
    states = step_states.argument(table, model.windows())
    cache = {"step": tensor(["k"], "int32"), "states": states, "$": {"param_mode": "plain", "effect_mode": "none"}}
    forwards = {
        "decode": {"tokens": tensor(["b"], "int32"), "logits": tensor(["b", vocab], "float32"), **cache},
        "prefill": {
            "tokens": tensor(["n"], "int32"),
            "rows": tensor(["r"], "int32"),
            "logits": tensor(["r", vocab], "float32"),
            **cache,
        },
        "copy_pages": {
            "pairs": step_states.pairs_argument(model.windows()),
            "states": states,
            "$": {"param_mode": "none", "effect_mode": "none"},
        },
    }
    if model.tower is not None:
        pictures = {
            "places": tensor(["n"], "int32"),
            "pictures": tensor(["e", model.tower.info.width], "float32"),
        }
        forwards |= {"prefill_pictures": {**forwards["prefill"], **pictures}, **model.tower.spec()}
    if model.facts.diffusion is not None:
        del forwards["decode"]
    head = model.draft_head
    if head is None:
        return forwards
    kinds = {"decode": "b", "prefill": "n"} if head.prompts else {"decode": "b"}
    hidden = {
        f"{kind}_hidden": {**forwards[kind], "hidden": tensor([rows, head.kept_size(model)], "float32")}
        for kind, rows in kinds.items()
    }
    return hidden | head.spec(model) | forwards
