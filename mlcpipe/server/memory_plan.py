"""The memory plan of a server with several models: what each takes, known before it is loaded.

Weights are mapped files: they need room, though the system may drop them. The KV cache is sized so that models of equal
size could stand side by side, at most `_SIDE_BY_SIDE` of them, rather than by half of what happens to be free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlcpipe.bundle import Manifest
from mlcpipe.bundle.memory import (
    MIN_CONTEXT,
    USEFUL_CONTEXT,
    context_that_fits,
    engine_bytes,
    logits_bytes,
    one_sequence,
    running_bytes,
    speech_pages,
)
from mlcpipe.devices import open_device
from mlcpipe.devices.base import Device
from mlcpipe.host.memory import free_memory
from mlcpipe.runtime.serving.adapters import block_bytes, blocks_of
from mlcpipe.runtime.variants import choose
from mlcpipe.server.pooled_model import Room
from mlcpipe.support.env import env
from tir_schedules.step_layout import PAGE

HOST = "host"
_SHARE = 0.8  # of the memory that is free at the start, for all models of a place
_SIDE_BY_SIDE = 3
_KV_SHARE = 0.5  # of what a model's weights leave of its part, for its longest conversation


@dataclass(frozen=True)
class Planned:
    """A model's room, and the context and sequences that it is loaded with."""

    room: Room
    context: int
    sequences: int


@dataclass
class MemoryPlan:
    """Bytes for the models of each place: `asked` ones, or a share of what is free when a place is first asked for."""

    models: int
    asked: int | None = None
    _free: dict[str, Callable[[], int]] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)

    def capacity(self, place: str) -> int:
        """Bytes that models may take of a place."""
        if place not in self._bytes:
            free = self._free.get(place, lambda: free_memory().nbytes)
            self._bytes[place] = self.asked if self.asked is not None else int(free() * _SHARE)
        return self._bytes[place]

    def plan(
        self,
        manifest: Manifest,
        device: str | None,
        context: int | None = None,
        sequences: int | None = None,
        adapter_ranks: int = 0,
        beside: int = 0,
    ) -> Planned:
        """What a bundle takes on a device, with `beside` bytes of models that help it.

        `context` and `sequences` are asked numbers; a model with a shorter context has its own. Raises TargetError or
        UsageError for a device that does not exist.
        """
        found = open_device(choose(manifest.target, env().cpu_variant), device)
        place = HOST if found.in_host_memory else found.spec
        self._free.setdefault(place, lambda: found.free_memory().nbytes)
        fixed = manifest.memory_plan.weights_bytes + running_bytes(manifest) + beside
        model = manifest.model
        if model.speech is not None:
            states = speech_pages(manifest)
            return Planned(Room(place, fixed + states), model.context_length, 1)
        if model.embedding is not None:
            length = min(context or model.context_length, model.context_length)
            pages = -(-model.prefill_chunk // PAGE) + 64
            states = sum(state.unit_bytes for state in manifest.states) * pages
            least = one_sequence(manifest, length).nbytes(manifest.states)
            return Planned(Room(place, fixed + max(states, least)), length, 1)
        fixed += logits_bytes(model) + blocks_of(adapter_ranks) * block_bytes(model)
        part = self.capacity(place) // max(1, min(self.models, _SIDE_BY_SIDE))
        length = self._context(manifest, context, part - fixed, self.capacity(place) - fixed)
        many = sequences or self._sequences(manifest, found, length, part - fixed)
        states = max(
            engine_bytes(manifest, length, many * length), one_sequence(manifest, length).nbytes(manifest.states)
        )
        return Planned(Room(place, fixed + states), length, many)

    @staticmethod
    def _context(manifest: Manifest, asked: int | None, room: int, most: int) -> int:
        """The asked one, or what fits the model's part; a useful one where all the memory holds it."""
        limit = manifest.model.context_length
        if asked is not None:
            return min(asked, limit)
        useful = min(USEFUL_CONTEXT, context_that_fits(manifest, max(0, most)))
        return max(min(limit, MIN_CONTEXT), min(limit, useful), context_that_fits(manifest, int(room * _KV_SHARE)))

    @staticmethod
    def _sequences(manifest: Manifest, device: Device, context: int, room: int) -> int:
        """How many of the whole context fit the model's part, at least one."""
        pages = [state for state in manifest.states if state.kind == "pages"]
        of_tensors = (device.max_tensor_bytes // state.unit_bytes * PAGE // context for state in pages)
        most = max(1, min([manifest.model.max_batch, *of_tensors]))
        many = 1
        while many < most and engine_bytes(manifest, context, (many + 1) * context) <= room:
            many += 1
        return many
