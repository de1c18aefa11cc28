"""The memories that the stages of a bundle are in: what each has free, and what it must hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlcpipe.bundle.manifest import Manifest
from mlcpipe.bundle.memory import running_bytes
from mlcpipe.bundle.states import State
from mlcpipe.devices.base import Device
from mlcpipe.host.memory import FreeMemory


@dataclass(frozen=True)
class Memory:
    """One memory, with the stages whose devices are in it: bytes of weights and of everything but states, and states.

    `device` is the first of them.
    """

    device: Device
    free: FreeMemory
    weights: int
    workspace: int
    states: tuple[State, ...]

    @classmethod
    def of(cls, places: Sequence[tuple[Manifest, Device]]) -> Memory:
        """The memory of some stages, or of a bundle without any."""
        stages, devices = zip(*places)
        return cls(
            devices[0],
            devices[0].free_memory(),
            sum(stage.memory_plan.weights_bytes for stage in stages),
            sum(running_bytes(stage) for stage in stages),
            tuple(state for stage in stages for state in stage.states),
        )

    @property
    def room(self) -> int:
        """Bytes for states, before the weights are loaded."""
        return self.free.nbytes - self.weights - self.workspace


def memory_of(device: Device) -> str:
    """A name of the memory that a device uses: "" for the host's, or a device's own."""
    return "" if device.in_host_memory else device.spec


def by_memory(places: Iterable[tuple[Manifest, Device]]) -> dict[str, list[tuple[Manifest, Device]]]:
    """Stages by the memory that their devices use."""
    found: dict[str, list[tuple[Manifest, Device]]] = {}
    for stage, device in places:
        found.setdefault(memory_of(device), []).append((stage, device))
    return found
