"""`mlcpipe compile --target cuda`: a bundle that needs no compiler where it runs, and what is said without the tools."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlcpipe
from mlcpipe.bundle import read_manifest
from mlcpipe.compiler import device_library
from mlcpipe.compiler.backends import find_writer
from mlcpipe.compiler.backends.nvrtc import nvrtc as nvrtc_module
from mlcpipe.compiler.backends.nvrtc.nvrtc import MachineCode, Nvrtc, find_nvrtc
from mlcpipe.compiler.backends.nvrtc.resources import Usage, parse_usage
from mlcpipe.devices import cuda
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.targets import load_target, target_names
from tests.conftest import write_llama

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
# Of the CUDA driver API: cuModuleLoadData knows a fat binary by these bytes (fatbinary_section.h).
FAT_BINARY = bytes.fromhex("50ed55ba")
FAMILY = [name for name in target_names() if load_target(name).tvm["kind"] == "cuda"]


def test_targets_say_what_they_are_for() -> None:
    assert {"cuda", "cuda-f32", "cuda-jetson-orin", *(f"cuda-sm{n}" for n in (75, 80, 86, 89, 90))} <= set(FAMILY)
    for name in FAMILY:
        target = load_target(name)
        assert target.tvm["arch"] == target.architectures[0], name
        assert (target.kernels, target.weight_layout) == ("gpu", load_target("vulkan").weight_layout), name
    assert len({load_target(name).architectures for name in FAMILY}) == len(FAMILY) - 1  # cuda-f32 has those of cuda


def test_machine_code_for_each_architecture_and_ptx_in_one(nvrtc: Nvrtc) -> None:
    codes = [nvrtc.compile(KERNEL, architecture) for architecture in ("sm_75", "sm_90")]
    assert all(code.cubin[:4] == b"\x7fELF" and b".target sm_" in code.ptx for code in codes)
    assert [[use.kernel for use in code.usage] for code in codes] == [["twice"], ["twice"]]
    packed = nvrtc.bundle(codes)
    assert packed[:4] == FAT_BINARY and len(packed) > len(codes[0].cubin)


def test_errors_of_the_compiler_are_one_line(nvrtc: Nvrtc) -> None:
    with pytest.raises(
        CompileError, match=r"NVRTC refuses the kernels in sm_80; found .*identifier \"nonsense\""
    ) as caught:
        nvrtc.compile('extern "C" __global__ void f() { nonsense(); }', "sm_80")
    assert "\n" not in str(caught.value)


def test_without_nvidias_packages_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_module, "_folders", list)
    find_nvrtc.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"NVIDIA's compiler is not installed.*pip install 'mlcpipe\[cuda\]'"):
            find_writer(load_target("cuda"))
    finally:
        find_nvrtc.cache_clear()


def test_usage_is_read_from_the_log() -> None:
    log = """ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for b
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 8 bytes cumulative stack size, 1216 bytes smem, 444 bytes cmem[0]
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 368 bytes cmem[0]
"""
    assert parse_usage(log) == (Usage("a", "sm_80", 8, 0, 0, 0), Usage("b", "sm_80", 48, 16, 12, 1216))
    with pytest.raises(ValueError, match="no resource use of a"):
        parse_usage(log.replace("Used 8", "Took 8"))


def test_a_bundle_carries_a_fat_binary(nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[MachineCode]] = []
    bundled = Nvrtc.bundle

    def keep(self: Nvrtc, codes: list[MachineCode]) -> bytes:
        seen.append(codes)
        return bundled(self, codes)

    monkeypatch.setattr(device_library, "kernel_store", lambda dump: None)
    monkeypatch.setattr(Nvrtc, "bundle", keep)
    bundle = mlcpipe.compile(
        write_llama(tmp_path / "checkpoint"), target="cuda-sm86", quantization="q4f16_1", output=tmp_path / "bundle"
    )
    assert [code.architecture for codes in seen for code in codes] == ["sm_86"]
    assert FAT_BINARY in (bundle / "lib" / "model.so").read_bytes()
    manifest = read_manifest(bundle)
    assert manifest.linker.version.endswith(f"NVRTC {nvrtc.version}")
    assert '"sm_86"' in manifest.target.variants[0].tvm_target


def test_a_gpu_too_old_is_refused() -> None:
    device = cuda.Device(0, "Tesla T4", "7.5", 1 << 34)
    device.check_code({"arch": "sm_75"})
    with pytest.raises(
        TargetError, match=r"made for newer GPUs; expected compute capability 8.0 or more; found Tesla T4"
    ):
        device.check_code({"arch": "sm_80"})


@pytest.mark.parametrize(
    "capability, target",
    [
        ("7.5", "cuda-sm75"), ("8.0", "cuda-sm80"), ("8.6", "cuda-sm86"), ("8.7", "cuda-jetson-orin"), ("8.9", "cuda-sm89"),
        ("9.0", "cuda-sm90"), ("12.0", "cuda-sm90"), ("7.0", "cuda"),
    ],
)  # fmt: skip
def test_a_gpu_has_the_target_of_its_architecture(capability: str, target: str) -> None:
    assert cuda.Device(0, "a GPU", capability, 1 << 34).best_target() == target
