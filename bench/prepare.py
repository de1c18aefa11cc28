"""Makes the inputs of a comparison: checkpoints, bundles, GGUF files, llama.cpp and OpenVINO; each once, then kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from bench.build_llama_cpp import VERSION, build_llama_cpp, build_name, quantize
from bench.build_openvino import build_openvino, bytes_per_token, export
from bench.converted_gguf import converted_gguf
from bench.make_checkpoint import SHAPES, config_of, make_checkpoint
from bench.runners import Effort, LlamaBench, Mlcpipe, Native, OpenVino, Runner
from mlcpipe.bundle import Manifest, read_manifest
from mlcpipe.cli.terminal import stderr_console
from mlcpipe.compiler.link import find_cxx
from mlcpipe.compiler.native_runtime import write_program
from mlcpipe.errors import UsageError
from mlcpipe.loading import prepare_bundle
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.support.defaults import KEEP
from mlcpipe.support.env import env
from mlcpipe.support.progress import console_progress

# Types of GGUF files as llama.h numbers them (llama_ftype).
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37}
RUNTIMES = ("mlcpipe", "native", "llama.cpp", "openvino")


@dataclass(frozen=True)
class Subject:
    """A model with weights of one kind: what the runtimes are compared on. `bits` are those of a weight's code.

    With 0 bits `quantization` is the type of a GGUF file, whose weights both have.
    """

    model: str
    quantization: str
    bits: int


@dataclass(frozen=True)
class Places:
    """Folders and files: `work` keeps what is made; `checkpoint` and `llama_bench` are used instead of made.

    `device` is the number of the Vulkan device to compare on, None for the CPU; `batches`: llama-batched-bench is used.
    """

    work: Path
    checkpoint: Path | None = None
    llama_bench: Path | None = None
    device: int | None = None
    batches: bool = False


def default_work() -> Path:
    """Where things are kept if nothing is said."""
    return env().cache_dir / "peers"


def subject(model: str, quantization: str) -> Subject:
    """Raises ConfigError for an unknown quantization, UsageError for one that no peer has."""
    if quantization in FILE_TYPES:
        return Subject(model, quantization, 0)
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
    source, quantization = checkpoint, what.quantization
    if not what.bits:
        source, quantization = _file_of(what, places, checkpoint), KEEP
    with console_progress(stderr_console()) as progress:
        bundle = prepare_bundle(source, device or "auto", quantization, target=target, progress=progress)
    manifest = read_manifest(bundle)
    runners: list[Runner] = [Mlcpipe(bundle, effort, manifest.memory_plan.weights_read, device)]
    if "native" in runtimes:
        program = places.work / "native-program"
        write_program(find_cxx(), env().cache_dir, None, program)
        runners.append(Native(program, bundle, effort, manifest.memory_plan.weights_read))
    if "llama.cpp" in runtimes:
        runners += _llama_cpp(what, places, effort, checkpoint, manifest.checkpoint_hash)
    if "openvino" in runtimes and what.bits:
        python = build_openvino(places.work)
        model = export(python, checkpoint, what.bits)
        runners.append(OpenVino(python, model, effort, bytes_per_token(model)))
    return runners, manifest


def _llama_cpp(what: Subject, places: Places, effort: Effort, checkpoint: Path, content: str) -> list[LlamaBench]:
    """llama-bench with flash attention off and on."""
    binary = _llama_bench(places)
    if what.bits:
        gguf = _made_gguf(checkpoint, places.work / f"{content[:16]}-q{what.bits}_0.gguf", what.bits, binary)
    else:
        gguf = _file_of(what, places, checkpoint)
    weights = _make_gguf().bytes_per_token(gguf)
    return [LlamaBench(binary, gguf, effort, weights, flash, places.device) for flash in (False, True)]


def _llama_bench(places: Places) -> Path:
    binary = places.llama_bench
    if binary is None:
        vulkan = places.device is not None
        binary = places.work / build_name(VERSION, vulkan) / "bin" / "llama-bench"
        wanted = [binary, *([binary.with_name("llama-batched-bench")] if places.batches else [])]
        if not all(one.is_file() for one in wanted):
            _say("build llama.cpp")
            build_llama_cpp(places.work, vulkan=vulkan, server=places.batches)
    if not binary.is_file():
        raise UsageError("--llama-bench", expected="a file", found=binary)
    return binary.resolve()


def _file_of(what: Subject, places: Places, checkpoint: Path) -> Path:
    """A GGUF file of this type, made by llama.cpp but for those types that `make_gguf` writes."""
    name, bits = what.quantization, {"Q4_0": 4, "Q8_0": 8}.get(what.quantization)
    path = places.work / f"{checkpoint.name}-{name}.gguf"
    if bits is not None or path.is_file():
        return _made_gguf(checkpoint, path, bits or 8, _llama_bench(places))
    source = _file_of(replace(what, quantization="Q8_0"), places, checkpoint)
    _say(f"write {path.name}")
    return quantize(source, path, FILE_TYPES[name], _llama_bench(places))


def _made_gguf(checkpoint: Path, path: Path, bits: int, llama_bench: Path) -> Path:
    """Written here for the families that need no other program for it, else by llama.cpp's converter."""
    if path.is_file():
        return path
    _say(f"write {path.name}")
    if config_of(str(checkpoint / "config.json"))["model_type"] not in _make_gguf().ARCHITECTURES:
        return converted_gguf(checkpoint, path, llama_bench, f"Q{bits}_0")
    made: Path = _make_gguf().make_gguf(checkpoint, path, bits=bits)
    return made


def _make_gguf() -> ModuleType:
    try:
        from bench import make_gguf
    except ImportError as error:
        raise UsageError(f"{error.name} is missing", next_step="python -m pip install gguf") from error
    return make_gguf


def _say(text: str) -> None:
    print(text, file=sys.stderr)
