"""The threads of a compiled library: every part runs once, who waits sleeps, and they end with their user."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import mlcpipe
from mlcpipe.compiler.link import find_linker
from tests.conftest import Bundles

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps TVM's pool")

_BODY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _BODY, ctypes.c_void_p, ctypes.c_int)
# In the place of a compiled model: what TVM's loader fills in, and a launch that runs nothing and says so.
_STUB = """
static int tvm(int (*body)(int, void*, void*), void* data, int count) { (void)body; (void)data; (void)count; return 77; }
int (*__TVMBackendParallelLaunch)(int (*)(int, void*, void*), void*, int) = tvm;
"""
_TVM = 77


class _Any(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_int64))


class Pool:
    """pool.c with a stub for the model."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._launch = ctypes.c_void_p.in_dll(self._library, "__TVMBackendParallelLaunch")

    def threads(self, count: int) -> int:
        argument, result = _Any(1, 0, count), _Any(0, 0, 0)
        function = getattr(self._library, "__tvm_ffi_mlcpipe_threads")
        assert function(None, ctypes.byref(argument), 1, ctypes.byref(result)) == 0 and result.type == 1
        return int(result.value)

    def run(self, body: Callable[[int], int], count: int) -> int:
        return int(_LAUNCH(self._launch.value or 0)(_BODY(lambda task, group, data: body(task)), None, count))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    (folder / "stub.c").write_text(_STUB)
    find_linker().link([folder / "stub.c"], folder / "pool.so")
    return folder / "pool.so"


@pytest.fixture
def pool(library: Path) -> Iterator[Pool]:
    pool = Pool(library)
    assert pool.threads(4) == 4
    yield pool
    assert pool.threads(0) == 0
    assert pool.run(lambda task: 0, 1) == _TVM


def test_every_task_runs_once_in_each_of_many_loops(pool: Pool) -> None:
    for count in (1, 3, 4, 64) * 50:
        seen: list[int] = []
        assert pool.run(lambda task, seen=seen: seen.append(task) or 0, count) == 0  # type: ignore[misc, func-returns-value]
        assert sorted(seen) == list(range(count))


def test_tasks_run_at_the_same_time(pool: Pool) -> None:
    meeting = threading.Barrier(4, timeout=30)
    assert pool.run(lambda task: meeting.wait() * 0, 4) == 0


@pytest.mark.alone
def test_who_waits_sleeps(pool: Pool) -> None:
    pool.run(lambda task: 0, 4)
    used, began = time.process_time(), time.perf_counter()
    # The caller may take the long task itself: another thread waits for it then.
    assert pool.run(lambda task: time.sleep(0.4) or 0 if task == 3 else 0, 4) == 0  # type: ignore[func-returns-value]
    waited = time.perf_counter() - began
    assert waited > 0.39
    assert time.process_time() - used < waited / 4  # three threads wait; in TVM's pool each uses all of it


def test_others_take_the_tasks_of_a_thread_that_is_held_up(pool: Pool) -> None:
    """In four equal shares the thread of the first task would wait for its own seven others, and never get them done."""
    others, done = threading.Event(), []

    def body(task: int) -> int:
        if task == 0:
            return 0 if others.wait(30) else 1
        done.append(task)
        if len(done) == 30:
            others.set()
        return 0

    assert pool.run(body, 31) == 0


def test_the_failure_of_a_task_is_that_of_the_loop(pool: Pool) -> None:
    callers: list[int] = []

    def body(task: int) -> int:
        if task != 5:
            return 0
        callers.append(threading.get_ident())
        return -1

    assert pool.run(body, 8) == -1
    assert callers[-1] == threading.get_ident()  # where the message of the error must be
    assert pool.run(lambda task: 0, 8) == 0


