"""EAGLE-3 (Li et al. 2025): a decoder layer that predicts a token from three hidden states and the token after them.

h_p^a, h_p^b and h_p^c are the inputs of three of the model's layers at position p, g_p = fc [h_p^a; h_p^b; h_p^c], and
e_p embeds the token at p + 1. The layer attends from [norm(e_p); norm(g_p)] to earlier positions and gives a_p, from
which the logits of the token at p + 2 are computed.
Where the model has not computed h_p, because its token is drafted, a_{p-1} replaces g_p.
Formulas as in https://github.com/SafeAILab/EAGLE, eagle/model/cnets.py, and vLLM's models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.base_config import BaseConfig
from mlcpipe.nn.draft_head import DraftHead
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rope import cos_sin
from mlcpipe.nn.rows import columns, rows_of, write_rows
from mlcpipe.nn.step_states import StepStates, argument

_NEVER = -1e30  # the logit of a token outside the head's vocabulary


class EagleLayer(nn.Module):
    """The layer, named as in the authors' checkpoints."""

    def __init__(self, base: BaseConfig, norm_before_residual: bool) -> None:
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RMSNorm(base.hidden_size, base.norm.eps)
        self.input_layernorm = RMSNorm(base.hidden_size, base.norm.eps)
        self.self_attn = Attention(base.attention(input_size=2 * base.hidden_size), 0)
        self.post_attention_layernorm = RMSNorm(base.hidden_size, base.norm.eps)
        self.mlp = base.mlp()

    def attend(self, embedded: Tensor, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """embedded and x [m, hidden] -> [m, hidden]; keys and values of the rows are added to the pages."""
        normed = self.hidden_norm(x)
        y = self.self_attn(op.concat([self.input_layernorm(embedded), normed], dim=1), kv, cos, sin)
        return op.add(normed if self.norm_before_residual else x, y)

    def feed(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return op.add(x, self.mlp(self.post_attention_layernorm(x)))


class EagleModule(nn.Module):
    """Parameters, named as in the authors' checkpoints. `vocab`: tokens that the head predicts."""

    def __init__(self, base: BaseConfig, target_hidden: int, vocab: int, before: bool, embeds: bool) -> None:
        self.fc = Linear(3 * target_hidden, base.hidden_size)
        self.midlayer = EagleLayer(base, before)
        self.norm = RMSNorm(base.hidden_size, base.norm.eps)
        self.lm_head = Linear(base.hidden_size, vocab)
        if embeds:
            self.embed_tokens = Embedding(base.vocab_size, base.hidden_size)


class EagleHead(DraftHead):
    """`draft_prompt` adds rows of a prompt to the pages, `draft_first` predicts from the model's hidden states, and
    `draft_next` continues from a prediction.

    `places` i32[V] maps tokens of the model to tokens of the head, -1 for none; None if they are the same.
    """

    parameter = "eagle_head"
    prompts = True

    def __init__(
        self, base: BaseConfig, layers: tuple[int, ...], target_hidden: int, vocab: int,
        places: NDArray[np.int32] | None, *, norm_before_residual: bool, embeds: bool,
    ) -> None:  # fmt: skip
        self.base, self.layers, self.places = base, layers, places
        self.rope = base.rope()
        if self.rope.depends_on_length:
            raise ConfigError("the draft head's frequencies of RoPE follow the length", expected="fixed ones")
        self.module: EagleModule = EagleModule(base, target_hidden, vocab, norm_before_residual, embeds)
        for param in self.module.parameters():
            param.attrs["reads"] = Fraction(0)

    def states(self, model: Any) -> list[State]:
        """The states of the head's layer, in separate pages."""
        states: list[State] = self.module.midlayer.self_attn.states(model)
        return states

    def functions(self, model: Any) -> Mapping[str, Callable[..., Tensor]]:
        """As `DraftHead.functions`."""
        return {
            "draft_prompt": partial(self._prompt, model),
            "draft_first": partial(self._first, model),
            "draft_next": partial(self._next, model),
        }

    def _prompt(self, model: Any, tokens: Tensor, features: Tensor, step: Tensor, pages: list[Tensor]) -> Tensor:
        """tokens i32[n], features f32[n, kept * hidden] of the rows before them -> the pages with their keys."""
        kv = self._cache(model, step, pages, prefill_rows=True)
        self._attend(model, kv, tokens, self._features(model, features))
        return kv.tensors[0]

    def _first(
        self, model: Any, tokens: Tensor, features: Tensor, rows: Tensor, hidden: Tensor, step: Tensor,
        logits: Tensor, pages: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """tokens i32[b], features f32[b, kept * hidden] of the rows before them -> logits f32[d, V] of the rows i32[d].

        They are written to `logits`, and the input of `draft_next` to `hidden` f32[d, hidden].
        """
        kv = self._cache(model, step, pages, prefill_rows=False)
        x = self._attend(model, kv, tokens, self._features(model, features))
        return self._guess(op.tensor_expr_op(rows_of, "rows", [x, rows]), hidden)

    def _next(
        self, model: Any, tokens: Tensor, hidden: Tensor, step: Tensor, logits: Tensor, pages: list[Tensor]
    ) -> Tensor:
        """The last sampled tokens i32[d], and `hidden` f32[d, hidden], which is replaced -> logits f32[d, V]."""
        kv = self._cache(model, step, pages, prefill_rows=False)
        x = columns(hidden, 0, self.base.hidden_size, model.dtype)
        return self._guess(self._attend(model, kv, tokens, x), hidden)

    def _cache(self, model: Any, step: Tensor, pages: list[Tensor], prefill_rows: bool) -> StepStates:
        return StepStates(model, self.states(model), step, list(pages), prefill_rows)

    def _features(self, model: Any, features: Tensor) -> Tensor:
        """fc of the kept rows, without their part for the model's logits."""
        return self.module.fc(columns(features, 0, 3 * model.facts.hidden_size, model.dtype))

    def _attend(self, model: Any, kv: StepStates, tokens: Tensor, x: Tensor) -> Tensor:
        table = getattr(self.module, "embed_tokens", model.model.embed_tokens)
        cos, sin = cos_sin(self.rope, kv.positions(tokens.shape[0]), None)
        return self.module.midlayer.attend(table(tokens), x, kv, cos, sin)

    def _guess(self, x: Tensor, hidden: Tensor) -> Tensor:
        dtype = x.dtype
        x = columns(write_rows([self.module.midlayer.feed(x)], hidden), 0, self.base.hidden_size, dtype)
        y = self.module.lm_head(self.module.norm(x))
        y = y if y.dtype == "float32" else op.astype(y, "float32")
        if self.places is None:
            return y
        return op.tensor_expr_op(_of_all_tokens, "of_all_tokens", [y, Tensor.from_const(self.places)])

    def spec(self, model: Any) -> dict[str, Any]:
        """As `DraftHead.spec`."""
        tensor, d, vocab = nn.spec.Tensor, self.base.hidden_size, model.facts.vocab_size
        kept = self.kept_size(model)
        cache = {
            "step": tensor(["k"], "int32"),
            "pages": argument(self.states(model)),
            "$": {"param_mode": "plain", "effect_mode": "none"},
        }

        def rows(m: str) -> dict[str, Any]:
            return {"tokens": tensor([m], "int32"), **cache}

        def out(m: str) -> dict[str, Any]:
            return {"hidden": tensor([m, d], "float32"), "logits": tensor([m, vocab], "float32")}

        return {
            "draft_prompt": {**rows("n"), "features": tensor(["n", kept], "float32")},
            "draft_first": {
                **rows("b"), **out("d"), "features": tensor(["b", kept], "float32"), "rows": tensor(["d"], "int32")
            },
            "draft_next": {**rows("d"), **out("d")},
        }  # fmt: skip


def _of_all_tokens(logits: te.Tensor, places: te.Tensor) -> te.Tensor:
    """logits f32[m, v] of the head's tokens -> f32[m, V] of the model's."""

    def logit(i: tirx.Var, token: tirx.Var) -> tirx.PrimExpr:
        place = places[token].astype("int64")
        value = logits[i, tirx.max(place, tirx.const(0, "int64"))]
        return tirx.if_then_else(place < 0, tirx.const(_NEVER, "float32"), value)

    return te.compute((logits.shape[0], places.shape[0]), logit, name="of_all_tokens")
