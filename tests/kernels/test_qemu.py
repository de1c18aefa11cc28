"""Kernels on other CPUs, under qemu: ARM from the oldest 64-bit core on, x86-64 from its first instruction set on.

Also natively, by the same harness: what reads or writes past its arguments shows here and not in a process with
Python's heap. qemu 7.2 has neither AVX-512 nor AVX-VNNI: their kernels run on a host that has them. Nor has it AMX,
which `amx_emulator.c` adds to a host with the rest of what the kernels need, or the host has itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as T

from mlcpipe.targets import load_target
from tests.kernels.cases import cpu as all_cases
from tests.kernels.cases.cpu.adapters import adapted_cases
from tests.kernels.cases.cpu.alone import Product, assert_rows_are_as_alone
from tests.kernels.cases.cpu.int8 import HERE, Int8ExpertMatmul, Int8Matmul, dot_cases, knobs_of
from tests.kernels.cases.cpu.matmul import MORE, Matmul, whole
from tests.kernels.cases.cpu.page_attention import (
    SHAPES,
    PageKernel,
    Part,
    attend_args,
    batch,
    library_of,
    sequence,
)
from tests.kernels.harness import Call, Case
from tests.kernels.qemu import AMX_EMULATOR, Machine, failures, host, link, replies

# Variant of `targets/cpu.toml` -> the plainest of qemu's CPUs that must run it. qemu 7.2 has none for the others.
CPUS = {
    ("aarch64", "baseline"): "cortex-a53",
    ("aarch64", "dotprod"): "neoverse-n1",
    ("aarch64", "i8mm"): "max",
    ("x86_64", "baseline"): "Opteron_G1",
    ("x86_64", "avx2"): "Haswell",
}
NOT_EMULATED = {("x86_64", "avx512_vnni"), ("x86_64", "avx_vnni"), ("x86_64", "amx_int8")}
# Without kernels of their own: the code of whole models runs (tests/native/test_programs.py).
PROGRAMS = {("riscv64", "v"), ("riscv64", "baseline")}
VARIANTS = {(variant.arch, variant.name): variant for variant in load_target("cpu").variants}


def code_of(arch: str, name: str) -> tuple[str, tuple[str, ...]]:
    """LLVM's words for the code of a variant: `mcpu`, `mattr`."""
    return VARIANTS[arch, name].mcpu, VARIANTS[arch, name].mattr


def machine_of(arch: str, name: str) -> Machine:
    """The CPU for a variant, with the variant's code."""
    return Machine(f"{arch}-{name}", arch, CPUS[arch, name], *code_of(arch, name), 64 if name == "avx2" else 0)


ARM, DOTPROD, I8MM = (machine_of("aarch64", name) for name in ("baseline", "dotprod", "i8mm"))
X86_64, AVX2 = (machine_of("x86_64", name) for name in ("baseline", "avx2"))
NEHALEM = Machine("nehalem", "x86_64", "Nehalem", "nehalem")
SVE = Machine("neoverse-v2", "aarch64", "max", "neoverse-v2")
HOST = host()
AMX = Machine(
    "amx", "x86_64", "", *code_of("x86_64", "amx_int8"), sources=(AMX_EMULATOR,), needs=("avx512vnni",)
)  # fmt: skip

# One of each dtype of pages, softcaps and sinks: other shapes have the same code with other sizes.
CUT = (*SHAPES[:3], SHAPES[13], SHAPES[15])
# Kernels in plain vectors, of which LLVM makes what a CPU has: one library of each kind, attention with pages of each.
PAGES, PAGES_F32, PAGES_Q8 = (library_of(shape) for shape in SHAPES[:3])
PLAIN = ("q4f16_1", "norm", PAGES, PAGES_Q8, "timed-sampling")
PLAIN_MORE = ("q0f16", PAGES_F32)
# Of q4f16_1 all but these shapes; `everything` has all. Others have parts of tiles and groups, too.
FEWER = "q4f16_1, fewer"
LEFT_OUT = ((15, 33), (17, 64), (100, 96))
INT8_SCHEMES, INT8_SHAPES = ("q4f16_1", "q8f16_1", "q8f16_0"), ((33, 600), (17, 640))
# K in whole tiles, and not; a scale for 32, for a row.
AMX_SHAPES = (("q4f16_1", (17, 640)), ("q4f16_1", (33, 128)), ("q8f16_1", (33, 600)), ("q8f16_0", (33, 600)),
              ("q8f16_0", (17, 640)))  # fmt: skip
