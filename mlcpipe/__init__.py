"""mlcpipe: compile a language model for your device and run it there.

engine = mlcpipe.load("hf://Qwen/Qwen3-0.6B")
print(engine.chat([{"role": "user", "content": "Hello"}]).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlcpipe.errors import MlcpipeError

if TYPE_CHECKING:
    from mlcpipe.compiler.compile import compile as compile
    from mlcpipe.compiler.compile import convert as convert
    from mlcpipe.loading import load as load
    from mlcpipe.runtime.embedder import Embedder as Embedder
    from mlcpipe.runtime.engine import Engine as Engine
    from mlcpipe.runtime.sampling_params import Chunk as Chunk
    from mlcpipe.runtime.sampling_params import Completion as Completion
    from mlcpipe.runtime.sampling_params import SamplingParams as SamplingParams
    from mlcpipe.runtime.sampling_params import Stats as Stats
    from mlcpipe.runtime.sampling_params import TokenLogprob as TokenLogprob
    from mlcpipe.runtime.speech.transcriber import SpeechParams as SpeechParams
    from mlcpipe.runtime.speech.transcriber import Transcriber as Transcriber
    from mlcpipe.runtime.speech.transcriber import Transcript as Transcript
    from mlcpipe.version import __version__ as __version__

__all__ = [
    "Chunk",
    "Completion",
    "Embedder",
    "Engine",
    "MlcpipeError",
    "SamplingParams",
    "SpeechParams",
    "Stats",
    "TokenLogprob",
    "Transcriber",
    "Transcript",
    "__version__",
    "compile",
    "convert",
    "load",
]

_MODULES = {
    **dict.fromkeys(
        ("Chunk", "Completion", "SamplingParams", "Stats", "TokenLogprob"), "mlcpipe.runtime.sampling_params"
    ),
    **dict.fromkeys(("compile", "convert"), "mlcpipe.compiler.compile"),
    "Embedder": "mlcpipe.runtime.embedder",
    "Engine": "mlcpipe.runtime.engine",
    **dict.fromkeys(("SpeechParams", "Transcriber", "Transcript"), "mlcpipe.runtime.speech.transcriber"),
    "load": "mlcpipe.loading",
    "__version__": "mlcpipe.version",
}


def __getattr__(name: str) -> Any:
    """Import a module on first use, so that `import mlcpipe` stays fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'mlcpipe' has no attribute {name!r}")
    if name in ("compile", "convert", "Embedder", "Engine", "SpeechParams", "Transcriber", "Transcript"):
        from mlcpipe.version import check_tvm

        check_tvm()
    return getattr(import_module(_MODULES[name]), name)
