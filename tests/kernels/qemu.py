"""Kernels compiled for another CPU and run by qemu's user mode: no runtime of TVM, only `qemu_harness.c`."""

from __future__ import annotations

import io
import platform
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from mlcpipe.compiler.link import find_linux_linker
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.targets import host_instruction_sets
from tests.kernels.harness import Array, Call, Case, assert_within, first_names, variant

HARNESS = Path(__file__).with_name("qemu_harness.c")
AMX_EMULATOR = Path(__file__).with_name("amx_emulator.c")
TIMEOUT_S = 300
_DLPACK_CODES = {"i": 0, "u": 1, "f": 2}


@dataclass(frozen=True)
class Machine:
    """A CPU that qemu emulates as `emulates`, "" for the host's own; and LLVM's `mcpu` and `mattr` for its code.

    `slack`: bytes behind every tensor that may be read. qemu 7.2 reads all of a masked load's operand: vmaskmovps.
    `sources`: C files that programs for this machine have in them, such as what emulates a part of the host's CPU.
    `needs`: instruction sets that the host must have, by LLVM's names.
    """

    name: str
    arch: str
    emulates: str
    mcpu: str
    mattr: tuple[str, ...] = ()
    slack: int = 0
    sources: tuple[Path, ...] = ()
    needs: tuple[str, ...] = ()

    def target(self) -> Any:
        """The `tvm.target.Target`."""
        options = {"kind": "llvm", "mtriple": f"{self.arch}-linux-gnu", "mcpu": self.mcpu}
        return tvm.target.Target(options | ({"mattr": list(self.mattr)} if self.mattr else {}))

    def command(self, program: Path) -> list[str]:
        """What runs a program on this CPU."""
        emulator = [f"qemu-{self.arch}", "-cpu", self.emulates] if self.emulates else []
        return [*emulator, str(program), str(self.slack)]

    def missing(self) -> str | None:
        """What is not installed here, or None."""
        if self.emulates and shutil.which(f"qemu-{self.arch}") is None:
            return f"qemu-{self.arch} (Debian: qemu-user)"
        if not self.emulates and (sys.platform != "linux" or host().arch != self.arch):
            return f"Linux on {self.arch}"
        if lacking := [name for name in self.needs if name not in host_instruction_sets()]:
            return " ".join(lacking)
        if find_linux_linker(self.arch) is None:
            triple = f"{self.arch.replace('_', '-')}-linux-gnu"
            return f"a C compiler for {self.arch} Linux (Debian: gcc-{triple}, libc6-dev; or ziglang)"
        return None


def host() -> Machine:
    """This machine's CPU, without an emulator, with the code of its variant: a CPU may lack what its name promises."""
    arch = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return Machine("host", arch, "", variant().mcpu, variant().mattr)


