"""EAGLE-3 (Li et al. 2025): a decoder layer that predicts a token from three hidden states and the token after them.

h_p^a, h_p^b and h_p^c are the inputs of three of the model's layers at position p, g_p = fc [h_p^a; h_p^b; h_p^c], and
e_p embeds the token at p + 1. The layer attends from [norm(e_p); norm(g_p)] to earlier positions and gives a_p, from
which the logits of the token at p + 2 are computed.
Where the model has not computed h_p, because its token is drafted, a_{p-1} replaces g_p.
Formulas as in https://github.com/SafeAILab/EAGLE, eagle/model/cnets.py, and vLLM's models/llama_eagle3.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.base_config import BaseConfig
from mlcpipe.nn.layer_head import NEVER, LayerHead
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rows import columns
from mlcpipe.nn.step_states import StepStates


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


class EagleHead(LayerHead):
    """`places` i32[V] maps tokens of the model to tokens of the head, -1 for none; None if they are the same."""

    parameter = "eagle_head"

    def __init__(
        self, base: BaseConfig, layers: tuple[int, ...], target_hidden: int, vocab: int,
        places: NDArray[np.int32] | None, *, norm_before_residual: bool, embeds: bool,
    ) -> None:  # fmt: skip
        self.layers, self.places = layers, places
        self.module: EagleModule = EagleModule(base, target_hidden, vocab, norm_before_residual, embeds)
        super().__init__(self.module, base.rope(), base.hidden_size)

    def states(self, model: Any) -> list[State]:
        """As `LayerHead.states`."""
        states: list[State] = self.module.midlayer.self_attn.states(model)
        return states

    def features(self, model: Any, kept: Tensor) -> Tensor:
        """fc of the kept rows, without their part for the model's logits."""
        return self.module.fc(columns(kept, 0, len(self.layers) * model.facts.hidden_size, model.dtype))

    def table(self, model: Any) -> Any:
        """The head's own embedding, or the model's."""
        return getattr(self.module, "embed_tokens", model.model.embed_tokens)

    def attend(self, embedded: Tensor, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """As `LayerHead.attend`."""
        return self.module.midlayer.attend(embedded, x, kv, cos, sin)

    def continued(self, x: Tensor) -> Tensor:
        """As `LayerHead.continued`."""
        return self.module.midlayer.feed(x)

    def logits(self, model: Any, x: Tensor) -> Tensor:
        """As `LayerHead.logits`."""
        y = self.module.lm_head(self.module.norm(x))
        y = y if y.dtype == "float32" else op.astype(y, "float32")
        if self.places is None:
            return y
        return op.tensor_expr_op(_of_all_tokens, "of_all_tokens", [y, Tensor.from_const(self.places)])


def _of_all_tokens(logits: te.Tensor, places: te.Tensor) -> te.Tensor:
    """logits f32[m, v] of the head's tokens -> f32[m, V] of the model's."""

    def logit(i: tirx.Var, token: tirx.Var) -> tirx.PrimExpr:
        place = places[token].astype("int64")
        value = logits[i, tirx.max(place, tirx.const(0, "int64"))]
        return tirx.if_then_else(place < 0, tirx.const(NEVER, "float32"), value)

    return te.compute((logits.shape[0], places.shape[0]), logit, name="of_all_tokens")
