"""A causal language model: the entry points of the compiled library around a stack of decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import kv_cache, paged_attention
from mlcpipe.nn.draft_head import DraftHead
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.paged_attention import PagedAttention
from mlcpipe.nn.rope import Rope, cos_sin
from mlcpipe.nn.rows import columns, rows_of, scaled, write_rows
from tir_schedules.paged import QUANTIZED


@dataclass(frozen=True)
class ModelFacts:
    """Model properties that the compiler, the manifest and the runtime need.

    `windows[i]` is the sliding window of layer i or None, `ropes[rope_of[i]]` its frequencies.
    `softcap` bounds attention scores, `logit_softcap` logits (0: none). `embedding_scale` multiplies embeddings,
    `logit_scale` logits.
    `sinks`: attention has them, see `AttentionSpec`.
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
    logit_scale: float = 1.0
    sinks: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def window(self) -> int | None:
        """The window that all sliding layers share, or None."""
        return next((w for w in self.windows if w is not None), None)


class Decoder(nn.Module):
    """Embedding, layers and final norm, named as in Hugging Face's `model`."""

    def __init__(self, facts: ModelFacts, layers: Sequence[nn.Module]) -> None:
        self.facts = facts
        self.embed_tokens = Embedding(facts.vocab_size, facts.hidden_size)
        self.layers = nn.ModuleList(list(layers))
        self.norm = RMSNorm(facts.hidden_size, facts.norm_eps, facts.norm_offset)

    def forward(self, x: Tensor, kv: PagedKVCache | PagedAttention, kept: Sequence[int] = ()) -> list[Tensor]:
        """x [m, hidden] -> the inputs [m, hidden] of the layers `kept`, and the normalized hidden states."""
        rows = x.shape[0]
        positions = kv.positions(rows)
        lengths = kv.rope_lengths(rows) if any(rope.depends_on_length for rope in self.facts.ropes) else None
        tables = [cos_sin(rope, positions, lengths) for rope in self.facts.ropes]
        inputs = []
        for index, (layer, rope) in enumerate(zip(self.layers, self.facts.rope_of)):
            inputs += [x] if index in kept else []
            x = layer(x, kv, *tables[rope])
        return [*inputs, self.norm(x)]


