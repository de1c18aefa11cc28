"""Facts of an attention block, known before it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm.relax.frontend import nn

from mlcpipe.nn.norm import NormSpec

SLOPE_DIMS = 16  # kernels take heads of multiples of 16


@dataclass(frozen=True)
class AttentionSpec:
    """Static facts of an attention block. `scale` multiplies scores, None is head_dim ** -0.5; `softcap` bounds them.

    norm           of q and k: "head" is over each head's dimensions, "each" too, with weights for each head, "all" is
                   over the whole projection
    norm_of        what those norms are
    norm_after     they come after RoPE (RMS norms over heads alone)
    window         tokens that a query attends to, itself included; None is all
    input_size     width of the input of q, k and v; None is hidden_size
    sinks          each query head has a learned logit that counts in its softmax and has no value
    fused          q, k and v are one matrix: "parts" one after the other, "groups" for each KV head its queries, k, v
    interleaved    dimensions of each q and k head that the checkpoint has in pairs (2j, 2j + 1) for RoPE
    clip           q, k and v are bounded to +- this number, after a norm over all of them
    gate           the output is multiplied by sigmoid(gate(x)): "element", or one number per "head"; "query": of each
                   element, by rows of the query's matrix, where each head has its query, then its gate
    gate_act       the function of the gate, the sigmoid or another
    sub_norm       a norm before the output's matrix
    slopes         of ALiBi, one of each query head: a score gets slope * (key's position - query's). `head_dim` is then
                   that of the cache, SLOPE_DIMS more than projections make, two of which hold slopes and positions
    value_dim      dimensions of v and of outputs in a head, at most `head_dim`; 0 is `head_dim`. The others of v in the
                   cache's rows are zeros; not of `fused` projections, gates or `sub_norm`
    value_scale    multiplies v
    latent         v is the first `value_dim` dimensions of k, and stored once with it
    distances      scores get a bias of the query's head and of the key's distance, below this one; encoders on CPUs
    value_norm     v is normalized as q and k are, over each head, without weights
    keys_as_values v is k before its norm and RoPE: there is no v_proj
    reads          the layer whose keys and values are read, which has such attention: this one makes queries alone
    growth         (beta, length, first): q times 1 + beta * log(1 + floor((position + first) / length)), as Llama 4 and
                   Ministral 3 do; positions begin at 0
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    norm: Literal["", "head", "each", "all"] = ""
    norm_of: NormSpec = NormSpec()
    norm_after: bool = False
    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    sinks: bool = False
    input_size: int | None = None
    fused: Literal["", "parts", "groups"] = ""
    interleaved: int = 0
    clip: float = 0.0
    gate: Literal["", "element", "head", "query"] = ""
    gate_act: Literal["sigmoid", "softplus"] = "sigmoid"
    sub_norm: bool = False
    growth: tuple[float, int, int] | None = None
    slopes: tuple[float, ...] = ()
    value_dim: int = 0
    value_scale: float = 1.0
    latent: bool = False
    distances: int = 0
    value_norm: bool = False
    keys_as_values: bool = False
    reads: int | None = None

    @property
    def size(self) -> int:
        """Dimensions of a head that projections make."""
        return self.head_dim - SLOPE_DIMS if self.slopes else self.head_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.size

    @property
    def v_dim(self) -> int:
        """Dimensions of v and of an output in a head of the cache."""
        return self.value_dim or self.head_dim

    @property
    def value_size(self) -> int:
        """Dimensions of v and of an output in a head that projections make and read."""
        return self.value_dim or self.size

    @property
    def score_scale(self) -> float:
        return self.size**-0.5 if self.scale is None else self.scale


class AttentionBlock(nn.Module):
    """A block that attends as `spec` says."""

    spec: AttentionSpec
