"""The serving engine of a loaded model: many requests together."""

from __future__ import annotations

from mlcpipe.errors import ResourceError
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.executor import MAX_FEW_ROWS, layer_pages
from mlcpipe.runtime.serving.interface import ServingEngine

_MEMORY_SHARE = 0.5  # of the free memory that the KV cache takes where nobody says how many sequences


def open_engine(
    model: LoadedModel, *, max_queue: int, sequences: int | None, step_s: float, drafts: bool
) -> ServingEngine:
    """An engine over the model, which nobody else may use from now on.

    `sequences` of the whole context fit its KV cache at once; None is as many as half of the free memory holds.
    Raises ResourceError where they would not fit.
    """
    bundle = model.bundle
    model.release()
    context, info, free = bundle.context_length, bundle.manifest.model, bundle.device.free_memory()
    # Beside the pages: what a forward needs, and its logits, of rows of each kind.
    rest = bundle.manifest.running_bytes + 2 * MAX_FEW_ROWS * 4 * info.vocab_size
    # A tensor has the pages of a layer.
    most = bundle.device.max_tensor_bytes // bundle.manifest.page_bytes * info.page_size
    if sequences is None:
        room = int((free.nbytes - rest) * _MEMORY_SHARE) * context // max(1, _kv_bytes(bundle, context))
        kv_tokens = max(context, min(MAX_FEW_ROWS * context, room, most))
    else:
        kv_tokens = sequences * context
        if kv_tokens > most:
            raise ResourceError(
                f"{sequences} sequences of {context} tokens",
                where=bundle.device.description,
                expected=f"at most {most} tokens, whose keys and values of a layer fit a tensor",
                found=kv_tokens,
                next_step="serve fewer --sequences, or a shorter --context",
            )
        if (need := _kv_bytes(bundle, kv_tokens) + rest) > free.nbytes:
            raise ResourceError(
                f"not enough memory for {sequences} sequences of {context} tokens",
                expected=f"{need >> 20:,} MiB free",
                found=free,
                next_step="serve fewer --sequences, or a shorter --context",
            )
    return Batching(bundle, kv_tokens=kv_tokens, max_queue=max_queue, step_s=step_s, drafts=drafts)


def _kv_bytes(bundle: LoadedBundle, kv_tokens: int) -> int:
    return sum(layer_pages(bundle, kv_tokens)) * bundle.manifest.page_bytes
