"""Facts of an attention block, known before it is built."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.relax.frontend import nn


@dataclass(frozen=True)
class AttentionSpec:
    """Static facts of an attention block. `scale` multiplies scores, None is head_dim ** -0.5; `softcap` bounds them.

    `window`: tokens that a query attends to, itself included; None is all. `input_size` is the width of the input of q,
    k and v; None is hidden_size. `sinks`: each query head has a learned logit that counts in its softmax and has no
    value. `names` are the parameter names of the norms of q and k, and of o.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    norm: str = ""
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    sinks: bool = False
    input_size: int | None = None
    names: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class AttentionBlock(nn.Module):
    """A block that attends as `spec` says."""

    spec: AttentionSpec
