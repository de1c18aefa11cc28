"""The number of threads of the compiled kernels, and their processors."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import UsageError
from mlcpipe.host.cpu import core_counts
from mlcpipe.support.env import env

MAX_THREADS = 1024
_OWN_THREADS, _WATCH_SIGNALS, _STEP = "mlcpipe_threads", "mlcpipe_watch_signals", "mlcpipe_step"
_SHARE_ALL_CORES = -3  # TVM's kSpecifyThreadShareAllCore: the operating system places and moves the threads


def use_threads(threads: int | None = None) -> int:
    """Set the kernels' number of threads: `threads`, MLCPIPE_THREADS, or the physical cores -> the new number.

    TVM's own default is half of the logical processors, and it pins its worker while the main thread moves freely:
    both ended on one processor. Here every thread may run on every processor of this process, which avoids busy ones.
    TVM makes its pool at the first parallel kernel of a thread and never enlarges it, so call this first. A forked
    child then hangs when it exits: the pool waits there for threads that do not exist. Raises UsageError.
    """
    wanted = _wanted(threads)
    usable = _processors()
    names = [str(cpu) for cpu in itertools.islice(itertools.cycle(usable), max(wanted, len(usable)))]
    tvm_runtime.function("runtime.config_threadpool")(_SHARE_ALL_CORES, wanted, names)
    return int(tvm_runtime.function("runtime.NumThreads")())


def _wanted(threads: int | None) -> int:
    if threads is not None and (not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS):
        raise UsageError("threads", expected=f"an integer from 1 to {MAX_THREADS}", found=repr(threads))
    return threads or env().threads or physical_cores()


def own_threads(module: Any, threads: int | None, owner: object) -> int | None:
    """Run the parallel loops of a compiled library on its own threads (`mlcpipe/native/pool.c`) while `owner` lives.

    They take over parts of a loop that others have not begun, and sleep during long waits, so that another process on
    a core costs little more than its share. Returns their number, the caller's included; None for a library without a
    pool (Windows), which keeps TVM's. `threads` is as for `use_threads`; where nobody says how many, decode steps take
    fewer if they are faster so.
    """
    if not module.implements_function(_OWN_THREADS, query_imports=True):
        return None
    start = module.get_function(_OWN_THREADS, query_imports=True)
    running = int(start(_wanted(threads), threads is None and not env().threads))
    weakref.finalize(owner, start, 0)
    return running


def step_threads(module: Any) -> Callable[[int], Any]:
    """A function of a compiled library that is told what this thread computes next.

    n > 0: a decode step of n rows, whose number of threads is chosen by time; 0: the step is over; -1: something else,
    on all threads. Without a library, or of one without a pool, it does nothing.
    """
    if module is None or not module.implements_function(_STEP, query_imports=True):
        return lambda rows: None
    return cast("Callable[[int], Any]", module.get_function(_STEP, query_imports=True))


@contextmanager
def interruptible(module: Any, tokens: int) -> Iterator[None]:
    """Inside, the parallel loops of a compiled library let Python's signal handlers run, and end if one raises.

    So Ctrl-C need not wait for a call with many tokens, which may take seconds. It is for the main thread, where Python
    runs handlers, and for a library with threads of its own; elsewhere it does nothing.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not module.implements_function(_WATCH_SIGNALS, query_imports=True):
        yield
        return
    watch = module.get_function(_WATCH_SIGNALS, query_imports=True)
    try:
        watch(tokens)
        yield
    finally:
        watch(0)


def physical_cores() -> int:
    """Physical cores that this process may use, at least 1."""
    return core_counts()[0]


def _processors() -> list[int]:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
