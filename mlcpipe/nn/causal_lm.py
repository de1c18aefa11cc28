"""A causal language model: the entry points of the compiled library around a stack of decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import kv_cache
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rope import Rope, cos_sin


@dataclass(frozen=True)
class ModelFacts:
    """What the compiler, the manifest and the runtime need to know of a model.

    `windows[i]` is the sliding window of layer i or None, `ropes[rope_of[i]]` its frequencies.
    `softcap` bounds attention scores, `logit_softcap` logits (0: none). `embedding_scale` multiplies embeddings.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    norm_eps: float
    norm_offset: float = 0.0
    tied: bool = False
    softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def window(self) -> int | None:
        """The one window that sliding layers share, or None. Families have at most one."""
        return next((w for w in self.windows if w is not None), None)


class Decoder(nn.Module):
    """Embedding, layers and final norm, named as Hugging Face's `model`."""

    def __init__(self, facts: ModelFacts, layers: Sequence[nn.Module]) -> None:
        self.facts = facts
        self.embed_tokens = Embedding(facts.vocab_size, facts.hidden_size)
        self.layers = nn.ModuleList(list(layers))
        self.norm = RMSNorm(facts.hidden_size, facts.norm_eps, facts.norm_offset)
        if any(rope.depends_on_length for rope in facts.ropes):
            self.rope_length = _Count((1,), "int32")
            self.rope_length.attrs["constant"] = 0

    def forward(self, x: Tensor, kv: PagedKVCache) -> Tensor:
        """x [m, hidden] -> normalized hidden states [m, hidden]."""
        positions = kv.positions(x.shape[0])
        length = getattr(self, "rope_length", None)
        tables = [cos_sin(rope, positions, length if rope.depends_on_length else None) for rope in self.facts.ropes]
        for layer, rope in zip(self.layers, self.facts.rope_of):
            x = layer(x, kv, *tables[rope])
        return self.norm(x)


class _Count(nn.Parameter):
    """An integer, whatever dtype the model computes in."""

    def to(self, dtype: str | None = None) -> None:
        """Nothing: a count is no activation."""


