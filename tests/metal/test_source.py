"""`--target metal`: kernels of every family with the types that clang finds right, within a threadgroup's memory."""

from __future__ import annotations

import struct
from operator import gt
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe.compiler.backends import find_writer, metal
from mlcpipe.compiler.backends.metal import kernel_of
from mlcpipe.compiler.link import find_zig
from mlcpipe.compiler.static_library import own_table
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.targets import load_target, target_names
from tests.conftest import write_llama
from tests.metal import msl
from tests.models.published import SIZES, generated

CLANG = msl.find_clang()
needs_clang = pytest.mark.skipif(CLANG is None, reason="no clang is on the path: it checks the types of Metal kernels")
FAMILY = [name for name in target_names() if load_target(name).tvm["kind"] == "metal"]
# With heads of 128 and 256, windows, softcap, and experts; `everything` has the others.
FEW = ("llama", "gemma2", "qwen3_moe")
LIMITS = load_target("metal").limits
# Of all arrays of a thread together: half of the 256 numbers that it can have at once, where Metal takes their indices out.
PRIVATE_BYTES = 512
MACH_O, MACOS, IOS = bytes.fromhex("cffaedfe"), 1, 2
KERNEL = """#include <metal_stdlib>
using namespace metal;
kernel void f(device float* x [[ buffer(0) ]], device half* y [[ buffer(1) ]], uint2 threadIdx [[thread_position_in_threadgroup]]) {{
  threadgroup float kept[4];
  thread float one[1];
  {}
}}
"""

# A sum and its factors, from memory of a threadgroup.
MATRICES = (
    "mlcpipe.matrix_clear(0, 2, 8, 8); mlcpipe.matrix_load(1, 0, 8, 8, (&(kept[0])), 20, 0); "
    "mlcpipe.matrix_load(2, 1, 8, 8, (&(kept[2])), 20, 1);"
)


def _source(family: str, target: str) -> str:
    return generated(family, target, "q4f16_1", metal)


def _check(source: str) -> None:
    assert CLANG is not None
    assert not msl.errors_of(source, CLANG)
    needs = msl.needs(source)
    assert len(needs) > 20
    most = (LIMITS["max_shared_bytes"], LIMITS["max_storage_buffers"], PRIVATE_BYTES)
    over = [n for n in needs if any(map(gt, (n.shared_bytes, n.buffers, n.private_bytes), most))]
    assert not over, over


@needs_clang
@pytest.mark.parametrize("family", FEW)
def test_kernels_of_a_family(family: str) -> None:
    _check(_source(family, "metal"))


@needs_clang
@pytest.mark.everything
@pytest.mark.parametrize("target", FAMILY)
@pytest.mark.parametrize("family", SIZES)
def test_everything(family: str, target: str) -> None:
    _check(_source(family, target))


@needs_clang
@pytest.mark.parametrize(
    "statement, error",
    [
        ("one[0] = x[0] + (float)y[0]; kept[0] = one[0];", ""),
        ("kept[threadIdx.x] = mlcpipe.subgroup_add(x[mlcpipe.subgroup_lane()]);", ""),
        ("device float* other = kept;", "cannot initialize a variable of type"),
        ("thread float* other = x;", "cannot initialize a variable of type"),
        ("x[0] = y;", "assigning to"),
        ("x[0] = unknown(one[0]);", "undeclared identifier 'unknown'"),
        ("x[0] = simd_sum(y);", "no matching function"),
        ("mlcpipe.require_subgroup_size(64);", "a SIMD group has 32 threads"),
        ("x[0] = as_type<float>(y[0]);", "as_type of another size"),
        (MATRICES + "mlcpipe.matrix_multiply(0, 2, 8, 8, 1, 0, 8, 8, 2, 1, 8, 8);", ""),
        (MATRICES + "mlcpipe.matrix_store(0, 2, 8, 8, (&kept[0]), 8);", ""),
        (MATRICES + "mlcpipe.matrix_multiply(0, 2, 8, 8, 1, 0, 8, 8, 3, 1, 8, 8);", "identifier 'mlcpipe_matrix_3'"),
        (MATRICES + "simdgroup_load(mlcpipe_matrix_1, x);", "no matching function"),
        (MATRICES + "simdgroup_load(mlcpipe_matrix_1, one);", "no matching function"),
        (
            MATRICES
            + "simdgroup_multiply_accumulate(mlcpipe_matrix_1, mlcpipe_matrix_1, mlcpipe_matrix_2, mlcpipe_matrix_0);",
            "no matching function",
        ),
        (MATRICES + "mlcpipe_matrix_0 = mlcpipe_matrix_1;", "no viable overloaded '='"),
        ("mlcpipe.matrix_clear(0, 2, 16, 16);", "a matrix of a SIMD group is 8 x 8"),
        ("simdgroup_matrix<int, 8, 8> integers;", "a SIMD group's matrix has half or float"),
    ],
)
def test_the_check_finds_errors(statement: str, error: str) -> None:
    assert CLANG is not None
    found = msl.errors_of(kernel_of(KERNEL.format(statement)), CLANG)
    assert (not found) if not error else any(error in line for line in found), found


