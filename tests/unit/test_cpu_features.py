"""What the CPU can do, from recorded answers of several machines and systems."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from mlcpipe.host import cpu_features
from mlcpipe.host.cpu_features import LLVM_NAMES, architecture_of, from_cpuinfo, from_hwcap, host_features
from mlcpipe.targets import Target, load_target

# Flags lines of /proc/cpuinfo, without those that have no bearing on code.
V3 = "fpu sse sse2 ssse3 pni fma cx16 sse4_1 sse4_2 movbe popcnt xsave avx f16c lahf_lm abm bmi1 avx2 bmi2"
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
CPUS = {
    "Core 2 (Merom)": ("fpu sse sse2 pni ssse3 cx16 lahf_lm", "baseline"),
    "Xeon E5-2670 (Sandy Bridge)": ("fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt aes xsave avx lahf_lm", "baseline"),
    "Core i7-4770 (Haswell)": (V3, "avx2"),
    "EPYC 7742 (Zen 2)": (f"{V3} aes sse4a clzero rdpid", "avx2"),
    "Xeon Gold 6148 (Skylake)": (V4, "avx2"),
    "Xeon Gold 6248 (Cascade Lake)": (f"{V4} avx512_vnni", "avx512_vnni"),
    "Xeon Platinum 8480+ (Sapphire Rapids)": (
        f"{V4} avx512_bf16 avx512_fp16 avx_vnni avx512_vnni amx_bf16 amx_tile amx_int8", "amx_int8"
    ),
    "Xeon Platinum 8480+ in a VM without tiles": (f"{V4} avx512_bf16 avx_vnni avx512_vnni", "avx512_vnni"),
    "Core i9-12900K (Alder Lake)": (f"{V3} avx_vnni vaes vpclmulqdq gfni", "avx_vnni"),
    "EPYC 9654 (Zen 4)": (f"{V4} avx512ifma avx512_bf16 avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg", "avx512_vnni"),
    "EPYC 9655 (Zen 5) in a VM that masks AVX-512": (f"{V3} avx_vnni hypervisor vaes", "avx_vnni"),
    "EPYC 9655 (Zen 5) in a VM without XSAVE": ("fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt abm lahf_lm", "baseline"),
}  # fmt: skip


@pytest.fixture
def asked_again() -> Iterator[None]:
    """The machine is asked again, in this test and after it."""
    host_features.cache_clear()
    yield
    host_features.cache_clear()


def runs(features: frozenset[str], arch: str) -> str:
    """The first variant of target `cpu` that a machine with these features runs."""
    variants = [v for v in load_target("cpu").variants if v.arch == arch]
    return next(v.name for v in variants if features.issuperset(v.features))


@pytest.mark.parametrize("cpu", CPUS)
def test_linux_on_x86(cpu: str) -> None:
    flags, variant = CPUS[cpu]
    text = "".join(f"processor\t: {i}\nmodel name\t: {cpu}\nflags\t\t: {flags}\nbugs\t\t: none\n\n" for i in range(2))
    features = from_cpuinfo(text)
    assert features == set(flags.split())
    assert runs(features, "x86_64") == variant


def test_processors_that_differ_count_by_what_all_have() -> None:
    assert from_cpuinfo("flags : sse2 avx2 avx512f\nflags : sse2 avx2\n") == {"sse2", "avx2"}
    assert from_cpuinfo("model name : something\n") == frozenset()


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "variant"),
    [
        (0x000000FF, 0x0, "baseline"),  # Cortex-A72, Raspberry Pi 4: fp asimd evtstrm aes pmull sha1 sha2 crc32
        (0x00119FFF & ~(1 << 20), 0x0, "baseline"),  # Cortex-A73 with everything but dot products
        (0x00119FFF, 0x0, "dotprod"),  # Cortex-A76, Raspberry Pi 5: + atomics fphp asimdhp asimdrdm lrcpc asimddp
        (0x3FFFFFFF, (1 << 13) | (1 << 14), "i8mm"),  # Neoverse V1: + i8mm bf16
    ],
)
def test_linux_on_arm(hwcap: int, hwcap2: int, variant: str) -> None:
    assert runs(from_hwcap("aarch64", hwcap, hwcap2), "aarch64") == variant


@pytest.mark.parametrize(
    ("answer", "variant"),
    [
        (lambda *_: 0, "amx_int8"),
        (lambda *_: -1, "avx512_vnni"),  # EINVAL: Linux before 5.16; ENOSPC: a signal stack that is too small
    ],
)
def test_tiles_count_where_the_system_grants_them(
    answer: Callable[..., int], variant: str, asked_again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Libc:
        def syscall(self, *words: int) -> int:
            asked.append(words)
            return answer(*words)

    monkeypatch.setattr(cpu_features, "architecture", lambda: "x86_64")
    monkeypatch.setattr(cpu_features, "_reported", lambda _: f"{V4} avx512_vnni amx_tile amx_int8 amx_bf16".split())
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc())
    assert runs(host_features(), "x86_64") == variant
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), by asm/unistd_64.h and asm/prctl.h
    assert asked == [(158, 0x1023, 18)]


@pytest.mark.skipif(sys.platform != "darwin" or platform.machine() != "arm64", reason="asks a Mac")
def test_sysctl_agrees_with_the_command() -> None:
    done = subprocess.run(["sysctl", "-n", "hw.optional.arm.FEAT_DotProd"], capture_output=True, text=True, check=True)
    assert cpu_features._sysctl("hw.optional.arm.FEAT_DotProd") == int(done.stdout)
    assert cpu_features._sysctl("hw.optional.arm.FEAT_OfNoKind") == 0


@pytest.mark.parametrize("system", ["win32", "plan9"])
def test_a_system_that_is_not_asked_gets_the_base(
    system: str, asked_again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert host_features() == frozenset()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc or getauxval")
@pytest.mark.parametrize("error", [OSError("no /proc"), AttributeError("no getauxval")])
def test_a_question_that_fails_gets_the_base(
    error: Exception, asked_again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(cpu_features.Path, "read_text", fails)
    monkeypatch.setattr(ctypes, "CDLL", fails)
    assert host_features() == frozenset()


@pytest.mark.parametrize(
    ("triple", "arch"),
    [
        ("x86_64-conda-linux-gnu", "x86_64"),
        ("amd64-pc-windows-msvc", "x86_64"),
        ("arm64-apple-macos", "aarch64"),
        ("aarch64-linux-gnu", "aarch64"),
        ("riscv64-unknown-linux-gnu", "riscv64"),
    ],
)
def test_architecture_of_a_triple(triple: str, arch: str) -> None:
    assert architecture_of(triple) == arch


def test_every_architecture_has_a_variant_without_needs() -> None:
    target: Target = load_target("cpu")
    for arch in LLVM_NAMES:
        *better, least = [v for v in target.variants if v.arch == arch]
        assert least.features == () and all(v.features for v in better)
        # Nobody is passed over by a variant that needs less and stands before a better one.
        assert not any(set(a.features) < set(b.features) for i, a in enumerate(better) for b in better[i + 1 :])