# More of K than is unpacked at a time, by kernels that few other tests run.
INT8_DEEP = {"neon_i8mm": (("q4f16_1", 48, 1280), ("q8f16_0", 48, 1280))}
# Block formats: minima, tables, three bits, scales of a byte; then negative scales, two planes, and more of each kind.
INT8_KEPT = ("Q4_K", "IQ4_XS", "IQ1_M", "NVFP4")
INT8_KEPT_MORE = ("Q4_0", "Q6_K", "Q8_0", "Q5_0", "Q3_K", "IQ4_NL", "IQ3_XXS", "MXFP4")
INT8_KEPT_SHAPE = (48, 1280)
INT8_GATED = ("q4f16_1", 96, 640, "silu")
INT8_FEW = (("q4f16_1", 33, 600), ("q8f16_0", 17, 640), INT8_GATED)
INT8_EXPERTS = (33, 100, 4, 2, True)

INT8_RUNS = (
    *((machine_of(*key), f"int8-{VARIANTS[key].schedule['int8_dot']}") for key in CPUS if key[1] != "baseline"),
    *((HOST, f"int8-{name}") for _, name in sorted(NOT_EMULATED) if name in HERE and name != "amx_int8"),
)
# AVX-VNNI differs from AVX2, which qemu has, by one instruction: test_other_cpus.py has a model with it. Of the others but
# I8MM some: all that they have in common is run there, or by test_cpu_cases.py on a host.
FEW = ", few"
FEW_INT8_RUNS = tuple(
    (machine, name if machine is I8MM else f"{name}{FEW}")
    for machine, name in INT8_RUNS
    if (machine, name) != (HOST, "int8-avx_vnni")
)
RUNS = (
    *((ARM, name) for name in (FEWER, *PLAIN[1:]) if name != PAGES),  # pages of codes have their code, and more
    (HOST, PAGES),
    *FEW_INT8_RUNS,
    (AMX, "int8-amx_int8"),
)
MORE_RUNS = (
    (ARM, PAGES),
    *((machine, name) for machine in (X86_64, AVX2, HOST, SVE, ARM) for name in (*PLAIN, *PLAIN_MORE)),
    *((machine, "q3f16_1") for machine in (ARM, X86_64, HOST)),
    *((I8MM, name) for name in ("q4f16_1", "norm", PAGES)),
    *INT8_RUNS,
    *((machine, f"{name}{MORE}") for machine, name in INT8_RUNS),
)
# CPUs whose many rows have other kernels than those that test_alone.py runs, or other code.
ALONE = ((DOTPROD, "neon_dotprod"), (I8MM, "neon_i8mm"), (AMX, "amx_int8"), (ARM, "float32"),
         pytest.param(X86_64, "float32", marks=pytest.mark.everything))  # fmt: skip
ALONE_SHAPES = (("q4f16_1", 33, 640), ("q8f16_1", 17, 160), ("q8f16_0", 17, 640))
# Code for a newer CPU on an older one.
TOO_NEW = (
    (ARM, DOTPROD, Int8Matmul("neon_dotprod", "q4f16_1", 15, 33)),
    (NEHALEM, AVX2, Int8Matmul("avx2", "q4f16_1", 15, 33)),
)

pytestmark = pytest.mark.full


@cache
def library(name: str) -> tuple[Case, ...]:
    """The cases of a library; those of dot products that this machine lacks, too, in a few shapes."""
    if name == FEWER:
        return tuple(case for case in library("q4f16_1") if _shape(case) not in LEFT_OUT)
    if not name.startswith("int8-"):
        return tuple(all_cases.library(name))
    kind = name.removeprefix("int8-").removesuffix(MORE).removesuffix(FEW)
    if name.endswith(FEW):
        return _int8_cases(kind, INT8_KEPT[:2], INT8_FEW, {Int8ExpertMatmul(kind, "q4f16_1", *INT8_EXPERTS).symbol})
    if name.endswith(MORE):
        return _int8_cases(kind, INT8_KEPT_MORE)
    shapes = AMX_SHAPES if kind == "amx_int8" else tuple(product(INT8_SCHEMES, INT8_SHAPES))
    matmuls = [(scheme, *shape) for scheme, shape in shapes] + [*INT8_DEEP.get(kind, ()), INT8_GATED]
    experts = {Int8ExpertMatmul(kind, scheme, *INT8_EXPERTS).symbol for scheme in INT8_SCHEMES}
    experts.add(Int8ExpertMatmul(kind, "IQ4_XS", 33, whole("IQ4_XS", 100), *INT8_EXPERTS[2:]).symbol)
    adapted = () if kind == "amx_int8" else adapted_cases(kind)  # of few rows, which have the code of avx512_vnni there
    return (*_int8_cases(kind, INT8_KEPT, matmuls, experts), *adapted)


