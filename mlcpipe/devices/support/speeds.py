"""How fast devices read their memory: measured once for each driver, and kept in the cache."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from mlcpipe import devices
from mlcpipe.bundle.schema import Frozen
from mlcpipe.devices.base import Device, Kind, record_name
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.json_files import Items, read_json_object, validated
from mlcpipe.support.private import private_folder
from mlcpipe.version import __version__

# Of each of two buffers: together more than the last cache of any GPU, and some 0.1 ms for the fastest.
_BUFFER_BYTES, _LEAST_BYTES = 256 << 20, 16 << 20
_COPIES, _ROUNDS = 4, 4  # 8 GiB in all: less than a second from 10 GB/s on
_MAX_FILE_BYTES = 1 << 14


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("printable characters")
    return text


class Speed(Frozen):
    """The speed of a kind's first device, or no `identity` if it is no hardware; valid while `key` is the same."""

    key: str
    identity: Annotated[Items[Annotated[str, AfterValidator(_printable)]], Field(max_length=8)] = ()
    gb_s: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0


def identity_of(device: Device) -> tuple[str, ...]:
    """Words that tell a device and its driver from others, its name first."""
    return tuple(map(record_name, device.identity))


def copied_gb_s(device: Device) -> float:
    """The bytes that copies within a device's memory read and write, in GB/s (10^9 bytes): the best of four rounds.

    Raises ResourceError for a device without room for two buffers, and errors of the device.
    """
    with device.errors():
        free = device.free_memory()
        size = min(_BUFFER_BYTES, device.max_tensor_bytes, free.nbytes // 8) // 4096 * 4096
        if size < _LEAST_BYTES:
            expected = f"{byte_size(8 * _LEAST_BYTES)} free"
            raise ResourceError(f"too little memory of {device.name} to measure it", expected=expected, found=free)
        pair = [tvm_runtime.empty((size,), "uint8", device.handle) for _ in range(2)]
        seconds = []
        for _ in range(_ROUNDS + 1):  # the first one maps the memory
            tvm_runtime.wait_for(device.handle)
            began = time.perf_counter()
            for _ in range(_COPIES):
                tvm_runtime.copy(*pair)
                pair.reverse()
            tvm_runtime.wait_for(device.handle)
            seconds.append(time.perf_counter() - began)
    return 2 * size * _COPIES / min(seconds) / 1e9


@dataclass(frozen=True)
class KeptSpeed:
    """The place in the cache for the speed of a kind's devices. `key` is of the GPUs, their driver and our version."""

    kind: Kind
    path: Path
    key: str

    @classmethod
    def of(cls, name: str, cache: Path) -> KeptSpeed | None:
        """That of the kind `name`; None if the system shows no such GPU. Raises TargetError as `hardware` does."""
        kind = devices.kind(name)
        hardware = kind.hardware()
        key = hashlib.sha256(f"{__version__}\0{hardware}".encode()).hexdigest()
        return cls(kind, cache / "speeds" / f"{name}.json", key) if hardware else None

    def read(self) -> Speed | None:
        """What is kept, if it is of this driver and version."""
        try:
            values = read_json_object(self.path, limit=_MAX_FILE_BYTES, error=UsageError)
            found = validated(Speed, values, what="speed", where=self.path, error=UsageError)
        except UsageError:  # absent, or written by someone else
            return None
        return found if found.key == self.key else None

    def measure(self, usable: Callable[[Device], object]) -> Speed:
        """Measure the first device and keep the result. `usable` may refuse it by an error; then nothing is kept.

        Raises that error, and TargetError or ResourceError of the device.
        """
        found, device = Speed(key=self.key), self.kind.choose()
        if device.is_hardware:
            usable(device)
            found = Speed(key=self.key, identity=identity_of(device), gb_s=copied_gb_s(device))
        with suppress(OSError, ResourceError):  # measured again at the next start
            private_folder(self.path.parent)
            atomic_write(self.path, found.model_dump_json().encode())
        return found
