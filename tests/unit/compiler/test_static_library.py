"""Bundles for boards: a shared and a static library of the same code, made on any machine."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe.bundle import read_manifest
from mlcpipe.compiler.link import find_zig
from mlcpipe.compiler.static_library import TABLE, table_source
from mlcpipe.errors import TargetError
from mlcpipe.host import cpu_features
from tests.conftest import Bundles

# Target -> (ELF's machine and flags: of RISC-V compressed instructions and doubles in registers, program to run it)
BOARDS = {
    "arm64-linux": (183, 0, "qemu-aarch64"),
    "riscv64-linux": (243, 5, "qemu-riscv64"),
    "x86_64-linux": (62, 0, ""),
}
# Prints the names in the table that have an address, and fails where they are not in order.
PROGRAM = f"""
#include <stdio.h>
#include <string.h>
extern const struct {{ const char* name; void* address; }} {TABLE}[];
int main(void) {{
  for (int i = 0; {TABLE}[i].name; i++) {{
    if (i && strcmp({TABLE}[i - 1].name, {TABLE}[i].name) >= 0) return 1;
    if ({TABLE}[i].address) puts({TABLE}[i].name);
  }}
  return 0;
}}
"""


def test_the_table_is_in_order_and_ends() -> None:
    lines = table_source(["__tvm_ffi_matmul", "__tvm_ffi_mlcpipe_avx2_matmul"], "one_").splitlines()
    names = [line.split('"')[1] for line in lines if line.startswith('  {"')]
    assert names == sorted(names) and {"__tvm_ffi_matmul", "__tvm_ffi_mlcpipe_avx2_matmul"} < set(names)
    assert lines[-5:-2] == ["  {0, 0},", "};", "#if !defined(__APPLE__)"]
    assert f"{TABLE}[{len(names) + 1}] __attribute__((weak, al" in lines[-2]
    assert "extern char one___tvm_ffi_matmul[];" in lines


@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.everything  # tests/native/test_sdk.py links such libraries
def test_a_bundle_for_a_board(name: str, tiny_bundles: Bundles, tmp_path: Path) -> None:
    if find_zig() is None:
        pytest.skip("libraries for boards need ziglang")
    bundle = mlcpipe.compile(tiny_bundles.checkpoint, target=name, quantization="q4f16_1", output=tmp_path / "bundle")
    manifest, (machine, flags, runner) = read_manifest(bundle), BOARDS[name]
    assert {"lib/model.so", "lib/libmodel.a"} < set(manifest.files)
    header = (bundle / "lib" / "model.so").read_bytes()[:52]
    assert header[:5] == b"\x7fELF\x02" and struct.unpack_from("<H", header, 18)[0] == machine
    assert struct.unpack_from("<I", header, 48)[0] == flags
    arch = cpu_features.architecture_of(manifest.target.triple)
    if arch == cpu_features.architecture():
        assert len(mlcpipe.Engine(bundle).generate([1, 5, 9], max_tokens=4, ignore_eos=True).token_ids) == 4
    else:
        with pytest.raises(TargetError, match="made for another system"):
            mlcpipe.Engine(bundle)
    if runner and shutil.which(runner) is None:
        pytest.skip(f"{runner} runs programs for the board (qemu-user)")
    symbols = linked_symbols(arch, bundle / "lib" / "libmodel.a", runner, tmp_path)
    assert "__tvm_ffi__library_bin" in symbols and "__TVMBackendParallelLaunch" in symbols
    prefixes = ["", *(f"mlcpipe_{variant.name}_" for variant in manifest.target.variants[:-1])]
    assert all(f"__tvm_ffi_{prefix}sample_kernel" in symbols for prefix in prefixes), symbols


def linked_symbols(arch: str, library: Path, runner: str, folder: Path) -> list[str]:
    """Names in the table of a static library that is linked into a static program."""
    zig, source, program = find_zig(), folder / "main.c", folder / "main"
    assert zig is not None
    source.write_text(PROGRAM)
    options = [
        "-target",
        f"{arch}-linux-musl",
        "-static",
        "-Wl,--whole-archive",
        str(library),
        "-Wl,--no-whole-archive",
    ]
    subprocess.run([*zig.command, str(source), *options, "-lm", "-o", str(program)], check=True)
    done = subprocess.run([*filter(None, [runner]), str(program)], capture_output=True, text=True, check=True)
    return done.stdout.split()
