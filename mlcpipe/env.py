"""Every environment variable that mlcpipe reads; nothing else looks at `os.environ`.

MLCPIPE_DEBUG        1 timings and tracebacks, 2 the rule of every PrimFunc, 3 the IR, 4 generated source
MLCPIPE_DUMP         a folder that gets the IR after every pass
MLCPIPE_CACHE        where compiled bundles, downloads and the chat history are kept
MLCPIPE_THREADS      how many threads the CPU kernels use (default: the physical cores)
MLCPIPE_CPU_VARIANT  which variant of the compiled library runs (default: the best for this CPU, see `mlcpipe inspect`)
MLCPIPE_CUDA_GRAPHS  0: launch the kernels of a decode step one by one
VK_INSTANCE_LAYERS   the Vulkan loader's: if it has VK_LAYER_KHRONOS_validation, messages of that layer become errors
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.errors import UsageError


@dataclass(frozen=True)
class Env:
    """The settings that came from the environment."""

    debug: int
    dump: Path | None
    cache_dir: Path
    threads: int | None
    cpu_variant: str | None
    cuda_graphs: bool
    vulkan_validation: bool


def env() -> Env:
    """Read the environment now, so that a test or a host may change it. Raises UsageError on a bad value."""
    cache = os.environ.get("MLCPIPE_CACHE", "")
    dump = os.environ.get("MLCPIPE_DUMP", "")
    return Env(
        debug=_integer("MLCPIPE_DEBUG", low=0, high=4) or 0,
        dump=Path(dump).expanduser() if dump else None,
        cache_dir=Path(cache).expanduser() if cache else _user_cache(),
        threads=_integer("MLCPIPE_THREADS", low=1, high=1024),
        cpu_variant=os.environ.get("MLCPIPE_CPU_VARIANT", "").strip() or None,
        cuda_graphs=_integer("MLCPIPE_CUDA_GRAPHS", low=0, high=1) != 0,
        vulkan_validation="VK_LAYER_KHRONOS_validation" in os.environ.get("VK_INSTANCE_LAYERS", ""),
    )


def _user_cache() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("mlcpipe", appauthor=False)


def _integer(name: str, *, low: int, high: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise UsageError(
            f"the environment variable {name} has a value that cannot be used",
            expected=f"an integer from {low} to {high}",
            found=repr(text),
        )
    return value