def test_a_second_caller_gets_tvm(pool: Pool) -> None:
    inside: list[int] = []

    def body(task: int) -> int:
        if task == 0:
            other = threading.Thread(target=lambda: inside.append(pool.run(lambda task: 0, 2)))
            other.start()
            other.join()
        return 0

    assert pool.run(body, 4) == 0
    assert inside == [_TVM]


def test_users_share_threads_and_the_last_to_come_says_how_many(pool: Pool) -> None:
    assert pool.threads(2) == 2
    meeting = threading.Barrier(2, timeout=30)
    assert pool.run(lambda task: meeting.wait() * 0, 2) == 0
    assert pool.threads(1) == 1
    assert pool.run(lambda task: 0, 3) == 0
    assert pool.threads(0) == 1 and pool.threads(0) == 1  # the fixture's user is left


def test_threads_never_change_under_a_running_loop(pool: Pool) -> None:
    by_caller: list[bool] = []
    while not any(by_caller):  # no worker is busy then, so nothing but the loop itself holds up the change
        inside, release = threading.Event(), threading.Event()

        def body(task: int, inside: threading.Event = inside, release: threading.Event = release) -> int:
            by_caller.append(threading.current_thread().name == "caller")
            inside.set()
            return 0 if release.wait(30) else -1

        loop = threading.Thread(target=pool.run, args=(body, 1), name="caller")
        change = threading.Thread(target=pool.threads, args=(2,))
        loop.start()
        assert inside.wait(30)
        change.start()
        change.join(0.1)
        assert change.is_alive()
        release.set()
        loop.join()
        change.join()
        assert pool.threads(0) == 2
    assert pool.run(lambda task: 0, 3) == 0


_FORKS = """
import os, sys
from pathlib import Path
import mlcpipe

engine = mlcpipe.Engine(sys.argv[1], threads=3)
expected = engine.logits([1, 5, 9]).tolist()
child = os.fork()
if child == 0:
    assert engine.logits([1, 5, 9]).tolist() == expected
    assert len(list(Path("/proc/self/task").iterdir())) == 3
    sys.exit(7)  # closes the engine, as an answer that ends would
assert engine.logits([1, 5, 9]).tolist() == expected
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.full
def test_a_forked_child_answers_on_threads_of_its_own_and_ends(tiny_bundles: Bundles) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS, str(tiny_bundles["q4f32_1"])], check=True, timeout=60)


_TWO_THREADS = """
import sys, threading
import mlcpipe

engine = mlcpipe.Engine(sys.argv[1], threads=1)
greedy = mlcpipe.SamplingParams(temperature=0.0)
ask = lambda prompt: engine.generate(prompt, sampling=greedy, max_tokens=4, ignore_eos=True).token_ids
prompts = ([1, 5, 9], [200, 17, 3])
expected, wrong = [ask(prompt) for prompt in prompts], []

def work(prompt, answer):
    for _ in range(100):
        if (found := ask(prompt)) != answer:
            wrong.append(found)

threads = [threading.Thread(target=work, args=pair) for pair in zip(prompts, expected)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not wrong
assert [ask(prompt) for prompt in prompts] == expected
"""


def test_an_engine_in_two_threads(tiny_bundles: Bundles) -> None:
    subprocess.run([sys.executable, "-c", _TWO_THREADS, str(tiny_bundles["q4f32_1"])], check=True, timeout=120)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_an_engine_has_them_and_takes_them_along(tiny_bundles: Bundles) -> None:
    tokens = [1, 5, 9, 200, 17, 3]
    bundle = tiny_bundles["q4f32_1"]
    one = mlcpipe.Engine(bundle, threads=1).logits(tokens)
    before = len(list(Path("/proc/self/task").iterdir()))
    engine = mlcpipe.Engine(bundle, threads=5)
    assert engine.threads == 5 and len(list(Path("/proc/self/task").iterdir())) == before + 4
    np.testing.assert_array_equal(engine.logits(tokens), one)
    del engine
    assert len(list(Path("/proc/self/task").iterdir())) == before
