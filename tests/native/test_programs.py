"""The native runtime as a program: one that loads bundles, and static ones for other machines, run by an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.compiler.link import find_cxx, find_zig
from mlcpipe.compiler.native_runtime import write_program
from tests.conftest import DEMO, Bundles
from tests.native.conftest import private_cache

pytestmark = pytest.mark.full  # compiles TVM's runtime
CPUS = {"aarch64": ("cortex-a53", "neoverse-n1", "max"), "riscv64": ("rv64", "rv64,v=true")}
TARGETS = {"aarch64": "arm64-linux", "riscv64": "riscv64-linux"}


def answer(demo: Engine) -> tuple[list[int], list[int], list[int]]:
    """A prompt, the greedy answer of Python's engine, and the ids that end it."""
    prompt = demo.tokenizer.encode_chat([{"role": "user", "content": "Hello!"}], allow_control_tokens=False)
    demo.reset()
    found = demo.generate(prompt, sampling=SamplingParams(temperature=0.0), max_tokens=64)
    return prompt, found.token_ids, sorted(demo.tokenizer.eos_token_ids)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def generate(program: list[str], bundle: Path, demo: Engine) -> tuple[list[int], list[int]]:
    """Tokens of a program and of Python's engine."""
    prompt, expected, stops = answer(demo)
    words = {"--prompt": prompt, "--stop": stops, "--tokens": [64], "--threads": [2]}
    options = [word for option, ids in words.items() for word in (option, " ".join(map(str, ids)))]
    done = run([*program, "generate", str(bundle), *options])
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()], expected


def test_a_program_loads_a_bundle(demo_bundles: Bundles, demo: Engine, shared: Path, tmp_path: Path) -> None:
    program, bundle = tmp_path / "program", demo_bundles["q4f16_1"]
    write_program(find_cxx(), private_cache(shared), None, program)
    found, expected = generate([str(program)], bundle, demo)
    assert found == expected and len(found) > 5
    assert "it fits" in run([str(program), "doctor", str(bundle)]).stdout
    rates = run([str(program), "bench", str(bundle), "--prompt-tokens", "20", "--tokens", "8"]).stdout.splitlines()
    assert len(rates) == 4 and all("tok/s" in line for line in rates[1:])
    for options, words in [
        (["bench", str(tmp_path)], "mlcpipe.json has changed"),
        (["bench", str(bundle), "--threads", "x"], "--threads; expected a number; found x"),
        (["generate", str(bundle), "--prompt", ""], "token ids; expected one or more"),
        (["other", str(bundle)], "no such command; found other"),
    ]:
        done = run([str(program), *options])
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arch", [pytest.param("aarch64"), pytest.param("riscv64", marks=pytest.mark.everything)])
def test_a_static_program_of_another_machine(arch: str, demo: Engine, shared: Path, tmp_path: Path) -> None:
    """Every level of instructions gives the answer of this machine."""
    if find_zig() is None or shutil.which(f"qemu-{arch}") is None:
        pytest.skip("programs for other machines need ziglang and qemu-user")
    program = tmp_path / "program"
    bundle = mlcpipe.compile(DEMO, target=TARGETS[arch], quantization="q4f16_1", output=tmp_path / "bundle")
    write_program(find_cxx(f"{arch}-linux-musl"), private_cache(shared), bundle / "lib" / "libmodel.a", program)
    for cpu in CPUS[arch]:
        found, expected = generate([f"qemu-{arch}", "-cpu", cpu, str(program)], bundle, demo)
        assert found == expected, cpu
