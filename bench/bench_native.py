"""Measures the native runtime's resources: bytes of programs, private memory, allocations, instructions.

    python -m bench.bench_native [--parts sizes,memory,text,kotlin,loop,instructions] [--model llama-1b]
        [--llama-bench-arm64 FILE]

Speed is measured by `bench_peers --runtimes native,llama.cpp`. Linux only. Instructions are counted by qemu's emulator in
one thread; they say nothing of time. They need qemu-user, a C compiler and ziglang, and llama.cpp's llama-bench built for
arm64 to stand beside.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pydoc_data.topics
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.bench_peers import words
from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.native_loop import loop_costs, write_loop_program
from bench.prepare import default_work
from bench.program import command_line, run_program
from mlcpipe.cli.terminal import stdout_console
from mlcpipe.compiler.backends.spirv.native import plugin
from mlcpipe.compiler.link import find_cxx
from mlcpipe.compiler.native_runtime import shared_library, write_program
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.loading import prepare_bundle
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.env import env
from tests.native.android.conftest import (
    CLASSES,
    KOTLIN,
    SCENARIOS,
    compile_kotlin,
    jdk,
    kotlin_files,
    link_jni,
    plain_kotlin,
)

_PLUGIN = Path(__file__).with_name("count_instructions.c")
_CPU = "neoverse-n1"
_PROMPTS = (64, 192)  # tokens; the difference is what a token costs
_ANSWERS = (2, 18)
_RUNS = 3  # of `chat bench`
_REPEATS = 5
_FIRST_TOKENS = 9
_TOKENS, _SEQUENCES = 128, (4, 8)  # of the loop

Row = tuple[str, str, str]


def sizes(work: Path, _: argparse.Namespace) -> list[Row]:
    """Bytes of stripped programs for arm64, with musl and libc++ inside; for Vulkan, its headers are needed."""
    zig = find_cxx("aarch64-linux-musl")
    library = shared_library(zig, env().cache_dir)
    with_vulkan = shared_library(zig, env().cache_dir, plugin(env().cache_dir))
    program = work / "chat-arm64"
    write_program(zig, env().cache_dir, None, program)
    return [
        ("libmlcpipe.so, arm64", _mb(library.stat().st_size), ""),
        ("libmlcpipe.so with Vulkan, arm64", _mb(with_vulkan.stat().st_size), ""),
        ("program without a model's code, arm64", _mb(program.stat().st_size), ""),
    ]


def memory(work: Path, options: argparse.Namespace) -> list[Row]:
    """The most private memory of a process whose context is full, beside the plan of `doctor`."""
    program = work / "native-program"
    write_program(find_cxx(), env().cache_dir, None, program)
    bundle = prepare_bundle(_checkpoint(work, options.model), target="cpu", quantization="q4f16_1")
    context = 2048
    given = ["-m", str(bundle), "--context", str(context), "--json"]
    plan = json.loads(subprocess.run([program, "doctor", *given], capture_output=True, check=True).stdout)
    kv = plan["kv_bytes"]
    rest = plan["workspace_bytes"]
    private = peak_private_bytes(
        [str(program), "bench", *given, "--prompt-tokens", str(context - 1), "--max-tokens", "1"]
    )
    return [
        ("KV cache and workspace, planned", _mb(kv + rest), f"{options.model}, {context} tokens"),
        ("private memory, most", _mb(private), f"{(private - kv - rest) / 1e6:+.1f} MB"),
        (
            "peak against the plan, weights included",
            f"{(private - kv - rest) / (plan['weights_bytes'] + kv + rest):+.1%}",
            "",
        ),
    ]


def text(work: Path, options: argparse.Namespace) -> list[Row]:
    """Encoding Python's help, English, in one thread beside `tokenizers`; opening the tokenizer."""
    bundle = prepare_bundle(target="cpu", quantization="q4f16_1")
    library = ctypes.CDLL(str(shared_library(find_cxx(), env().cache_dir)))
    engine = ctypes.c_uint64()
    if library.mlcpipe_open(str(bundle).encode(), None, ctypes.byref(engine)):
        raise ResourceError("the native runtime does not open the bundle", where=bundle)
    sample = "\n".join(pydoc_data.topics.topics.values())
    data = sample.encode()

    class Text(ctypes.Structure):
        _fields_ = (("data", ctypes.c_char_p), ("bytes", ctypes.c_size_t))

    ids, count = (ctypes.c_int32 * len(data))(), ctypes.c_size_t()

    def ours(given: bytes = data) -> None:
        room, taken = ctypes.c_size_t(len(ids)), Text(given, len(given))
        if library.mlcpipe_tokenize(engine, taken, 0, ids, room, ctypes.byref(count)):
            raise ResourceError("the native runtime refused the text")

    opened = _seconds(lambda: ours(b"Hi"))
    tokenizer = Tokenizer.load(bundle, generation_config={}, config={})
    times: list[tuple[float, float]] = [
        (_seconds(ours), _seconds(lambda: tokenizer.encode(sample))) for _ in range(_REPEATS)
    ]
    if ids[: count.value] != tokenizer.encode(sample):
        raise ResourceError("the ids differ from those of tokenizers")
    ratio = statistics.median(theirs / own for own, theirs in times)
    rate = statistics.median(len(data) / own for own, _ in times) / 1e6
    return [
        (
            "encode, one thread",
            f"{rate:.1f} MB/s",
            f"{ratio:.1f} times tokenizers ({len(data) / 1e6:.2f} MB of English)",
        ),
        ("first call", f"{opened * 1e3:.1f} ms", f"{tokenizer.vocab_size} entries"),
    ]


