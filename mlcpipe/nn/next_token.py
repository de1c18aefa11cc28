"""The layer that checkpoints ship to draft (multi-token prediction, DeepSeek-V3, Liu et al. 2024, section 2.2).

h_p is the input of the model's logits at position p, e_p embeds the token at p + 1. The layer runs over
eh [enorm(e_p); hnorm(h_p)]; its output, normalized, is a_p, from which the model's own matrix computes the logits of
the token at p + 2; of large vocabularies only of the first quarter, which has the most frequent tokens (FR-Spec, Zhao
et al. 2025). Where the model has not computed h_p, because its token is drafted, a_{p-1} replaces it. That h_p is
normalized is what vLLM's qwen3_next_mtp.py and deepseek_mtp.py do, and llama.cpp.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.nn.decoder_layer import DecoderLayer
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.layer_head import NEVER, LayerHead
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import Rope
from mlcpipe.nn.rows import columns
from mlcpipe.nn.step_states import StepStates

_WHOLE = 65536  # tokens of a vocabulary whose logits are all computed
_ROWS = 16  # a multiple of which they are cut to


class NextTokenModule(nn.Module):
    """Parameters; DeepSeek-V3 names the first three so."""

    def __init__(self, layer: DecoderLayer, norm: NormSpec, facts: ModelFacts) -> None:
        hidden_size = facts.hidden_size
        self.enorm, self.hnorm = norm(hidden_size), norm(hidden_size)
        self.eh_proj = Linear(2 * hidden_size, hidden_size)
        self.layer = layer
        self.norm = norm(hidden_size)
        if facts.vocab_size > _WHOLE:
            self.head = Linear(hidden_size, facts.vocab_size // 4 // _ROWS * _ROWS)
            self.head.weight.attrs["first_rows_of"] = "model.embed_tokens.weight" if facts.tied else "lm_head.weight"


class NextTokenHead(LayerHead):
    """A layer as those of the model, whose embedding and logits it shares."""

    parameter = "mtp"

    def __init__(self, layer: DecoderLayer, rope: Rope, norm: NormSpec, facts: ModelFacts) -> None:
        self.module: NextTokenModule = NextTokenModule(layer, norm, facts)
        super().__init__(self.module, rope, facts.hidden_size)

    def states(self, model: Any) -> list[State]:
        """As `LayerHead.states`."""
        states: list[State] = self.module.layer.self_attn.states(model)
        return states

    def table(self, model: Any) -> Any:
        """The model's embedding, scaled as there."""
        return model.embed

    def features(self, model: Any, kept: Tensor) -> Tensor:
        """The inputs of the model's logits."""
        return columns(kept, 0, self.hidden_size, model.dtype)

    def attend(self, embedded: Tensor, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """As `LayerHead.attend`."""
        of = self.module
        y = of.eh_proj(op.concat([of.enorm(embedded), of.hnorm(x)], dim=1))
        return of.layer(y, kv, cos, sin)

    def continued(self, x: Tensor) -> Tensor:
        """As `LayerHead.continued`."""
        normed: Tensor = self.module.norm(x)
        return normed

    def logits(self, model: Any, x: Tensor) -> Tensor:
        """As `LayerHead.logits`."""
        head = getattr(self.module, "head", None)
        if head is None:
            whole: Tensor = model.logits(x)
            return whole
        return op.tensor_expr_op(_of_all_tokens, "of_all_tokens", [model.finished(head(x)), model.facts.vocab_size])


def _of_all_tokens(logits: te.Tensor, vocab: int) -> te.Tensor:
    """logits f32[m, v] of the first tokens -> f32[m, vocab]."""
    count = int(logits.shape[1])

    def logit(i: tirx.Var, token: tirx.Var) -> tirx.PrimExpr:
        value = logits[i, tirx.min(token, count - 1)]
        return tirx.if_then_else(token < count, value, tirx.const(NEVER, "float32"))

    return te.compute((logits.shape[0], vocab), logit, name="of_all_tokens")
