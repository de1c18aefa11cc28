"""The functions of a language model over TVM's cache object, by MLC's published contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import kv_cache
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.rows import rows_of

Result = tuple[Tensor, PagedKVCache]


def functions(model: CausalLM) -> dict[str, Callable[..., Any]]:
    """The functions by name; `embed` is the model's own."""
    return {function.__name__: partial(function, model) for function in _FUNCTIONS}


def prefill(model: CausalLM, input_embed: Tensor, paged_kv_cache: PagedKVCache) -> Result:
    """[1, n, hidden] -> logits f32[1, 1, vocab] of the last token."""
    hidden = _hidden(model, input_embed, paged_kv_cache)
    last = op.tensor_expr_op(
        lambda x: te.compute((1, x.shape[1]), lambda i, j: x[x.shape[0] - 1 + i, j], name="last_row"),
        "last_row",
        [hidden],
    )
    return op.reshape(model.logits(last), (1, 1, model.facts.vocab_size)), paged_kv_cache


def decode(model: CausalLM, input_embed: Tensor, paged_kv_cache: PagedKVCache) -> Result:
    """[1, 1, hidden] -> logits f32[1, 1, vocab]."""
    logits = model.logits(_hidden(model, input_embed, paged_kv_cache))
    return op.reshape(logits, (1, 1, model.facts.vocab_size)), paged_kv_cache


def batch_prefill(
    model: CausalLM, input_embeds: Tensor, logit_positions: Tensor, paged_kv_cache: PagedKVCache
) -> Result:
    """[1, n, hidden] of several sequences, logit_positions i32[b] -> logits f32[1, b, vocab] of those rows."""
    hidden = op.tensor_expr_op(rows_of, "rows", [_hidden(model, input_embeds, paged_kv_cache), logit_positions])
    b = logit_positions.shape[0]
    return op.reshape(model.logits(hidden), (1, b, model.facts.vocab_size)), paged_kv_cache


def batch_decode(model: CausalLM, input_embeds: Tensor, paged_kv_cache: PagedKVCache) -> Result:
    """[b, 1, hidden] -> logits f32[b, 1, vocab]."""
    logits = model.logits(_hidden(model, input_embeds, paged_kv_cache))
    return op.reshape(logits, (input_embeds.shape[0], 1, model.facts.vocab_size)), paged_kv_cache


def batch_verify(model: CausalLM, input_embeds: Tensor, paged_kv_cache: PagedKVCache) -> Result:
    """[1, n, hidden] -> logits f32[1, n, vocab] of every token."""
    logits = model.logits(_hidden(model, input_embeds, paged_kv_cache))
    return op.reshape(logits, (1, input_embeds.shape[1], model.facts.vocab_size)), paged_kv_cache


def create_tir_paged_kv_cache(
    model: CausalLM,
    max_batch_size: tirx.Var,
    max_total_seq_len: tirx.Var,
    prefill_chunk_size: tirx.Var,
    page_size: tirx.Var,
    support_sliding_window: tirx.Var,
) -> PagedKVCache:
    """Five one-element shapes -> the cache."""
    sizes = [max_batch_size, max_total_seq_len, prefill_chunk_size, page_size, support_sliding_window]
    shape = _shape(model)
    # TVM's cache allocates the q, k and v split buffers only if some layer has no window (0.27,
    # paged_kv_cache.cc). If all layers slide, declare none sliding; the kernels still mask by window.
    windows = [None if shape.all_slide else of.window for of in model.attentions()]
    return kv_cache.create(model.kernels, shape, windows, sizes)


_FUNCTIONS = (prefill, decode, batch_prefill, batch_decode, batch_verify, create_tir_paged_kv_cache)


def _shape(model: CausalLM) -> Any:
    """The AttentionShape of all layers."""
    windows = [of.window for of in model.attentions()]
    window = next((one for one in windows if one is not None), 0)
    return model.attention_shape(model.attentions()[0], sliding_window=window, all_slide=None not in windows)


def _hidden(model: CausalLM, embeddings: Tensor, kv: PagedKVCache) -> Tensor:
    """[b, n, hidden] -> [b * n, hidden]."""
    kv.spec = _shape(model)
    b, n, d = embeddings.shape
    return model.model(op.reshape(embeddings, (b * n, d)), kv)[-1]


def specs(model: CausalLM) -> dict[str, Any]:
    """Argument specifications of the functions, for `nn.Module.export_tvm`."""
    tensor, d = nn.spec.Tensor, model.facts.hidden_size
    cache = nn.spec.Object(object_type=PagedKVCache)
    plain = {"param_mode": "plain", "effect_mode": "none"}
    kv = {"paged_kv_cache": cache, "$": plain}
    return {
        "embed": {"input_ids": tensor(["n"], "int32"), "$": plain},
        "prefill": {"input_embed": tensor([1, "n", d], model.dtype), **kv},
        "decode": {"input_embed": tensor([1, 1, d], model.dtype), **kv},
        "batch_prefill": {
            "input_embeds": tensor([1, "n", d], model.dtype),
            "logit_positions": tensor(["b"], "int32"),
            **kv,
        },
        "batch_decode": {"input_embeds": tensor(["b", 1, d], model.dtype), **kv},
        "batch_verify": {"input_embeds": tensor([1, "v", d], model.dtype), **kv},
        "create_tir_paged_kv_cache": {
            "max_batch_size": int,
            "max_total_seq_len": int,
            "prefill_chunk_size": int,
            "page_size": int,
            "support_sliding_window": int,
            "$": {"param_mode": "none", "effect_mode": "none"},
        },
    }