class LanguageModel(nn.Module):
    """What the compiler sets and asks of any model: dtypes, the folder of kernels, who owns the KV cache."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.dtype = "float32"
        self.kv_dtype = "float32"
        self.kernels = ""
        self.own_pages = False

    def attention_shape(self, heads: tuple[int, int, int] | None = None) -> Any:
        """The AttentionShape that the target's kernels are built for.

        `heads` are the query heads, KV heads and head dimension of a layer beside the model's, which sees all tokens.
        """
        import importlib

        shape = importlib.import_module(f"tir_schedules.{self.kernels}.attention").AttentionShape
        more = {"activation_dtype": self.dtype} if self.kv_dtype in QUANTIZED else {}
        if heads is not None:
            return shape(*heads, self.kv_dtype, 0.0, 0, all_slide=False, **more)
        f = self.facts
        sizes = (f.num_heads, f.num_kv_heads, f.head_dim)
        window = f.window or 0
        return shape(*sizes, self.kv_dtype, f.softcap, window, all_slide=None not in f.windows, sinks=f.sinks, **more)

    def spec(self) -> dict[str, Any]:
        """Argument specifications of every entry point, for `nn.Module.export_tvm`."""
        raise NotImplementedError


class CausalLM(LanguageModel):
    """The compiled library's model functions: over pages of the runtime, or what MLC's hosts expect, over TVM's cache.

    Layers are called as `layer(x [m, hidden], kv, cos, sin) -> [m, hidden]`; the m rows are the
    tokens of all sequences.
    """

    def __init__(self, facts: ModelFacts, layers: Sequence[nn.Module]) -> None:
        super().__init__(facts)
        self.draft_head: DraftHead | None = None
        self.model = Decoder(facts, layers)
        if not facts.tied:
            self.lm_head = Linear(facts.hidden_size, facts.vocab_size)
            self.model.embed_tokens.weight.attrs["reads"] = Fraction(1, facts.vocab_size)

    def add_draft_head(self, head: DraftHead) -> None:
        """Add the parameters and functions of a head, and forwards that keep rows for it."""
        self.draft_head = head
        setattr(self, head.parameter, head.module)
        for name, function in head.functions(self).items():
            setattr(self, name, function)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden] -> f32[m, vocab]."""
        y = self.model.embed_tokens.project(hidden) if self.facts.tied else self.lm_head(hidden)
        y = y if y.dtype == "float32" else op.astype(y, "float32")
        y = scaled(y, self.facts.logit_scale)
        if self.facts.logit_softcap:
            cap = Tensor.from_scalar(self.facts.logit_softcap, "float32")
            y = op.multiply(op.tanh(op.divide(y, cap)), cap)
        return y

    def forward_few(self, tokens: Tensor, step: Tensor, logits: Tensor, pages: list[Tensor]) -> Tensor:
        """tokens i32[b], with the numerics of decode -> logits f32[b, vocab], which are written to `logits`.

        `step` and `pages` are those of `PagedAttention`; keys and values of the tokens are added to the pages.
        """
        return self.logits(self._over_pages(tokens, step, pages, many=False))

    def forward_few_hidden(
        self, tokens: Tensor, hidden: Tensor, step: Tensor, logits: Tensor, pages: list[Tensor]
    ) -> Tensor:
        """As `forward_few`; what the draft head reads of each row is written to `hidden` f32[b, kept * hidden]."""
        return self.logits(self._kept(tokens, hidden, step, pages, many=False))

    def forward_many_hidden(
        self, tokens: Tensor, rows: Tensor, hidden: Tensor, step: Tensor, logits: Tensor, pages: list[Tensor]
    ) -> Tensor:
        """As `forward_many`; what the draft head reads of each row is written to `hidden` f32[n, kept * hidden]."""
        x = self._kept(tokens, hidden, step, pages, many=True)
        return self.logits(op.tensor_expr_op(rows_of, "rows", [x, rows]))

    def _kept(self, tokens: Tensor, hidden: Tensor, step: Tensor, pages: list[Tensor], many: bool) -> Tensor:
        """The rows [m, hidden] that logits are computed from, once they are in `hidden` with the others."""
        assert self.draft_head is not None
        rows = self._all_over_pages(tokens, step, pages, many, self.draft_head.layers)
        written, d = write_rows(rows, hidden), self.facts.hidden_size
        return columns(written, (len(rows) - 1) * d, d, rows[-1].dtype)

    def forward_many(self, tokens: Tensor, rows: Tensor, step: Tensor, logits: Tensor, pages: list[Tensor]) -> Tensor:
        """tokens i32[n] of prompts -> logits f32[r, vocab] of the rows i32[r], which are written to `logits`."""
        hidden = self._over_pages(tokens, step, pages, many=True)
        return self.logits(op.tensor_expr_op(rows_of, "rows", [hidden, rows]))

    def copy_pages(self, pairs: Tensor, window_pairs: Tensor, pages: list[Tensor]) -> list[Tensor]:
        """In each layer's pages, page pairs[i, 1] = page pairs[i, 0]; `window_pairs` are for `_own_windows`."""
        several = [window_pairs if own else pairs for own in self._own_windows]
        return paged_attention.copy_pages(self.kernels, self.attention_shape(), several, pages)

    @property
    def _own_windows(self) -> list[bool]:
        """By layer, whether its pages are those of sliding layers beside others, which free what no query sees."""
        return [window is not None and None in self.facts.windows for window in self.facts.windows]

    def _over_pages(self, tokens: Tensor, step: Tensor, pages: list[Tensor], many: bool) -> Tensor:
        return self._all_over_pages(tokens, step, pages, many)[-1]

    def _all_over_pages(
        self, tokens: Tensor, step: Tensor, pages: list[Tensor], many: bool, kept: Sequence[int] = ()
    ) -> list[Tensor]:
        kv = PagedAttention(self.kernels, self.attention_shape(), self.facts.windows, step, pages, many)
        rows: list[Tensor] = self.model(self.embed(tokens), kv, kept)
        return rows

    def _hidden(self, embeddings: Tensor, kv: PagedKVCache) -> Tensor:
        """[b, n, hidden] -> [b * n, hidden]."""
        kv.spec = self.attention_shape()
        b, n, d = embeddings.shape
        return self.model(op.reshape(embeddings, (b * n, d)), kv)[-1]

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids i32[n] -> [n, hidden]."""
        return scaled(self.model.embed_tokens(input_ids), self.facts.embedding_scale)

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
        hidden = op.tensor_expr_op(rows_of, "rows", [self._hidden(input_embeds, paged_kv_cache), logit_positions])
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
        """Five one-element shapes -> the cache."""
        sizes = [max_batch_size, max_total_seq_len, prefill_chunk_size, page_size, support_sliding_window]
        shape = self.attention_shape()
        # TVM's cache allocates the q, k and v split buffers only if some layer has no window (0.27,
        # paged_kv_cache.cc). If all layers slide, declare none sliding; the kernels still mask by window.
        windows: list[int | None] = list(self.facts.windows)
        if shape.all_slide:
            windows = [None] * len(windows)
        return kv_cache.create(self.kernels, shape, windows, sizes)

    def spec(self) -> dict[str, Any]:
        """Argument specifications of every entry point, for `nn.Module.export_tvm`.

        Tokens of a prompt are "n", others "b" (one or more of each sequence) and "v" (verified ones): their arithmetic
        may differ, see `passes/mark_prompt_rows.py`.
        """
        return self._spec_over_pages() if self.own_pages else self._spec_over_tvm_cache()

    def _spec_over_pages(self) -> dict[str, Any]:
        tensor, vocab = nn.spec.Tensor, self.facts.vocab_size
        page_bytes = self.attention_shape().page_bytes
        pages = [tensor(["W" if own else "P", page_bytes], "int8") for own in self._own_windows]
        plain = {"param_mode": "plain", "effect_mode": "none"}
        cache = {"pages": pages, "$": plain}
        step = tensor(["k"], "int32")
        forwards = {
            "forward_few": {
                "tokens": tensor(["b"], "int32"),
                "step": step,
                "logits": tensor(["b", vocab], "float32"),
                **cache,
            },
            "forward_many": {
                "tokens": tensor(["n"], "int32"),
                "rows": tensor(["r"], "int32"),
                "step": step,
                "logits": tensor(["r", vocab], "float32"),
                **cache,
            },
            "copy_pages": {
                "pairs": tensor(["c", 2], "int32"),
                "window_pairs": tensor(["w", 2], "int32"),
                **cache,
                "$": {"param_mode": "none", "effect_mode": "none"},
            },
        }
        return self._draft_spec(forwards) | forwards

    def _draft_spec(self, forwards: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Of the functions that drafts need, none without a draft head."""
        head = self.draft_head
        if head is None:
            return {}
        width = head.kept_size(self)
        kinds = {"few": "b", "many": "n"} if head.prompts else {"few": "b"}
        kept = {
            f"forward_{kind}_hidden": {
                **forwards[f"forward_{kind}"],
                "hidden": nn.spec.Tensor([rows, width], "float32"),
            }
            for kind, rows in kinds.items()
        }
        return kept | head.spec(self)

    def _spec_over_tvm_cache(self) -> dict[str, Any]:
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
            "batch_verify": {"input_embeds": tensor([1, "v", d], self.dtype), **kv},
            "create_tir_paged_kv_cache": {
                "max_batch_size": int,
                "max_total_seq_len": int,
                "prefill_chunk_size": int,
                "page_size": int,
                "support_sliding_window": int,
                "$": {"param_mode": "none", "effect_mode": "none"},
            },
        }