class CausalLM(nn.Module):
    """The compiled library's model functions (MLC's contract: DESIGN, section 3).

    Layers are called as `layer(x [m, hidden], kv, cos, sin) -> [m, hidden]`; inside, tokens of all sequences
    are the m rows of one matrix.
    """

    def __init__(self, facts: ModelFacts, layers: Sequence[nn.Module]) -> None:
        self.facts = facts
        self.model = Decoder(facts, layers)
        if not facts.tied:
            self.lm_head = Linear(facts.hidden_size, facts.vocab_size)
            self.model.embed_tokens.weight.attrs["reads"] = Fraction(1, facts.vocab_size)
        self.dtype = "float32"
        self.kv_dtype = "float32"
        self.kernels = ""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden] -> f32[m, vocab]."""
        y = self.model.embed_tokens.project(hidden) if self.facts.tied else self.lm_head(hidden)
        y = y if y.dtype == "float32" else op.astype(y, "float32")
        if self.facts.logit_softcap:
            cap = Tensor.from_scalar(self.facts.logit_softcap, "float32")
            y = op.multiply(op.tanh(op.divide(y, cap)), cap)
        return y

    def _hidden(self, embeddings: Tensor, kv: PagedKVCache) -> Tensor:
        """[b, n, hidden] -> [b * n, hidden]."""
        kv.spec = self.attention_shape()
        b, n, d = embeddings.shape
        return self.model(op.reshape(embeddings, (b * n, d)), kv)

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids i32[n] -> [n, hidden]."""
        x = self.model.embed_tokens(input_ids)
        scale = self.facts.embedding_scale
        return x if scale == 1.0 else op.multiply(x, Tensor.from_scalar(scale, x.dtype))

    def prefill(self, input_embed: Tensor, paged_kv_cache: PagedKVCache) -> tuple[Tensor, PagedKVCache]:
        """[1, n, hidden] -> logits f32[1, 1, vocab] of the last token."""
        hidden = self._hidden(input_embed, paged_kv_cache)
        last = op.tensor_expr_op(
            lambda x: te.compute((1, x.shape[1]), lambda i, j: x[x.shape[0] - 1 + i, j], name="last_row"),
            "last_row",
            [hidden],
        )
        return op.reshape(self.logits(last), (1, 1, self.facts.vocab_size)), paged_kv_cache

    def decode(self, input_embed: Tensor, paged_kv_cache: PagedKVCache) -> tuple[Tensor, PagedKVCache]:
        """[1, 1, hidden] -> logits f32[1, 1, vocab]."""
        logits = self.logits(self._hidden(input_embed, paged_kv_cache))
        return op.reshape(logits, (1, 1, self.facts.vocab_size)), paged_kv_cache

    def batch_prefill(
        self, input_embeds: Tensor, logit_positions: Tensor, paged_kv_cache: PagedKVCache
    ) -> tuple[Tensor, PagedKVCache]:
        """[1, n, hidden] of several sequences, logit_positions i32[b] -> logits f32[1, b, vocab] of those rows."""
        hidden = op.tensor_expr_op(_rows, "rows", [self._hidden(input_embeds, paged_kv_cache), logit_positions])
        b = logit_positions.shape[0]
        return op.reshape(self.logits(hidden), (1, b, self.facts.vocab_size)), paged_kv_cache

    def batch_decode(self, input_embeds: Tensor, paged_kv_cache: PagedKVCache) -> tuple[Tensor, PagedKVCache]:
        """[b, 1, hidden] -> logits f32[b, 1, vocab]."""
        logits = self.logits(self._hidden(input_embeds, paged_kv_cache))
        return op.reshape(logits, (input_embeds.shape[0], 1, self.facts.vocab_size)), paged_kv_cache

    def batch_verify(self, input_embeds: Tensor, paged_kv_cache: PagedKVCache) -> tuple[Tensor, PagedKVCache]:
        """[1, n, hidden] -> logits f32[1, n, vocab] of every token."""
        logits = self.logits(self._hidden(input_embeds, paged_kv_cache))
        return op.reshape(logits, (1, input_embeds.shape[1], self.facts.vocab_size)), paged_kv_cache

    def create_tir_paged_kv_cache(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ) -> PagedKVCache:
        """Five shapes of one number each -> the cache."""
        sizes = [max_batch_size, max_total_seq_len, prefill_chunk_size, page_size, support_sliding_window]
        shape = self.attention_shape()
        # TVM's cache allocates the arrays that split q, k and v only for a layer without a window (0.27,
        # paged_kv_cache.cc): where all layers slide it is told that none does, and the kernels know better.
        windows: list[int | None] = list(self.facts.windows)
        if shape.all_slide:
            windows = [None] * len(windows)
        return kv_cache.create(self.kernels, shape, windows, sizes)

    def attention_shape(self) -> Any:
        """The AttentionShape that the target's kernels are built for."""
        import importlib

        shape = importlib.import_module(f"tir_schedules.{self.kernels}.attention").AttentionShape
        f = self.facts
        sizes = (f.num_heads, f.num_kv_heads, f.head_dim)
        return shape(*sizes, self.kv_dtype, f.softcap, f.window or 0, all_slide=None not in f.windows)

    def spec(self) -> dict[str, Any]:
        """Argument specifications of every entry point, for `nn.Module.export_tvm`."""
        tensor, d = nn.spec.Tensor, self.facts.hidden_size
        cache = nn.spec.Object(object_type=PagedKVCache)
        plain = {"param_mode": "plain", "effect_mode": "none"}
        kv = {"paged_kv_cache": cache, "$": plain}
        return {
            "embed": {"input_ids": tensor(["n"], "int32"), "$": plain},
            "prefill": {"input_embed": tensor([1, "n", d], self.dtype), **kv},
            "decode": {"input_embed": tensor([1, 1, d], self.dtype), **kv},
            "batch_prefill": {
                "input_embeds": tensor([1, "n", d], self.dtype),
                "logit_positions": tensor(["b"], "int32"),
                **kv,
            },
            "batch_decode": {"input_embeds": tensor(["b", 1, d], self.dtype), **kv},
            "batch_verify": {"input_embeds": tensor([1, "n", d], self.dtype), **kv},
            "create_tir_paged_kv_cache": {
                "max_batch_size": int,
                "max_total_seq_len": int,
                "prefill_chunk_size": int,
                "page_size": int,
                "support_sliding_window": int,
                "$": {"param_mode": "none", "effect_mode": "none"},
            },
        }


def _rows(x: te.Tensor, indices: te.Tensor) -> te.Tensor:
    """x [m, hidden], indices i32[b] -> [b, hidden]; an index outside reads the nearest row."""

    def row(i: tirx.Var) -> tirx.PrimExpr:
        return tirx.min(tirx.max(indices[i].astype("int64"), tirx.const(0, "int64")), x.shape[0] - 1)

    return te.compute((indices.shape[0], x.shape[1]), lambda i, j: x[row(i), j], name="rows")
