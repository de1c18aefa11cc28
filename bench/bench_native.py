"""Measures what the native runtime takes besides time: bytes of programs, private memory, instructions on a board's CPU.

    python -m bench.bench_native [--parts sizes,memory,text,instructions] [--model llama-1b] [--llama-bench-arm64 FILE]

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
from bench.prepare import default_work
from bench.program import command_line, run_program
from mlcpipe.cli.terminal import stdout_console
from mlcpipe.compiler.link import find_cxx
from mlcpipe.compiler.native_runtime import shared_library, write_program
from mlcpipe.env import env
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.loading import prepare_bundle
from mlcpipe.runtime.text.tokenizer import Tokenizer

_PLUGIN = Path(__file__).with_name("count_instructions.c")
_CPU = "neoverse-n1"
_PROMPTS = (64, 192)  # tokens; the difference is what a token costs
_ANSWERS = (2, 18)
_RUNS = 3  # of `chat bench`
_REPEATS = 5

Row = tuple[str, str, str]


def sizes(work: Path, _: argparse.Namespace) -> list[Row]:
    """Bytes of stripped programs for arm64, with musl and libc++ inside."""
    zig = find_cxx("aarch64-linux-musl")
    library = shared_library(zig, env().cache_dir)
    program = work / "chat-arm64"
    write_program(zig, env().cache_dir, None, program)
    return [
        ("libmlcpipe.so, arm64", _mb(library.stat().st_size), ""),
        ("program without a model's code, arm64", _mb(program.stat().st_size), ""),
    ]


def memory(work: Path, options: argparse.Namespace) -> list[Row]:
    """The most private memory of a process whose context is full, beside the plan of `doctor`."""
    program = work / "native-program"
    write_program(find_cxx(), env().cache_dir, None, program)
    bundle = prepare_bundle(_checkpoint(work, options.model), target="cpu")
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
    bundle = prepare_bundle(target="cpu")
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


def instructions(work: Path, options: argparse.Namespace) -> list[Row]:
    """Of one token more in a prompt and in an answer, on one emulated CPU with dot products."""
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
    """What it printed to stderr. Raises ResourceError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(" ".join(command[:6]) + " failed", found=done.stderr.strip()[-300:])
    return done.stderr


def peak_private_bytes(command: Sequence[str]) -> int:
    """The most private memory that a command had at once, looked at every 2 ms."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            try:
                status = Path(f"/proc/{running.pid}/status").read_text(encoding="utf-8")
            except OSError:
                break
            lines = [line.split() for line in status.splitlines()]
            peak = max(peak, sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:")))
            time.sleep(0.002)
    return peak


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


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


_PARTS: dict[str, Callable[[Path, argparse.Namespace], list[Row]]] = {
    "sizes": sizes, "memory": memory, "text": text, "instructions": instructions,
}  # fmt: skip


def main() -> None:
    """Print a table of the parts asked for."""
    parser = command_line(__doc__)
    parser.add_argument("--parts", type=words, default=tuple(_PARTS), help=f"default: {','.join(_PARTS)}")
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