def test_needs_are_counted() -> None:
    (found,) = msl.needs(KERNEL.format("threadgroup half more[8];"))
    assert found == msl.Needs("f", 32, 0, 2)
    (other,) = msl.needs(KERNEL.format("thread float4 sums[3];\n  thread half2 pairs[5];"))
    assert other == msl.Needs("f", 16, 68, 2)


def test_other_text_is_refused() -> None:
    with pytest.raises(CompileError, match="TVM generated no Metal kernel; found nonsense"):
        kernel_of("nonsense")


@pytest.mark.parametrize("target", ["metal", "metal-a16"])
def test_without_zig_the_command_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("link", "backends.metal"):
        monkeypatch.setattr(f"mlcpipe.compiler.{module}.find_zig", lambda: None)
    monkeypatch.setattr("mlcpipe.compiler.backends.metal.sys.platform", "linux")
    with pytest.raises(CompileError, match=r"for (macOS|arm64-apple-ios16.0); .*pip install 'mlcpipe\[zig\]'"):
        find_writer(load_target(target))


needs_zig = pytest.mark.skipif(find_zig() is None, reason="ziglang is not installed: it links for macOS")


@needs_zig
def test_a_bundle_carries_the_source(tmp_path: Path) -> None:
    bundle = mlcpipe.compile(
        write_llama(tmp_path / "checkpoint"), target="metal", quantization="q4f16_1", output=tmp_path / "bundle"
    )
    code = (bundle / "lib" / "model.dylib").read_bytes()
    assert code[:4] == MACH_O and b"kernel void take_kernel(" in code
    assert _platforms(code) == [MACOS]


@needs_zig
def test_a_bundle_for_iphones_is_a_static_library(tmp_path: Path) -> None:
    """Objects for iOS with a table of their symbols; the engine of another system refuses them in words."""
    bundle = mlcpipe.compile(
        write_llama(tmp_path / "checkpoint"), target="metal-a16", quantization="q4f16_1", output=tmp_path / "bundle"
    )
    code = (bundle / "lib" / "libmodel.a").read_bytes()
    assert code.startswith(b"!<arch>\n") and b"kernel void take_kernel(" in code
    objects = [MACH_O + part for part in code.split(MACH_O)[1:]]
    assert [_platforms(part) for part in objects] == [[IOS]] * len(objects) and len(objects) > 2
    assert own_table(bundle / "lib" / "libmodel.a") and b"driver_check_sums" in code
    assert b"_TVMFFIEnvModRegisterSystemLibSymbol\0" not in code  # nothing registers itself
    with pytest.raises(TargetError, match=r"made for another system in .*found arm64-apple-ios16.0"):
        mlcpipe.Engine(bundle)


def _platforms(code: bytes) -> list[int]:
    """What the build-version commands of a Mach-O file say (mach-o/loader.h: mach_header_64, build_version_command)."""
    count, at, found = struct.unpack_from("<I", code, 16)[0], 32, []
    for _ in range(count):
        command, size, platform = struct.unpack_from("<3I", code, at)
        found += [platform] if command == 0x32 else []
        at += size
    return found
