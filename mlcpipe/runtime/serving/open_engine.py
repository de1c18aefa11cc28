"""The serving engine of a loaded model: many requests together."""

from __future__ import annotations

from mlcpipe.bundle.memory import engine_bytes, logits_bytes, running_bytes
from mlcpipe.bundle.states import slot_bytes, windows_of
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.host.memory import free_memory
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.adapters import block_bytes, blocks_of
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import ServingEngine
from mlcpipe.runtime.serving.open_drafts import check_draft_model
from tir_schedules.step_layout import PAGE

_SWAP_SHARE = 0.25  # of the host's free memory, for pages of preempted sequences on a GPU
_MEMORY_SHARE = 0.5  # of the free memory, for the KV cache if the number of sequences is not given


def open_engine(
    bundle: LoadedBundle,
    *,
    max_queue: int,
    sequences: int | None,
    step_s: float,
    drafts: bool,
    adapter_ranks: int = 0,
    draft_model: LoadedBundle | None = None,
    context_shift: bool = False,
    replicas: int = 1,
    swap_bytes: int | None = None,
) -> ServingEngine:
    """An engine over a bundle, and the bundle of a draft model.

    `sequences` of the whole context fit its KV cache at once; None is as many as half of the free memory holds, of
    which each of `replicas` takes its part. `adapter_ranks` of adapters may be loaded at once. `swap_bytes` of the host
    are for pages of preempted sequences; None is a share of the free memory, where pages can be copied. Raises
    ResourceError if they do not fit, and UsageError for a context that is too short for `context_shift`, or if pages
    cannot be copied.
    """
    if bundle.manifest.model.embedding is not None:
        raise UsageError("the model embeds texts and writes none", next_step="use mlcpipe embed or mlcpipe.Embedder")
    bundles = [one for one in (bundle, draft_model) if one is not None]
    if draft_model is not None:
        check_draft_model(draft_model)
    context, info, free = bundle.context_length, bundle.manifest.model, bundle.device.free_memory()
    # Apart from the pages: the memory of a forward, and logits of rows of each kind and of a draft head.
    rest = sum(running_bytes(each.manifest) + logits_bytes(each.manifest.model) for each in bundles)
    rest += blocks_of(adapter_ranks) * block_bytes(info)
    # All pages of a state are in one tensor.
    room_of_tensors = (
        each.device.max_tensor_bytes // state.unit_bytes * PAGE
        for each in bundles
        for state in each.manifest.states
        if state.kind == "pages"
    )
    most = min(room_of_tensors, default=info.max_batch * context)
    if sequences is None:
        room = int((free.nbytes - rest) * _MEMORY_SHARE / replicas) * context // max(1, _kv_bytes(bundles, context))
        kv_tokens = max(context, min(info.max_batch * context, room, most))
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
        if (need := _kv_bytes(bundles, kv_tokens) + rest) > free.nbytes:
            raise ResourceError(
                f"not enough memory for {sequences} sequences of {context} tokens",
                expected=f"{need >> 20:,} MiB free",
                found=free,
                next_step="serve fewer --sequences, or a shorter --context",
            )
    return Batching(
        bundle, kv_tokens=kv_tokens, max_queue=max_queue, step_s=step_s, drafts=drafts,
        adapter_blocks=blocks_of(adapter_ranks), draft_model=draft_model,
        context_shift=context_shift, swap_bytes=_swap_bytes(bundle, swap_bytes, _kv_bytes([bundle], kv_tokens)),
    )  # fmt: skip


def _swap_bytes(bundle: LoadedBundle, asked: int | None, kv_bytes: int) -> int:
    """Bytes of the host for pages, apart from the KV cache, which is in the same memory on many devices."""
    device = bundle.device
    states = bundle.manifest.states
    if device.on_host or windows_of(states) != (0,) or slot_bytes(states):
        if asked:
            found = "layers that lose tokens" if not device.on_host else device.description
            raise UsageError("--swap-bytes", expected="a model on a GPU whose layers keep all tokens", found=found)
        return 0
    free = free_memory()
    if asked is None:
        return int(max(0, free.nbytes - kv_bytes) * _SWAP_SHARE)
    if asked > free.nbytes:
        raise ResourceError("not enough memory for --swap-bytes", expected=f"{byte_size(asked)} free", found=free)
    return asked


def _kv_bytes(bundles: list[LoadedBundle], kv_tokens: int) -> int:
    return sum(engine_bytes(each.manifest, each.context_length, kv_tokens) for each in bundles)
