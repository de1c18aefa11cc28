"""What tests run in a process of its own, with the loader of fake_loader.c under the plugin: `python -m tests.vulkan.scenario`.

    NAME MODULE     a function below and a file with the module ADD, INCREMENT, NUMBER

Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would load it, a second for each of these processes

from mlcpipe.devices import vulkan
from mlcpipe.devices.support import vulkan_plugin
from tests.vulkan import gpu

OUT_OF_MEMORY, LOST = -2, -4
COUNT = 10_000


class Fake:
    """The loader that fails calls."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libvulkan.so.1")
        self.library.fake_fired_name.restype = self.library.fake_name.restype = ctypes.c_char_p

    def names(self) -> list[str]:
        """The calls that can fail."""
        return [name.decode() for name in itertools.takewhile(bool, map(self.library.fake_name, itertools.count()))]

    def arm(self, at: int, result: int, only: str = "") -> None:
        """The call `at` from now fails; counts calls of the name `only`, as how many others come between may vary."""
        self.library.fake_only(only.encode())
        self.library.fake_arm(ctypes.c_long(at), ctypes.c_int(result))

    def limit(self, size: int) -> None:
        self.library.fake_limit(ctypes.c_ulonglong(size))

    @property
    def fired(self) -> str | None:
        return self.library.fake_fired_name().decode() if self.library.fake_fired() else None


def work(data: bytes, index: int = 0) -> None:
    """A module's life: load, allocate, upload, launch, measure, download. Wrong numbers are an AssertionError."""
    gpu.set_device(index)
    module = vulkan.function("create_module")(data)
    values = np.arange(COUNT, dtype=np.float32)
    a, b, out = gpu.upload(values, index), gpu.upload(values, index), gpu.empty((COUNT,), "float32", index)
    groups = -(-COUNT // 64)
    for _ in range(20):
        module["add"](a, b, out, COUNT, 2.0, groups, 64)
        module["add"](out, b, a, COUNT, -2.0, groups, 64)
    copy = gpu.copied(out, index)
    assert (gpu.download(a) == values).all()
    assert (gpu.download(copy) == 3 * values).all()
    gpu.times(module, "add", a, b, out, COUNT, 2.0, groups, 64, index=index)
    numbers = gpu.empty((70_000,), "uint32", index)
    module["number"](numbers, 70_000, 1)
    assert (gpu.download(numbers) == np.arange(70_000)).all()


def failing(data: bytes, result: int) -> dict[str, Any]:
    """`work` with each call of the driver failing once: an error in words or none, then `work` again, as if new."""
    fake, messages, calls = Fake(), {}, 0
    work(data)
    waiting = [(name, 0) for name in fake.names()]
    while waiting:
        name, at = waiting.pop()
        fake.arm(at, result, only=name)
        try:
            work(data)
        except (RuntimeError, MemoryError) as error:
            messages[f"{fake.fired}: {type(error).__name__}"] = str(error)
            error.__traceback__ = None  # it holds the tensors
        fired = fake.fired
        fake.arm(-1, 0)
        gc.collect()
        if fired is None:
            continue
        waiting.append((name, at + 1))
        if calls % 7 == 0:
            work(data)
        calls += 1
    work(data)
    gc.collect()
    gpu.sync()
    return {"calls": calls, "messages": messages, "counts": vulkan.counts(vulkan.choose())}


def out_of_memory(data: bytes) -> dict[str, Any]:
    return failing(data, OUT_OF_MEMORY)


def lost(data: bytes) -> dict[str, Any]:
    return failing(data, LOST)


def no_threads(data: bytes) -> dict[str, Any]:
    """Preparation on four threads that cannot be made: their stacks would not fit the address space."""
    work(data)  # the driver's own threads
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # sizeof(pthread_attr_t) is 56
    assert libc.pthread_attr_init(attributes) == 0
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 47)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0
    with suppress(RuntimeError):
        threading.Thread(target=print).start()
        raise AssertionError("the system gives threads")
    module = vulkan.function("create_module")(data)
    vulkan.function("prepare")(module, 0, 4)
    work(data)
    return {"same": True}


