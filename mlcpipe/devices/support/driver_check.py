"""Checks a driver with a few kernels against numpy before it runs a model, and refuses one that computes nonsense.

Drivers that answer gibberish without an error are real (mlc-llm issue 861). The kernels are functions of the compiled
library (`mlcpipe/compiler/driver_check.py` makes them), named as the cases here. The cache keeps which drivers and
devices passed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.devices import base
from mlcpipe.devices.support import tvm_runtime, vulkan_plugin
from mlcpipe.errors import TargetError
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.private import private_folder

Array = NDArray[Any]
PREFIX = "driver_check_"
# Part of the cache's key: a change of the cases runs them again.
VERSION = 1
COUNT, ROWS, WIDTH, GROUP = 4096, 64, 256, 32
MATRICES = (80, 160, 64)  # rows of x, rows and columns of the weight: not multiples of tiles
_SOME = ("halves", "matrices")  # not available for every target


@dataclass(frozen=True)
class Case:
    """Inputs by position, the expected output, and the tolerance as a share of its largest number."""

    name: str
    inputs: tuple[Array, ...]
    expected: Array
    tolerance: float


def cases() -> Sequence[Case]:
    """All cases. Shapes: elementwise [COUNT], rows [ROWS, WIDTH], codes uint32 [ROWS, WIDTH // 8] as in q4f32_1."""
    generator = np.random.default_rng(2026)
    a, b = (generator.standard_normal(COUNT).astype(np.float32) for _ in range(2))
    words = generator.integers(0, 1 << 32, COUNT // 8, dtype=np.uint32)
    x = generator.standard_normal((ROWS, WIDTH)).astype(np.float32)
    codes = generator.integers(0, 1 << 32, (ROWS, WIDTH // 8), dtype=np.uint32)
    scales = generator.uniform(0.5, 1.5, (ROWS, WIDTH // GROUP)).astype(np.float32)
    weights = (unpacked(codes) - 7) * np.repeat(scales, GROUP, 1)
    half, other = a.astype(np.float16), b.astype(np.float16)
    return (
        Case("arithmetic", (a, b), a * b + np.exp(-np.abs(a)) / (np.sqrt(np.abs(b)) + 1), 1e-5),
        Case("integers", (words,), unpacked(words) - 7, 0),
        Case("sums", (x,), x.sum(1, dtype=np.float64), 1e-5),
        Case("maxima", (x,), x.max(1), 0),
        Case("products", (codes, scales, x[0]), weights @ x[0].astype(np.float64), 1e-5),
        _matrices(generator),
        Case("halves", (half, other), (half.astype(np.float32) * other + half).astype(np.float16), 2e-3),
    )


def _matrices(generator: np.random.Generator) -> Case:
    """x w^T; the weight float16, in blocks of 32 rows, in words of two columns (layout `rows32_pairs`)."""
    m, n, k = MATRICES
    x, w = (generator.standard_normal((rows, k)).astype(np.float16) for rows in (m, n))
    words = np.ascontiguousarray(w.view(np.uint32).reshape(n // 32, 32, k // 2).transpose(0, 2, 1))
    return Case("matrices", (x, words), (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float16), 2e-3)


def unpacked(words: Array) -> Array:
    """Codes of four bits, the lowest first: uint32 [..., W] -> int32 [..., 8 * W]."""
    shifts = np.arange(8, dtype=np.uint32) * 4
    return ((words[..., None] >> shifts) & 15).reshape(*words.shape[:-1], -1).astype(np.int32)


def check(library: Any, device: base.Device) -> bool:
    """Run the cases for which `library` has kernels, unless this driver passed them before. True if they ran.

    Raises TargetError naming the driver if a number is wrong, or if a kernel does not run.
    """
    passed = vulkan_plugin.folder() / f"checked-{_key(device, library)}"
    if passed.exists():
        return False
    with device.errors():
        for case in cases():
            kernel = _kernel(library, case.name)
            if kernel is not None:
                _compare(case, _run(kernel, case, device), device)
    try:
        private_folder(passed.parent)
        atomic_write(passed, b"")
    except OSError:  # the next load checks again: slower, not wrong
        return True
    return True


def _key(device: base.Device, library: Any) -> str:
    some = " ".join(name for name in _SOME if _kernel(library, name) is not None)
    words = (*device.identity, str(VERSION), some)
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:24]


def _kernel(library: Any, name: str) -> Callable[..., None] | None:
    """A function of the library, None if it was compiled without (see `_SOME`)."""
    try:
        found: Callable[..., None] | None = library.get_function(PREFIX + name, query_imports=True)
    except AttributeError:  # tvm_ffi's error
        return None
    return found


def _run(kernel: Callable[..., None], case: Case, device: base.Device) -> Array:
    output = device.tensor(np.zeros(case.expected.shape, _output_type(case)))
    kernel(*map(device.tensor, case.inputs), output)
    host = device.read(output)
    tvm_runtime.wait_for(device.handle)
    return np.array(tvm_runtime.array(host))


def _output_type(case: Case) -> str:
    return "float32" if case.expected.dtype == np.float64 else case.expected.dtype.name


def _compare(case: Case, found: Array, device: base.Device) -> None:
    wide, expected = found.astype(np.float64), case.expected.astype(np.float64)
    wrong = ~(np.abs(wide - expected) <= case.tolerance * np.abs(expected).max())  # a NaN is wrong
    if not wrong.any():
        return
    first = int(np.flatnonzero(wrong)[0])
    raise TargetError(
        f"the driver of {device.title} computes wrong numbers",
        where=f"the driver check {case.name}",
        expected=f"{expected.flat[first]:g} at {first}",
        found=f"{wide.flat[first]:g}, {int(wrong.sum())} of {wrong.size} are wrong",
        next_step="update the driver or use another device",
    )