def kotlin(work: Path, _: argparse.Namespace) -> list[Row]:
    """From `open` to the first token of the demo model, in C and in Kotlin, whose process runs several: the median."""
    if not KOTLIN.is_dir() or shutil.which("javac") is None:
        raise UsageError("the part kotlin", expected="a JDK, and npm ci --prefix tests/native/android")
    bundle, library = prepare_bundle(target="cpu", quantization="q4f16_1"), shared_library(find_cxx(), env().cache_dir)
    jar, classes = work / "scenarios.jar", [*CLASSES, work / "scenarios.jar"]
    compile_kotlin([*plain_kotlin(), *kotlin_files(SCENARIOS)], jar)
    link_jni(work / "libmlcpipe.so", env().cache_dir)
    java = [jdk() / "bin" / "java", f"-Djava.library.path={work}", "-cp", ":".join(map(str, classes))]
    commands = {
        "C": [sys.executable, "-m", "tests.native.first_token", library, bundle, _FIRST_TOKENS],
        "Kotlin": [*java, "ai.mlcpipe.ScenariosKt", "first", bundle, _FIRST_TOKENS],
    }
    rows = []
    for name, command in commands.items():
        said = subprocess.run(list(map(str, command)), capture_output=True, check=True).stdout
        runs = [json.loads(line) for line in said.splitlines()]
        seconds = [run["open_s"] + run["first_s"] for run in runs]
        private = statistics.median(run["private_bytes"] for run in runs[1:])
        later = f"{statistics.median(seconds[1:]) * 1e3:.0f} ms, the first {seconds[0] * 1e3:.0f} ms"
        rows.append((f"{name}: from open to the first token", later, f"{_mb(private)} private"))
    return rows


def loop(work: Path, options: argparse.Namespace) -> list[Row]:
    """The runtime's own loop, and TVM's virtual machine with the kernels, a token: median time and heap allocations."""
    program = work / "native-loop"
    write_loop_program(find_cxx(), env().cache_dir, program)
    bundle = prepare_bundle(_checkpoint(work, options.model), target="cpu", quantization="q4f16_1")
    costs = loop_costs(program, bundle, _TOKENS, _SEQUENCES)
    rows = [(f"{one.answer}: own loop", one.own_us, one.own_allocations) for one in costs]
    rows += [(f"{one.answer}: TVM and kernels", one.model_us, one.model_allocations) for one in costs]
    return [(name, f"{us:.1f} µs", f"{allocations:.2f} allocations") for name, us, allocations in rows]


