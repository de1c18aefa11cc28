"""Makes what a comparison needs: checkpoints, bundles, GGUF files, llama.cpp and OpenVINO; each once, then kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.build_llama_cpp import VERSION, build_llama_cpp, build_name
from bench.build_openvino import build_openvino, bytes_per_token, export
from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.runners import Effort, LlamaBench, Mlcpipe, Native, OpenVino, Runner
from mlcpipe.bundle import Manifest, read_manifest
from mlcpipe.cli.terminal import stderr_console
from mlcpipe.compiler.link import find_cxx
from mlcpipe.compiler.native_runtime import write_program
from mlcpipe.env import env
from mlcpipe.errors import UsageError
from mlcpipe.loading import prepare_bundle
from mlcpipe.progress import console_progress
from mlcpipe.quantization.scheme import load_scheme

RUNTIMES = ("mlcpipe", "native", "llama.cpp", "openvino")


@dataclass(frozen=True)
class Subject:
    """A model with weights of one kind: what the runtimes are compared on. `bits` are those of a weight's code."""

    model: str
    quantization: str
    bits: int


@dataclass(frozen=True)
class Places:
    """Folders and files: `work` keeps what is made; `checkpoint` and `llama_bench` are used instead of made.

    `device` is the number of the Vulkan device to compare on, None for the CPU.
    """

    work: Path
    checkpoint: Path | None = None
    llama_bench: Path | None = None
    device: int | None = None


def default_work() -> Path:
    """Where things are kept if nothing is said."""
    return env().cache_dir / "peers"


def subject(model: str, quantization: str) -> Subject:
    """Raises ConfigError for an unknown quantization, UsageError for one that no peer has."""
    bits = load_scheme(quantization).bits
    if bits not in (4, 8):
        raise UsageError("quantization", expected="one of 4 or 8 bits, as the others have", found=quantization)
    return Subject(model, quantization, bits)


def prepare(what: Subject, places: Places, effort: Effort, runtimes: Sequence[str]) -> tuple[list[Runner], Manifest]:
    """The runtimes for one subject, ours first, and our bundle's manifest. Raises what the steps raise."""
    checkpoint = places.checkpoint or places.work / what.model
    if places.checkpoint is None and not checkpoint.is_dir():
        if what.model not in SHAPES:
            raise UsageError("model", expected=", ".join(SHAPES), found=what.model)
        _say(f"write a random checkpoint of the shape {what.model}")
        make_checkpoint(what.model, checkpoint)
    device = None if places.device is None else f"vulkan:{places.device}"
    target = "cpu" if device is None else None
    with console_progress(stderr_console()) as progress:
        bundle = prepare_bundle(checkpoint, device or "auto", what.quantization, target=target, progress=progress)
    manifest = read_manifest(bundle)
    runners: list[Runner] = [Mlcpipe(bundle, effort, manifest.memory_plan.weights_read, device)]
    if "native" in runtimes:
        program = places.work / "native-program"
        write_program(find_cxx(), env().cache_dir, None, program)
        runners.append(Native(program, bundle, effort, manifest.memory_plan.weights_read))
    if "llama.cpp" in runtimes:
        runners += _llama_cpp(what, places, effort, checkpoint, manifest.checkpoint_hash)
    if "openvino" in runtimes:
        python = build_openvino(places.work)
        model = export(python, checkpoint, what.bits)
        runners.append(OpenVino(python, model, effort, bytes_per_token(model)))
    return runners, manifest


def _llama_cpp(what: Subject, places: Places, effort: Effort, checkpoint: Path, content: str) -> list[LlamaBench]:
    """llama-bench with flash attention off and on."""
    try:
        from bench import make_gguf
    except ImportError as error:
        raise UsageError(f"{error.name} is missing", next_step="python -m pip install gguf") from error
    binary = places.llama_bench
    if binary is None:
        vulkan = places.device is not None
        binary = places.work / build_name(VERSION, vulkan) / "bin" / "llama-bench"
        if not binary.is_file():
            _say("build llama.cpp")
            build_llama_cpp(places.work, vulkan=vulkan)
    if not binary.is_file():
        raise UsageError("--llama-bench", expected="a file", found=binary)
    gguf = places.work / f"{content[:16]}-q{what.bits}_0.gguf"
    if not gguf.is_file():
        _say(f"write {gguf.name}")
        make_gguf.make_gguf(checkpoint, gguf, bits=what.bits)
    weights = make_gguf.bytes_per_token(gguf)
    return [LlamaBench(binary.resolve(), gguf, effort, weights, flash, places.device) for flash in (False, True)]


def _say(text: str) -> None:
    print(text, file=sys.stderr)
