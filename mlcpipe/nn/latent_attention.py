"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): tokens keep one low-rank vector for all heads.

It is computed in the absorbed form: with c [r] the normalized latent vector of a token, W_uk[h] [nope, r] and W_uv[h]
[value, r] the rows of kv_b_proj for a head, and the rope parts q_r and k_r,

    score = (q[h] W_uk[h]) c + q_r[h] k_r,    out[h] = W_uv[h] sum_t p_t c_t.

So attention has one KV head with keys [c; k_r], whose first r numbers are the values, too.

Prompts have the same form. With keys and values of all heads a row needs 320 products for a key and head of DeepSeek
V3, not 1088, but a chunk would make them of all earlier vectors: 131,072 products for each key and head. That is 1.9
times fewer in chunks of 512 rows (GLM-4.7-Flash: 1.1), as many with 171 rows (398), and 7.8 times (14) more with 16.
Chunks may be of any size, and a row has the same bits in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.nn.attention import gated_heads, grown
from mlcpipe.nn.attention_spec import AttentionBlock, AttentionSpec
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import HeadLinear, Linear
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates

NORM = NormSpec(eps=1e-6)  # of the low-rank vectors, whatever the epsilon of a model's layers


@dataclass(frozen=True)
class LatentSpec:
    """Sizes of a block: of a head's `nope` and `rope` dimensions of q and k and its `value` ones, and of the ranks.

    q_rank       of q; None: q is projected at once
    kv_rank      of the latent vector
    bias         of the projections from and to hidden_size, but not of q_proj
    interleaved  the checkpoint has rope dimensions in pairs (2j, 2j + 1)
    scale        of scores
    growth       as in AttentionSpec
    vector_scale multiplies the normalized latent vector
    gated        each head's output is multiplied by a sigmoid of its row of gate_proj
    query_gate   outputs are multiplied by sigmoids, whose rows follow each head's queries in q_gate_proj, which is in
                 place of q_b_proj and reads the low-rank vector of q with its norm, then without
    """

    hidden_size: int
    num_heads: int
    nope: int
    rope: int
    value: int
    kv_rank: int
    q_rank: int | None
    scale: float
    bias: bool = False
    interleaved: bool = True
    growth: tuple[float, int, int] | None = None
    gated: bool = False
    vector_scale: float = 1.0
    query_gate: bool = False

    @property
    def cached(self) -> AttentionSpec:
        """The attention over cached vectors."""
        return AttentionSpec(
            self.hidden_size, self.num_heads, 1, self.kv_rank + self.rope, scale=self.scale, value_dim=self.kv_rank,
            latent=True,
        )  # fmt: skip