def _shape(case: Case) -> tuple[int, int] | None:
    """N and K of a product of matrices."""
    return (case.kernel.n, case.kernel.k) if isinstance(case.kernel, Matmul) else None


def _int8_cases(
    kind: str, kept: Iterable[str], matmuls: Iterable[tuple[object, ...]] = (), experts: Iterable[str] = ()
) -> tuple[Case, ...]:
    # Few rows on a CPU with AMX have the code of avx512_vnni, and so have experts.
    amx = kind == "amx_int8"
    chosen = set() if amx else {*experts}
    for one, many in product(
        [*matmuls, *((name, *INT8_KEPT_SHAPE) for name in kept)], (True,) if amx else (False, True)
    ):
        chosen.add(Int8Matmul(kind, *one, many=many).symbol)  # type: ignore[arg-type]
    return tuple(case for case in dot_cases(kind) if case.kernel.symbol in chosen)


@lru_cache(1)
def functions(name: str) -> Mapping[str, tirx.PrimFunc]:
    """The kernels of a library."""
    return build(library(name))


def build(cases: tuple[Case, ...]) -> Mapping[str, tirx.PrimFunc]:
    """The kernels of cases by their symbols."""
    return {symbol: kernel.build() for symbol, kernel in {case.kernel.symbol: case.kernel for case in cases}.items()}


def require(*machines: Machine) -> None:
    """Skip where a machine cannot be emulated."""
    for machine in machines:
        if machine.missing():
            pytest.skip(f"{machine.name} needs {machine.missing()}")


def name_of(value: object) -> str:
    return str(getattr(value, "name", getattr(value, "symbol", value)))


def test_every_variant_is_run_or_said_not_to_be() -> None:
    assert {*CPUS, *NOT_EMULATED, *PROGRAMS} == set(VARIANTS)
    assert not {*CPUS} & NOT_EMULATED


def test_cases_have_the_knobs_of_the_variants() -> None:
    for variant in VARIANTS.values():
        kind = str(variant.schedule["int8_dot"])
        if kind != "none":
            assert knobs_of(kind).items() <= variant.schedule.items(), variant.name


@pytest.mark.parametrize(
    ("machine", "name"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.everything) for run in MORE_RUNS if run not in RUNS)],
    ids=name_of,
)
def test_kernels_are_numpy(machine: Machine, name: str, tmp_path: Path) -> None:
    require(machine)
    assert library(name), name
    program = link(machine, functions(name), tmp_path)
    assert failures(machine, program, list(functions(name)), library(name)) == []


@pytest.mark.parametrize(("machine", "kind"), ALONE, ids=name_of)
def test_a_row_has_the_bits_that_it_has_alone(machine: Machine, kind: str, tmp_path: Path) -> None:
    require(machine)
    kernels: list[Product] = [
        Matmul(*shape, many=many) if kind == "float32" else Int8Matmul(kind, *shape, many=many)
        for shape, many in product(ALONE_SHAPES, (False, True))
    ]
    program = link(machine, {kernel.symbol: kernel.build() for kernel in kernels}, tmp_path)
    for i, kernel in enumerate(kernels):
        assert_rows_are_as_alone(
            kernel, lambda calls, i=i: [after[-1] for after in replies(machine, program, i, calls)]
        )  # type: ignore[misc]


