"""Multi-head attention with grouped KV heads; keys and values are kept in pages."""

from __future__ import annotations

from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.nn import definitions
from mlcpipe.nn.attention_spec import AttentionBlock, AttentionSpec
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.step_states import StepStates


class Attention(AttentionBlock):
    """o(attend(rope(norm(q)), rope(norm(k)), v)): x [m, hidden] -> [m, hidden].

    `spec.norm` is "" (none), "head" (RMS norm over each head's dimensions: Qwen3, Gemma 3) or "all"
    (over the whole projection: OLMo 2).
    """

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        self.spec, self.layer = spec, layer
        self.add_projections(spec)
        *norms, output = spec.names
        setattr(self, output, Linear(spec.q_size, spec.hidden_size, spec.o_bias))
        if spec.sinks:
            self.sinks = Float32((spec.num_heads,))
        if spec.norm:
            sizes = (spec.q_size, spec.kv_size) if spec.norm == "all" else (spec.head_dim, spec.head_dim)
            for name, size in zip(norms, sizes):
                setattr(self, name, RMSNorm(size, spec.norm_eps, spec.norm_offset))

    def states(self, model: LanguageModel) -> list[State]:
        """The states of the layer."""
        return [model.attention_state(self.spec, f"layers.{self.layer}.attention", self.layer)]

    def add_projections(self, spec: AttentionSpec) -> None:
        """Declare the parameters of q, k and v, named as in the checkpoint."""
        k = spec.input_size or spec.hidden_size
        self.q_proj = Linear(k, spec.q_size, spec.qkv_bias)
        self.k_proj = Linear(k, spec.kv_size, spec.qkv_bias)
        self.v_proj = Linear(k, spec.kv_size, spec.qkv_bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [m, hidden] -> q [m, q_size], k and v [m, kv_size]."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, input], cos and sin f32[m, rotary_dim / 2] -> [m, hidden]."""
        spec, m = self.spec, x.shape[0]
        q, k, v = self.project(x)
        norms = [getattr(self, name) for name in spec.names[:2]] if spec.norm else []
        if spec.norm == "all":
            q, k = (norm(one) for norm, one in zip(norms, (q, k)))
        q = op.reshape(q, (m, spec.num_heads, spec.head_dim))
        k = op.reshape(k, (m, spec.num_kv_heads, spec.head_dim))
        v = op.reshape(v, (m, spec.num_kv_heads, spec.head_dim))
        if spec.norm == "head":
            q, k = (self._norm_heads(norm, one) for norm, one in zip(norms, (q, k)))
        func = definitions.apply_rope(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, 2 * int(cos.shape[1]), x.dtype, x.dtype
        )
        out = Tensor.placeholder((m, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim), x.dtype)
        qkv = op.tensor_ir_op(func, "rope", [q, k, v, cos, sin], out)
        output = getattr(self, spec.names[-1])
        return output(kv.attend(self.layer, spec, qkv, self.sinks if spec.sinks else None))

    def _norm_heads(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """x [m, heads, D] -> normalized over D, through the 2-D kernel."""
        m, heads, dim = x.shape
        return op.reshape(norm(op.reshape(x, (m * heads, dim))), (m, heads, dim))


class FusedAttention(Attention):
    """Attention with q, k and v in one matrix of the checkpoint, rows in that order (Phi-3)."""

    def add_projections(self, spec: AttentionSpec) -> None:
        """Declare the one parameter of q, k and v."""
        self.qkv_proj = Linear(spec.hidden_size, spec.q_size + 2 * spec.kv_size, spec.qkv_bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [m, hidden] -> q [m, q_size], k and v [m, kv_size]."""
        q, k, v = op.split(self.qkv_proj(x), [self.spec.q_size, self.spec.q_size + self.spec.kv_size], axis=1)
        return q, k, v