def opening(data: bytes) -> dict[str, Any]:
    """Each call that opens a device failing once."""
    fake, messages, at = Fake(), {}, 0
    while True:
        work(data)
        fake.arm(0, LOST)
        try:
            work(data)
        except (RuntimeError, MemoryError) as error:
            error.__traceback__ = None
        gc.collect()
        fake.arm(at, OUT_OF_MEMORY)
        try:
            tensor = gpu.empty((10,), "float32")
            del tensor
        except (RuntimeError, MemoryError) as error:
            messages[f"{fake.fired}: {type(error).__name__}"] = str(error)
            error.__traceback__ = None
        fired = fake.fired
        fake.arm(-1, 0)
        if fired is None:
            break
        at += 1
    work(data)
    return {"calls": at, "messages": messages}


def tensors_of_a_lost_device(data: bytes) -> dict[str, Any]:
    """What was on the device stays an error; what is made after it works, beside it."""
    fake = Fake()
    module = vulkan.function("create_module")(data)
    old = gpu.upload(np.zeros(64, np.int32))
    module["increment"](old, 64, 1, 64)
    fake.arm(0, LOST)
    errors = []
    calls = (
        lambda: gpu.sync(),
        lambda: gpu.download(old),
        lambda: gpu.assign(old, np.zeros(64, np.int32)),
        lambda: module["increment"](old, 64, 1, 64),
    )
    for call in calls:
        try:
            call()
            errors.append("no error")
        except RuntimeError as error:
            errors.append(str(error))
    fake.arm(-1, 0)
    new = gpu.upload(np.zeros(64, np.int32))
    module["increment"](new, 64, 1, 64)
    return {"errors": errors, "new": int(gpu.download(new).sum())}


def full(data: bytes) -> dict[str, Any]:
    """Memory that ends: tensors until there is no room, then room again; freed ones are used again while kernels run."""
    Fake().limit(150 << 20)
    module, held, error_words = vulkan.function("create_module")(data), [], ""
    try:
        for _ in range(1000):
            held.append(gpu.empty((500_000,), "float32"))
    except MemoryError as error:
        error_words = str(error)
        error.__traceback__ = None
    most = len(held)
    held.clear()
    for _ in range(3 * most):  # each is freed while the launch that uses it may still run
        tensor = gpu.empty((500_000,), "float32")
        module["add"](tensor, tensor, tensor, 1000, 1.0, 16, 64)
    work(data)
    return {"error": error_words, "tensors": most}