def instructions(work: Path, options: argparse.Namespace) -> list[Row]:
    """For one more token in a prompt and in an answer, on one emulated CPU with dot products."""
    qemu, gcc = shutil.which("qemu-aarch64"), shutil.which("gcc")
    if qemu is None or gcc is None:
        raise UsageError("instructions are counted by qemu", expected="qemu-user and gcc")
    plugin = work / "count_instructions.so"
    subprocess.run([gcc, "-O2", "-shared", "-fPIC", str(_PLUGIN), "-o", str(plugin)], check=True)
    emulator = [qemu, "-cpu", _CPU, "-plugin", str(plugin)]
    checkpoint = _checkpoint(work, options.model)
    bundle = prepare_bundle(checkpoint, target="arm64-linux", quantization="q4f16_1", runs_here=False)
    program = work / "chat-of-model"
    _run([sys.executable, "-m", "mlcpipe", "package", str(bundle), "--app", "cli", "-o", str(program), "--overwrite"])

    def native(prompt: int, answer: int) -> float:
        said = ["bench", "--prompt-tokens", str(prompt), "--max-tokens", str(answer), "--threads", "1", "--json"]
        return _counted([*emulator, str(program), *said]) / _RUNS

    rows = _difference("mlcpipe native, q4f16_1", native)
    if options.llama_bench_arm64 is not None:
        command = [
            *emulator,
            str(options.llama_bench_arm64),
            "-m",
            str(options.gguf),
            "-t",
            "1",
            "-r",
            "1",
            "--no-warmup",
        ]

        def peer(prompt: int, answer: int) -> float:
            prefill = _counted([*command, "-p", str(prompt), "-n", "0"])
            return prefill + _counted([*command, "-p", "0", "-n", str(answer)])

        rows += _difference("llama.cpp, Q4_0", peer)
    return rows


def _difference(who: str, count: Callable[[int, int], float]) -> list[Row]:
    base, prompt, answer = (
        count(*lengths)
        for lengths in ((_PROMPTS[0], _ANSWERS[0]), (_PROMPTS[1], _ANSWERS[0]), (_PROMPTS[0], _ANSWERS[1]))
    )
    prefill, decode = (prompt - base) / (_PROMPTS[1] - _PROMPTS[0]), (answer - base) / (_ANSWERS[1] - _ANSWERS[0])
    return [(f"{who}: a token of the prompt", f"{prefill / 1e6:.1f} M instructions", _CPU),
            (f"{who}: a token of the answer", f"{decode / 1e6:.1f} M instructions", _CPU)]  # fmt: skip


def _counted(command: Sequence[str]) -> int:
    for line in _run(command).splitlines():
        if line.startswith("instructions "):
            return int(line.split()[1])
    raise ResourceError("qemu counted nothing", where=command[0])


def _run(command: Sequence[str]) -> str:
    """Its output on stderr. Raises ResourceError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(" ".join(command[:6]) + " failed", found=done.stderr.strip()[-300:])
    return done.stderr


def peak_private_bytes(command: Sequence[str]) -> int:
    """The peak of a command's private memory, sampled every 2 ms."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            peak = max(peak, private_bytes(running.pid))
            time.sleep(0.002)
    return peak


def private_bytes(process: int) -> int:
    """The current private memory of a process, 0 if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def _checkpoint(work: Path, model: str) -> Path:
    if not (work / model).is_dir():
        if model not in SHAPES:
            raise UsageError("--model", expected=", ".join(SHAPES), found=model)
        make_checkpoint(model, work / model)
    return work / model


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _mb(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


_PARTS: dict[str, Callable[[Path, argparse.Namespace], list[Row]]] = {
    "sizes": sizes, "memory": memory, "text": text, "kotlin": kotlin, "loop": loop, "instructions": instructions,
}  # fmt: skip
_DEFAULT_PARTS = tuple(name for name in _PARTS if name != "kotlin")  # whose compiler few have


def main() -> None:
    """Print a table of the parts asked for."""
    parser = command_line(__doc__)
    parser.add_argument("--parts", type=words, default=_DEFAULT_PARTS, help=f"default: {','.join(_DEFAULT_PARTS)}")
    parser.add_argument("--model", default="qwen2-0.5b", help="a shape with random weights (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="where to keep what is made (default: in mlcpipe's cache)")
    parser.add_argument(
        "--llama-bench-arm64", type=Path, metavar="FILE", help="llama.cpp's benchmark for arm64, static"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same shape in Q4_0, for it")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(_PARTS):
        raise UsageError("--parts", expected=", ".join(_PARTS), found=", ".join(sorted(unknown)))
    work = options.work or default_work()
    work.mkdir(parents=True, exist_ok=True)
    table = Table("what", "measured", "")
    for part in options.parts:
        for row in _PARTS[part](work, options):
            table.add_row(*row)
    stdout_console().print(table)


if __name__ == "__main__":
    run_program(main)
