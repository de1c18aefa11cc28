"""The serving engine of a loaded model: many requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcpipe.bundle.memory import engine_bytes, logits_bytes, running_bytes
from mlcpipe.bundle.states import slot_bytes, windows_of
from mlcpipe.bundle.tasks import check_writes
from mlcpipe.devices.base import Device
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.host.memory import FreeMemory, free_memory
from mlcpipe.runtime.device_memory import memory_of
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
    check_writes(bundle.manifest)
    bundles = [one for one in (bundle, draft_model) if one is not None]
    if draft_model is not None:
        check_draft_model(draft_model)
    context, info = bundle.context_length, bundle.manifest.model
    adapters = blocks_of(adapter_ranks) * block_bytes(info)
    memories = _memories(bundles)
    # Apart from the pages: the memory of a forward, and logits of rows of each kind and of a draft head.
    rests = [one.rest + adapters * one.holds(bundle) for one in memories]
    # All pages of a state are in one tensor.
    room_of_tensors = (
        part.device.max_tensor_bytes // state.unit_bytes * PAGE
        for each in bundles
        for part in each.parts
        for state in part.manifest.states
        if state.kind == "pages"
    )
    most = min(room_of_tensors, default=info.max_batch * context)
    if sequences is None:
        room = min(
            int((one.free.nbytes - rest) * _MEMORY_SHARE / replicas) * context // max(1, one.kv_bytes(context))
            for one, rest in zip(memories, rests)
        )
        kv_tokens = max(context, min(info.max_batch * context, room, most))
    else:
        kv_tokens = sequences * context
        if kv_tokens > most:
            raise ResourceError(
                f"{sequences} sequences of {context} tokens",
                where=bundle.place,
                expected=f"at most {most} tokens, whose keys and values of a layer fit a tensor",
                found=kv_tokens,
                next_step="serve fewer --sequences, or a shorter --context",
            )
        for one, rest in zip(memories, rests):
            if (need := one.kv_bytes(kv_tokens) + rest) > one.free.nbytes:
                raise ResourceError(
                    f"not enough memory for {sequences} sequences of {context} tokens",
                    where=one.device.description if len(memories) > 1 else None,
                    expected=f"{need >> 20:,} MiB free",
                    found=one.free,
                    next_step="serve fewer --sequences, or a shorter --context",
                )
    own_bytes = engine_bytes(bundle.manifest, context, kv_tokens)
    return Batching(
        bundle, kv_tokens=kv_tokens, max_queue=max_queue, step_s=step_s, drafts=drafts,
        adapter_blocks=blocks_of(adapter_ranks), draft_model=draft_model,
        context_shift=context_shift, swap_bytes=_swap_bytes(bundle, swap_bytes, own_bytes),
    )  # fmt: skip


def _swap_bytes(bundle: LoadedBundle, asked: int | None, kv_bytes: int) -> int:
    """Bytes of the host for pages, apart from the KV cache, which is in the same memory on many devices."""
    states = bundle.manifest.states
    if bundle.on_host or bundle.elsewhere is not None or windows_of(states) != (0,) or slot_bytes(states):
        if asked:
            found = "layers that lose tokens" if not bundle.on_host else bundle.place
            raise UsageError("--swap-bytes", expected="a model on a GPU whose layers keep all tokens", found=found)
        return 0
    free = free_memory()
    if asked is None:
        return int(max(0, free.nbytes - kv_bytes) * _SWAP_SHARE)
    if asked > free.nbytes:
        raise ResourceError("not enough memory for --swap-bytes", expected=f"{byte_size(asked)} free", found=free)
    return asked


@dataclass(frozen=True)
class _Memory:
    """A memory that loaded bundles, or stages of them, are in: each with the bundle that it is a part of."""

    device: Device
    free: FreeMemory
    parts: tuple[tuple[LoadedBundle, LoadedBundle], ...]

    def holds(self, bundle: LoadedBundle) -> bool:
        """Whether the part of a bundle that gives logits is here."""
        return any(whole is bundle and part is whole.in_order[-1] for whole, part in self.parts)

    @property
    def rest(self) -> int:
        """Bytes of everything but weights and states."""
        logits = sum(logits_bytes(whole.manifest.model) for whole, part in self.parts if part is whole.in_order[-1])
        return logits + sum(running_bytes(part.manifest) for _, part in self.parts)

    def kv_bytes(self, kv_tokens: int) -> int:
        """Bytes of the states here, and a draft head's, for so many tokens."""
        return sum(
            engine_bytes(whole.manifest, whole.context_length, kv_tokens, part.manifest.states)
            for whole, part in self.parts
        )


def _memories(bundles: Sequence[LoadedBundle]) -> list[_Memory]:
    found: dict[str, list[tuple[LoadedBundle, LoadedBundle]]] = {}
    for whole in bundles:
        for part in whole.parts:
            found.setdefault(memory_of(part.device), []).append((whole, part))
    devices = [parts[0][1].device for parts in found.values()]
    return [_Memory(one, one.free_memory(), tuple(parts)) for one, parts in zip(devices, found.values())]