def cycles(data: bytes) -> dict[str, Any]:
    """1000 times a module and tensors of odd sizes: what the plugin counts and what the process holds after, less before."""
    create, generator = vulkan.function("create_module"), np.random.default_rng(5)

    def cycle() -> None:
        module = create(data)
        sizes = [int(size) for size in generator.integers(1, 200_000, 3)]
        tensors = [gpu.upload(np.ones(size, np.float32)) for size in sizes]
        module["add"](*tensors, min(sizes), 1.0, -(-min(sizes) // 64), 64)

    def state() -> dict[str, int]:
        gc.collect()
        gpu.sync()
        return {**vulkan.counts(vulkan.choose()), "resident": psutil.Process().memory_info().rss}

    for _ in range(100):
        cycle()
    before = state()
    for _ in range(1000):
        cycle()
    return {name: count - before[name] for name, count in state().items()}


def threads(data: bytes) -> dict[str, Any]:
    """Four threads at work on one device, one of them with a device of its own where there are two."""
    indices = [0, 0, 0, len(vulkan.devices()) - 1]
    failures: list[str] = []

    def run_many(index: int) -> None:
        try:
            for _ in range(15):
                work(data, index)
        except (RuntimeError, MemoryError, AssertionError) as error:
            failures.append(repr(error))

    started = [threading.Thread(target=run_many, args=(index,)) for index in indices]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    gc.collect()
    gpu.sync()
    counts = vulkan.counts(vulkan.choose())
    return {"failures": failures, "alive": [counts["pipelines_alive"], counts["buffers_alive"]]}


def hazard(data: bytes) -> dict[str, Any]:
    """A kernel that says it only reads what it writes: no barrier is recorded, and the layer must notice.

    Read after write: the layer of 2023 passes over writes after writes of descriptors.
    """
    header_bytes = int.from_bytes(data[:8], "little")
    lying = data[:8] + data[8 : 8 + header_bytes].replace(b'"write": true', b'"write":false') + data[8 + header_bytes :]
    module = vulkan.function("create_module")(lying)
    a, b, c = (gpu.upload(np.zeros(64, np.float32)) for _ in range(3))
    try:
        module["add"](a, a, b, 64, 1.0, 1, 64)
        module["add"](b, b, c, 64, 1.0, 1, 64)
        gpu.sync()
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def across(data: bytes) -> dict[str, Any]:
    """Two devices: work on each in turn, a tensor from one to the other, and a tensor where it does not belong."""
    work(data, 0)
    work(data, 1)
    values = np.random.default_rng(1).integers(0, 1 << 30, 3_000_000, dtype=np.int32)
    moved = gpu.copied(gpu.upload(values, 0), 1)
    module = vulkan.function("create_module")(data)
    gpu.set_device(1)
    module["increment"](moved, 3_000_000, 46_875, 64)
    gpu.set_device(0)
    try:
        module["increment"](moved, 3_000_000, 46_875, 64)
        error_words = ""
    except RuntimeError as error:
        error_words = str(error)
    same = bool((gpu.download(moved) == values + 1).all())
    return {"same": same, "error": error_words, "kinds": [found.kind for found in vulkan.devices()]}


def describe(data: bytes) -> dict[str, Any]:
    found = vulkan.devices()
    return {"devices": [{"spec": d.spec, "kind": d.kind, "problem": d.problem} for d in found]}


def once(data: bytes) -> dict[str, Any]:
    device = vulkan.choose()
    work(data)
    return {"counts": vulkan.counts(device), "problem": vulkan.save_pipelines()}


def torn_cache(data: bytes) -> dict[str, Any]:
    """Which files of compiled pipelines are taken when the device is opened, and whether what is saved then is."""
    fake, device = Fake(), vulkan.choose()
    (file,) = vulkan_plugin.folder().glob("pipelines-*.bin")
    whole, taken = file.read_bytes(), []

    def opened() -> bool:
        fake.arm(0, LOST)
        with suppress(RuntimeError):
            work(data)
        fake.arm(-1, 0)
        work(data)
        return bool(vulkan.counts(device)["cache_loaded"])

    for torn in (whole[:-1], whole + b"x", b"", whole[:30], whole[:24] + bytes([whole[24] ^ 1]) + whole[25:]):
        file.write_bytes(torn)
        taken.append(opened())
        vulkan.save_pipelines()
        taken.append(opened())
    return {"taken": taken, "files": [path.name for path in file.parent.iterdir()]}


def host_cost(data: bytes) -> dict[str, Any]:
    """Microseconds of launches that wait for the one before, or do not; of TVM's call, and of one from Python."""
    module = vulkan.function("create_module")(data)
    a, b, c = (gpu.upload(np.zeros(64, np.float32)) for _ in range(3))
    tensor = gpu.upload(np.zeros(64, np.int32))

    def per_launch(*call: Any) -> float:
        gpu.times(module, *call, number=1000)
        start = time.thread_time()
        gpu.times(module, *call, number=10_000)
        return (time.thread_time() - start) / 10_000 * 1e6

    # A launch of no workgroups ends before anything is recorded: what TVM's own call costs.
    calls = {"dependent": ("increment", tensor, 64, 1, 64), "independent": ("add", a, b, c, 64, 1.0, 1, 64)}
    calls["call"] = ("add", a, b, c, 64, 1.0, 0, 64)
    cost = {name: min(per_launch(*call) for _ in range(10)) for name, call in calls.items()}
    return {**cost, "python": gpu.call_us()}


if __name__ == "__main__":
    run = {f.__name__: f for f in (out_of_memory, lost, opening, tensors_of_a_lost_device, full, cycles, across,
                                   describe, no_threads, once, torn_cache, host_cost, threads, hazard)}[sys.argv[1]]  # fmt: skip
    vulkan.load()
    try:
        result = run(Path(sys.argv[2]).read_bytes())
    except vulkan.TargetError as error:
        result = {"target_error": str(error)}
    sys.stdout.write(json.dumps(result))