def machine_code(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
    """The LLVM module of scheduled functions."""
    lowered = pipeline.run(KernelModule(mod, target), pipeline.LLVM)
    return tvm.get_global_func("target.build.llvm")(lowered.mod, target)


def link(machine: Machine, functions: Mapping[str, tirx.PrimFunc], folder: Path) -> Path:
    """A static program of the compiled functions and the harness; kernel i of its calls is the i-th function."""
    folder.mkdir(parents=True, exist_ok=True)
    names = first_names(functions)
    mod = tvm.IRModule(
        {name: functions[name].with_attr("global_symbol", name) for name in dict.fromkeys(names.values())}
    )
    kernels, table, program = folder / "kernels.o", folder / "table.c", folder / "program"
    library = machine_code(mod, machine.target())
    library.write_to_file(str(kernels), "o")
    table.write_text(_table(list(names.values())), encoding="utf-8")
    linker = find_linux_linker(machine.arch)
    assert linker is not None, machine.missing()
    include = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    sources = [str(HARNESS), *map(str, machine.sources), str(table), str(kernels)]
    run([*linker.command, "-std=gnu11", "-O1", "-static", "-w", *include, *sources, "-lm", "-o", str(program)])
    return program


def _table(names: Sequence[str]) -> str:
    declared = "".join(
        f"int __tvm_ffi_{n}(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);\n" for n in dict.fromkeys(names)
    )
    listed = "".join(f"  __tvm_ffi_{n},\n" for n in names)
    return (
        f"#include <tvm/ffi/c_api.h>\n{declared}const TVMFFISafeCallType KERNELS[] = {{\n{listed}}};\n"
        f"const int32_t NUM_KERNELS = {len(names)};\n"
    )


def run(command: Sequence[str], given: bytes = b"") -> bytes:
    """Output of a command that must succeed."""
    done = subprocess.run(command, input=given, capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise AssertionError(f"{command[0]} failed ({done.returncode}): {done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout


def encode(kernel: int, args: Sequence[Array | int | float]) -> bytes:
    """One call as the harness reads it."""
    parts = [struct.pack("<ii", kernel, len(args))]
    for arg in args:
        if isinstance(arg, np.ndarray):
            kind = struct.pack("<BBHi", _DLPACK_CODES[arg.dtype.kind], 8 * arg.dtype.itemsize, 1, arg.ndim)
            parts += [struct.pack("<i", 2), kind, struct.pack(f"<{arg.ndim}q", *arg.shape), arg.tobytes()]
        else:
            parts.append(struct.pack("<iq", 0, arg) if isinstance(arg, int) else struct.pack("<id", 1, arg))
    return b"".join(parts)


def decode(reply: io.BytesIO, args: Sequence[Array | int | float]) -> list[Array | int | float] | str | None:
    """The arguments after a call, the message of one that failed, or None where the process ended instead."""
    head = reply.read(4)
    if len(head) < 4:
        return None
    if struct.unpack("<i", head)[0]:
        (length,) = struct.unpack("<i", reply.read(4))
        return reply.read(length).decode(errors="replace")
    after = []
    for arg in args:
        if isinstance(arg, np.ndarray):
            arg = np.frombuffer(reply.read(arg.nbytes), arg.dtype).reshape(arg.shape)
        after.append(arg)
    return after


def replies(machine: Machine, program: Path, kernel: int, calls: Sequence[tuple[Array, ...]]) -> list[list[Any]]:
    """The arguments of each call of the program's kernel of that number, after it."""
    found = io.BytesIO(run(machine.command(program), b"".join(encode(kernel, call) for call in calls)))
    after = [decode(found, call) for call in calls]
    assert all(isinstance(one, list) for one in after), after
    return [one for one in after if isinstance(one, list)]


def failures(machine: Machine, program: Path, symbols: Sequence[str], cases: Sequence[Case]) -> list[str]:
    """One line for each case whose outputs are not what they must be; the cases after a crash are not run.

    `symbols`: the functions in the order in which they were linked.
    """
    calls = [case.call() for case in cases]
    stream = b"".join(encode(symbols.index(case.kernel.symbol), call.args) for case, call in zip(cases, calls))
    done = subprocess.run(machine.command(program), input=stream, capture_output=True, timeout=TIMEOUT_S, check=False)
    reply, bad = io.BytesIO(done.stdout), []
    for case, call in zip(cases, calls):
        after = decode(reply, call.args)
        if after is None:
            bad.append(f"{case.name}: {_how_it_ended(done.returncode)}: {done.stderr.decode(errors='replace')[-500:]}")
            break
        problem = after if isinstance(after, str) else _difference(after, call)
        if problem:
            bad.append(f"{case.name}: {problem}")
    return bad


def _difference(after: Sequence[Array | int | float], call: Call) -> str:
    for index, (expected, bound) in call.expected.items():
        try:
            assert_within(np.asarray(after[index], np.float64), expected, bound, f"argument {index}")
        except AssertionError as error:
            return str(error)
    return ""


def _how_it_ended(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
