"""mlcpipe: compile a language model's checkpoint for the device in front of you, and run it there.

bundle = mlcpipe.compile("path/to/checkpoint", target="cpu", quantization="q4f16_1", output="bundle")
engine = mlcpipe.Engine(bundle)
print(engine.chat([{"role": "user", "content": "Hello"}]).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.sampling_params import Chunk, Completion, SamplingParams, Stats, TokenLogprob
from mlcpipe.version import __version__

if TYPE_CHECKING:
    from mlcpipe.compiler.compile import compile as compile
    from mlcpipe.compiler.compile import convert as convert
    from mlcpipe.runtime.engine import Engine as Engine

__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "MlcpipeError",
    "SamplingParams",
    "Stats",
    "TokenLogprob",
    "__version__",
    "compile",
    "convert",
]


def __getattr__(name: str) -> Any:
    """Import what needs TVM only when it is used: `import mlcpipe` stays fast."""
    from mlcpipe.version import check_tvm

    if name in ("compile", "convert"):
        check_tvm()
        from mlcpipe.compiler import compile as module

        return getattr(module, name)
    if name == "Engine":
        check_tvm()
        from mlcpipe.runtime.engine import Engine

        return Engine
    raise AttributeError(f"module 'mlcpipe' has no attribute {name!r}")
