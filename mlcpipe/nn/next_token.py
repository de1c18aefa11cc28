"""The layer that checkpoints ship to draft (multi-token prediction, DeepSeek-V3, Liu et al. 2024, section 2.2).

h_p is the input of the model's logits at position p, e_p embeds the token at p + 1. The layer runs over
eh [enorm(e_p); hnorm(h_p)]; its output, normalized, is a_p, from which the model's own matrix computes the logits of
the token at p + 2. Where the model has not computed h_p, because its token is drafted, a_{p-1} replaces it. That h_p is
normalized is what vLLM's qwen3_next_mtp.py and deepseek_mtp.py do, and llama.cpp.
"""

from __future__ import annotations

from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.nn.decoder_layer import DecoderLayer
from mlcpipe.nn.layer_head import LayerHead
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import Rope
from mlcpipe.nn.rows import columns
from mlcpipe.nn.step_states import StepStates


class NextTokenModule(nn.Module):
    """Parameters; DeepSeek-V3 names the first three so."""

    def __init__(self, layer: DecoderLayer, hidden_size: int, norm: NormSpec) -> None:
        self.enorm, self.hnorm = norm(hidden_size), norm(hidden_size)
        self.eh_proj = Linear(2 * hidden_size, hidden_size)
        self.layer = layer
        self.norm = norm(hidden_size)


class NextTokenHead(LayerHead):
    """A layer as those of the model, whose embedding and logits it shares."""

    parameter = "mtp"

    def __init__(self, layer: DecoderLayer, rope: Rope, hidden_size: int, norm: NormSpec) -> None:
        self.module: NextTokenModule = NextTokenModule(layer, hidden_size, norm)
        super().__init__(self.module, rope, hidden_size)

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
        logits: Tensor = model.logits(x)
        return logits
