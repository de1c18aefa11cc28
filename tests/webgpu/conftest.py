"""One build of the wasm runtime for all tests and all of pytest's workers: it takes more than a minute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import dawn


@pytest.fixture(scope="session", autouse=True)
def shared_runtime(own_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests' cache finds the runtime in a folder of this session, which one worker fills."""
    if dawn.missing():
        yield
        return
    import fcntl

    from mlcpipe.compiler.emscripten import find_emcc
    from mlcpipe.compiler.wasm_runtime import runtime_objects
    from mlcpipe.progress import SilentProgress

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-runtime"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runtime_objects(find_emcc(), shared, SilentProgress())
    (own_cache / "wasm_runtime").symlink_to(shared / "wasm_runtime", target_is_directory=True)
    yield