@pytest.mark.parametrize("machine", (ARM, pytest.param(AVX2, marks=pytest.mark.everything), HOST), ids=name_of)
def test_attention_gives_the_same_bits_however_prompts_are_cut(machine: Machine, tmp_path: Path) -> None:
    """Blocks that rows see in part have code of their own: here is whether each compiler rounds as in whole blocks."""
    require(machine)
    kernels = [PageKernel(shape, "attend_many", 40 * (i % 2)) for i, shape in enumerate(CUT)]
    program = link(machine, {kernel.symbol: kernel.build() for kernel in kernels}, tmp_path)
    for i, kernel in enumerate(kernels):
        prompt = sequence(kernel.shape, 150, 0)
        cuts = ((0, 150), (0, 64, 150), (0, 1, 17, 66, 129, 150))
        parts = [Part(prompt, begin, end) for cut in cuts for begin, end in pairwise(cut)]
        calls = [attend_args(kernel.shape, batch(kernel, [part])) for part in parts]
        found = [np.asarray(after[-1]) for after in replies(machine, program, i, calls)]
        np.testing.assert_array_equal(np.concatenate(found[1:3]), found[0], kernel.symbol)
        np.testing.assert_array_equal(np.concatenate(found[3:]), found[0], kernel.symbol)


@pytest.mark.parametrize(("older", "newer", "kernel"), TOO_NEW, ids=name_of)
def test_machines_are_as_old_as_they_claim(older: Machine, newer: Machine, kernel: Int8Matmul, tmp_path: Path) -> None:
    require(older, newer)
    program = link(newer, {kernel.symbol: kernel.build()}, tmp_path)
    cases = [case for case in dot_cases(kernel.kind) if case.kernel == kernel]
    assert failures(newer, program, [kernel.symbol], cases) == []
    assert "SIGILL" in failures(older, program, [kernel.symbol], cases)[0]


@cache  # TVM's parser takes half a second for each
def stray_kernels() -> Mapping[str, tirx.PrimFunc]:
    @T.prim_func(s_tir=True)
    def reads_past(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        m = T.int64()
        X = T.match_buffer(x, (m,), "float32")
        Y = T.match_buffer(y, (m,), "float32")
        Y[0] = X[m]

    @T.prim_func(s_tir=True)
    def writes_past(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        m = T.int64()
        X = T.match_buffer(x, (m,), "float32")
        Y = T.match_buffer(y, (m,), "float32")
        for i in T.serial(m + 1):
            Y[i] = X[0]

    @T.prim_func(s_tir=True)
    def writes_before(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        m = T.int64()
        X = T.match_buffer(x, (m,), "float32")
        Y = T.match_buffer(y, (m,), "float32")
        for i in T.serial(m + 1):
            Y[m - 1 - i] = X[0]

    @T.prim_func(s_tir=True)
    def copies(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        m = T.int64()
        X = T.match_buffer(x, (m,), "float32")
        Y = T.match_buffer(y, (m,), "float32")
        for i in T.serial(m):
            Y[i] = X[i]

    return {"reads_past": reads_past, "writes_past": writes_past, "writes_before": writes_before, "copies": copies}


@pytest.fixture(scope="module")
def strays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(HOST)
    return link(HOST, stray_kernels(), tmp_path_factory.mktemp("strays"))


X = np.ones(16, np.float32)


class Stray:
    """One of `stray_kernels`."""

    def __init__(self, symbol: str) -> None:
        self.symbol = symbol

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return stray_kernels()[self.symbol]


@pytest.mark.parametrize(
    ("symbol", "args", "expected", "complaint"),
    [
        ("copies", (X, X * np.nan), X, None),
        ("copies", (X, X * np.nan), X * 2, "16 of 16 elements"),
        ("copies", (X[:3], X * np.nan), X, "Mismatched Y.shape[0]"),
        ("copies", (X, np.zeros(16)), X, "dtype"),
        ("reads_past", (X, X * np.nan), X, "SIGSEGV"),
        ("writes_past", (X[:3], X[:3]), X[:3], "wrote 12 bytes from the start of argument 1"),
        ("writes_before", (X[:3], X[:3]), X[:3], "wrote -4 bytes from the start of argument 1"),
    ],
)
def test_the_harness_notices(
    symbol: str, args: tuple[np.ndarray, ...], expected: np.ndarray, complaint: str | None, strays: Path
) -> None:
    call = Call(args, {1: (expected.astype(np.float64), 0.0)})
    case = Case(symbol, "strays", Stray(symbol), lambda: call)
    found = failures(HOST, strays, list(stray_kernels()), [case])
    assert (complaint in found[0]) if complaint else found == []