class LatentAttention(AttentionBlock):
    """Attention by latent vectors: x [m, hidden] -> [m, hidden]."""

    def __init__(self, latent: LatentSpec, layer: int) -> None:
        self.latent, self.spec, self.layer = latent, latent.cached, layer
        hidden, heads, size = latent.hidden_size, latent.num_heads, latent.nope + latent.rope
        order = _halves(heads, latent.nope, latent.rope) if latent.interleaved else None
        if latent.q_rank is None:
            self.q_proj = Linear(hidden, heads * size, order=order)
        else:
            self.q_a_proj = Linear(hidden, latent.q_rank, latent.bias)
            self.q_a_layernorm = NORM(latent.q_rank)
            if latent.query_gate:
                order = _halves(heads, latent.nope, latent.rope, latent.value) if latent.interleaved else None
                self.q_gate_proj = Linear(2 * latent.q_rank, heads * (size + latent.value), order=order)
            else:
                self.q_b_proj = Linear(latent.q_rank, heads * size, order=order)
        order = _halves(1, latent.kv_rank, latent.rope) if latent.interleaved else None
        self.kv_a_proj_with_mqa = Linear(hidden, latent.kv_rank + latent.rope, latent.bias, order=order)
        self.kv_a_layernorm = NORM(latent.kv_rank)
        self.k_b_proj = HeadLinear(heads, latent.nope, latent.kv_rank)
        self.v_b_proj = HeadLinear(heads, latent.kv_rank, latent.value)
        self.gate_proj = Linear(hidden, heads) if latent.gated else None
        self.o_proj = Linear(heads * latent.value, hidden, latent.bias)

    def states(self, model: LanguageModel) -> list[State]:
        """The latent vectors and rope parts of tokens."""
        return [model.attention_state(self.spec, f"layers.{self.layer}.attention", self.layer)]

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden], cos and sin f32[m, rope / 2] -> [m, hidden]."""
        of, m = self.latent, x.shape[0]
        q, gate = self._queries(x)
        if of.growth:
            q = grown(q, kv.positions(m), *of.growth)
        vector, rope = op.split(self.kv_a_proj_with_mqa(x), [of.kv_rank], axis=1)
        vector = scaled(self.kv_a_layernorm(vector), of.vector_scale)
        parts = [self.k_b_proj(q), q, vector, rope, cos, sin]
        qkv = op.tensor_expr_op(_joined, "latent_qkv", parts)
        y = kv.attend(self.layer, self.spec, qkv)
        y = self.v_b_proj(op.reshape(y, (m, of.num_heads, of.kv_rank)))
        y = op.reshape(y, (m, of.num_heads * of.value))
        if gate is not None:
            y = op.multiply(y, op.sigmoid(gate))
        return self.o_proj(y if self.gate_proj is None else gated_heads(y, self.gate_proj(x), of.value))

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [m, hidden] -> q [m, heads, nope + rope], and with `query_gate` logits of gates [m, heads * value]."""
        of, m, size = self.latent, x.shape[0], self.latent.nope + self.latent.rope
        if of.q_rank is None:
            return op.reshape(self.q_proj(x), (m, of.num_heads, size)), None
        low = self.q_a_proj(x)
        if not of.query_gate:
            return op.reshape(self.q_b_proj(self.q_a_layernorm(low)), (m, of.num_heads, size)), None
        both = self.q_gate_proj(op.concat([self.q_a_layernorm(low), low], dim=1))
        q, gate = op.split(op.reshape(both, (m, of.num_heads, size + of.value)), [size], axis=2)
        return q, op.reshape(gate, (m, of.num_heads * of.value))


def _joined(
    absorbed: te.Tensor, q: te.Tensor, vector: te.Tensor, rope: te.Tensor, cos: te.Tensor, sin: te.Tensor
) -> te.Tensor:
    """absorbed [m, heads, r], q [m, heads, nope + rope], vector [m, r], rope [m, rope] -> [m, heads + 1, r + rope].

    The last parts of q and `rope` are rotated.
    """
    (m, heads, r), half = absorbed.shape, int(cos.shape[1])
    nope = int(q.shape[2]) - 2 * half

    def element(i: tirx.Var, h: tirx.Var, d: tirx.Var) -> tirx.PrimExpr:
        def part(j: tirx.PrimExpr) -> tirx.PrimExpr:
            return tirx.if_then_else(h < heads, q[i, h, nope + j], rope[i, j]).astype("float32")

        j = d - r
        low = part(j) * cos[i, j] - part(j + half) * sin[i, j]
        high = part(j) * cos[i, j - half] + part(j - half) * sin[i, j - half]
        rotated = tirx.if_then_else(j < half, low, high).astype(absorbed.dtype)
        kept = tirx.if_then_else(h < heads, absorbed[i, h, d], vector[i, d])
        return tirx.if_then_else(d < r, kept, rotated)

    return te.compute((m, int(heads) + 1, int(r) + 2 * half), element, name="latent_qkv")


def _halves(heads: int, kept: int, rope: int, after: int = 0) -> NDArray[np.int32]:
    """The rows of `heads` heads of `kept`, `rope` and `after` rows, those of rope in pairs, in the order of halves."""
    size, end = kept + rope + after, kept + rope
    rows = np.arange(heads * size, dtype=np.int32).reshape(heads, size)
    rows[:, kept:end] = rows[:, kept:end].reshape(heads, rope // 2, 2).swapaxes(1, 2).reshape(heads, rope)
    return rows.reshape(-1)
