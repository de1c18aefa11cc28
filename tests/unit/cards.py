"""A kind of GPU that is not there: one card, whose speed and driver a test sets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mlcpipe import devices
from mlcpipe.compiler import automatic
from mlcpipe.devices import base
from mlcpipe.devices.support import speeds
from mlcpipe.host.memory import FreeMemory

CPU_GB_S = 40.0


@dataclass(frozen=True)
class Card(base.Device):
    """A card with so many bytes free; a `software` one is computed by the CPU."""

    KIND: ClassVar[str] = "card"
    TYPE: ClassVar[int] = 99

    free: int = 8 * 10**9
    software: bool = False

    @property
    def is_hardware(self) -> bool:
        return not self.software

    def free_memory(self) -> FreeMemory:
        return FreeMemory(self.free)

    def best_target(self) -> str:
        return "vulkan"

    def errors(self) -> AbstractContextManager[None]:
        return nullcontext()


class Cards:
    """The kind's module. `shown` is what the system shows, `measured` counts measurements of `gb_s`."""

    def __init__(self) -> None:
        self.card, self.shown, self.gb_s = Card(0, "Fast card"), "card, driver 1", 4000.0
        self.asked = self.measured = 0
        self.problem: Exception | None = None
        self.lacks: Exception | None = None

    def hardware(self) -> str:
        return self.shown

    def choose(self, spec: str | None = None) -> Card:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        return self.card

    def check_tools(self, device: base.Device) -> None:
        if self.lacks is not None:
            raise self.lacks

    def measure(self, device: base.Device) -> float:
        self.measured += 1
        return self.gb_s


def install(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Cards:
    """The only kind of GPU, beside a CPU that reads `CPU_GB_S`."""
    cards, others = Cards(), devices.kind
    monkeypatch.setenv("MLCPIPE_CACHE", str(cache))

    def kind(name: str) -> Any:
        return cards if name == Card.KIND else others(name)

    monkeypatch.setattr(devices, "gpu_kinds", lambda: (Card.KIND,))
    monkeypatch.setattr(devices, "kind", kind)
    monkeypatch.setattr(automatic, "host_gb_s", lambda: CPU_GB_S)
    monkeypatch.setattr(automatic, "_check_tools", cards.check_tools)
    monkeypatch.setattr(speeds, "copied_gb_s", cards.measure)
    return cards
