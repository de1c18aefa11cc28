"""Tile instructions on any x86-64: `amx_emulator.c` against numpy, and what it must not let pass."""

from __future__ import annotations

import struct
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as I

import mlcpipe
from mlcpipe.compiler.link import find_linux_linker
from mlcpipe.targets import host_instruction_sets, load_target
from tests.conftest import EXACT, Bundles
from tests.kernels.harness import Array, Call, Case
from tests.kernels.qemu import AMX_EMULATOR, Machine, failures, link, run
from tir_schedules.builder import Buffer, Tensor, function
from tir_schedules.cpu import amx

AMX = Machine("amx", "x86_64", "", "x86-64", ("+amx-tile", "+amx-int8", "+amx-bf16"), sources=(AMX_EMULATOR,))

HAS_TILES = Path("/proc/cpuinfo").exists() and "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")

pytestmark = [pytest.mark.full, pytest.mark.skipif(AMX.missing() is not None, reason=f"needs {AMX.missing()}")]


@cache
def product(kind: str, kept: bool = False) -> tirx.PrimFunc:
    """c += a b, tiles 0, 1 and 2 as `config` has them, in memory rows of 64 bytes; `kept`: without tilerelease."""
    dtype = "float32" if kind == "bf16" else "int32"
    memory = {"config": "uint8", "a": "uint8", "b": "uint8", "c": dtype}

    def body(config: Buffer, a: Buffer, b: Buffer, c: Buffer) -> None:
        amx.load_configuration(config)
        for tile, where in enumerate((c, a, b)):
            amx.load(tile, where[0], 64)
        amx.multiply(kind, 0, 1, 2)
        amx.store(0, c[0], 64)
        if not kept:
            amx.release()

    sizes = {"uint8": 1024, "int32": 256, "float32": 256}
    tensors = {name: Tensor((64 if name == "config" else sizes[dtype],), dtype) for name, dtype in memory.items()}
    return function(f"product_{kind}", tensors, body)


class Product:
    """A kernel of one product."""

    def __init__(self, kind: str, kept: bool = False) -> None:
        self.kind, self.kept = kind, kept

    @property
    def symbol(self) -> str:
        return f"product_{self.kind}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return product(self.kind, self.kept)


def config(shapes: list[tuple[int, int]], palette: int = 1, start_row: int = 0) -> Array:
    """The operand of ldtilecfg for tiles of (rows, bytes of a row)."""
    rows, widths = zip(*shapes, *[(0, 0)] * (8 - len(shapes)))
    return np.frombuffer(struct.pack("<BB14x8H16x8B8x", palette, start_row, *widths, *rows), np.uint8)


def bfloat16(x: Array) -> Array:
    """uint16 of float32 numbers, cut off."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def expected(kind: str, a: Array, b: Array, c: Array, m: int, k: int, n: int) -> tuple[Array, float]:
    """What a product of tiles m x 4k bytes by 4k bytes x n leaves in memory of 16 x 16, and a bound of the error."""
    after = c.astype(np.float64).reshape(16, 16)
    if kind == "bf16":
        first, second = ((x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (a, b))
        first, second = first.reshape(16, 32).astype(np.float64), second.reshape(16, 16, 2).astype(np.float64)
        after[:m, :n] += np.einsum("mki,kni->mn", first.reshape(16, 16, 2)[:m, :k], second[:k, :n])
        return after.ravel(), 1e-4
    first, second = (x.view(np.int8 if sign == "s" else np.uint8).astype(np.int64) for x, sign in zip((a, b), kind))
    sums = np.einsum("mki,kni->mn", first.reshape(16, 16, 4)[:m, :k], second.reshape(16, 16, 4)[:k, :n])
    exact = c.astype(np.int64).reshape(16, 16)[:m, :n] + sums
    after[:m, :n] = exact.astype(np.uint32).view(np.int32)  # modulo 2**32
    return after.ravel(), 0.0


def call(kind: str, m: int, k: int, n: int) -> Call:
    """Random bytes, sums near the ends of int32."""
    rng = np.random.default_rng([m, k, n])
    a, b = (rng.integers(0, 256, 1024).astype(np.uint8) for _ in range(2))
    c: Array = rng.integers(-(2**31), 2**31, 256).astype(np.int32)
    if kind == "bf16":
        a, b = (bfloat16(rng.standard_normal(512)).view(np.uint8) for _ in range(2))
        c = rng.standard_normal(256).astype(np.float32)
    tiles = config([(m, 4 * n), (m, 4 * k), (k, 4 * n)])
    return Call((tiles, a, b, c), {3: expected(kind, a, b, c, m, k, n)})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link(AMX, {f"product_{kind}": product(kind) for kind in amx.PRODUCTS}, tmp_path_factory.mktemp("amx"))


SYMBOLS = [f"product_{kind}" for kind in amx.PRODUCTS]


def test_products_are_those_of_numpy(program: Path) -> None:
    cases = [
        Case(f"{kind} {shape}", "amx", Product(kind), lambda kind=kind, shape=shape: call(kind, *shape))  # type: ignore[misc]
        for kind in amx.PRODUCTS
        for shape in ((16, 16, 16), (16, 8, 16), (5, 3, 7), (1, 1, 1))
    ]
    assert failures(AMX, program, SYMBOLS, cases) == []


@pytest.mark.parametrize(
    ("tiles", "complaint"),
    [
        (config([(16, 64), (16, 64)]), "a tile that is not configured"),
        (config([(16, 64)] * 3, palette=0), "no tiles are configured"),
        (config([(16, 64)] * 3, palette=2), "a palette above 1"),
        (config([(17, 64), (17, 64), (16, 64)]), "above 16 rows of 64 bytes"),
        (config([(16, 64), (16, 0), (16, 64)]), "rows and no columns"),
        (config([(16, 64), (8, 64), (16, 64)]), "rows of the sum and of the first factor"),
        (config([(16, 64), (16, 32), (16, 64)]), "columns of one factor, rows of the other"),
        (config([(16, 32), (16, 64), (16, 64)]), "columns of the sum and of the second factor"),
        (np.full(64, 1, np.uint8), "reserved bytes"),
    ],
)  # fmt: skip
def test_what_a_cpu_refuses_ends_the_process(tiles: Array, complaint: str, program: Path) -> None:
    args: tuple[Any, ...] = (tiles, *(np.zeros(1024, np.uint8) for _ in range(2)), np.zeros(256, np.int32))
    case = Case("bad", "amx", Product("ss"), lambda: Call(args, {}))
    (found,) = failures(AMX, program, SYMBOLS, [case])
    if HAS_TILES:
        assert "SIGSEGV" in found or "SIGILL" in found
    else:
        assert "SIGABRT" in found and complaint in found


@pytest.mark.skipif(HAS_TILES, reason="needs a CPU without AMX: one that has it tells nothing of tiles that are kept")
def test_tiles_that_are_kept_show(tmp_path: Path) -> None:
    kept = Product("uu", kept=True)
    found = failures(AMX, link(AMX, {kept.symbol: kept.build()}, tmp_path), [kept.symbol],
                     [Case("kept", "amx", kept, lambda: call("uu", 4, 4, 4))])  # fmt: skip
    assert ["tiles were not released" in line for line in found] == [True]


def test_other_illegal_instructions_stay_so(tmp_path: Path) -> None:
    def body(a: Buffer) -> None:
        I.evaluate(I.call_llvm_intrin(I.llvm_lookup_intrinsic_id("llvm.trap"), dtype="void"))

    trap = function("product_trap", {"a": Tensor((1,), "int32")}, body)
    case = Case("trap", "amx", Product("trap"), lambda: Call((np.zeros(1, np.int32),), {}))
    assert "SIGILL" in failures(AMX, link(AMX, {"product_trap": trap}, tmp_path), ["product_trap"], [case])[0]


ENGINE = """
import ctypes, sys
import numpy as np
from mlcpipe import Engine
from mlcpipe.host import cpu_features
emulator, bundle, floats = sys.argv[1:]
emulator = ctypes.CDLL(emulator)
cpu_features.host_features = lambda has=cpu_features.host_features(): has | {"amx_tile", "amx_bf16"}
engine = Engine(bundle, threads=2)
assert engine.variant == "amx_int8", engine.variant
tokens = (np.arange(49) * 37 % engine.vocab_size).tolist()
engine.logits_stepwise(tokens[:1], prefill_tokens=1)
one = emulator.amx_emulated()  # of a prompt of one token
few = engine.logits_stepwise(tokens, prefill_tokens=1)
without = emulator.amx_emulated() - 2 * one
many = engine.logits_stepwise(tokens, prefill_tokens=48)
exact = Engine(floats, threads=2).logits_stepwise(tokens, prefill_tokens=48)
error = [np.sqrt(np.square(row - exact[0]).mean()) for row in (many[0], few[-2])]
print(without, emulator.amx_emulated(), *error, np.abs(exact).max())
"""


def test_the_engine_runs_tiles_on_its_threads(tiny_bundles: Bundles, tmp_path: Path) -> None:
    """Decode steps go without tiles; a prompt goes through them, and comes closer to float32 than decode in int8."""
    if lacking := {"avx512vnni"} - host_instruction_sets():
        pytest.skip(f"needs {' '.join(lacking)}")
    board, bundle, emulator = (tmp_path / name for name in ("board.toml", "bundle", "emulator.so"))
    exact = tmp_path / "exact.toml"
    exact.write_text(EXACT, encoding="utf-8")
    (variant,) = (v for v in load_target("cpu").variants if v.name == "amx_int8")
    code = f'mcpu = "{variant.mcpu}"\nmattr = {list(variant.mattr)}\n'
    board.write_text(f'base = "cpu"\n[tvm]\n{code}', encoding="utf-8")
    mlcpipe.compile(tiny_bundles.checkpoint, target=str(board), quantization="q8f16_1", output=bundle)
    floats = mlcpipe.compile(
        tiny_bundles.checkpoint, target=str(exact), quantization="q8f16_1", output=tmp_path / "floats"
    )
    linker = find_linux_linker("x86_64")
    assert linker is not None
    run([*linker.command, "-std=gnu11", "-O1", "-shared", "-fPIC", "-w", str(AMX_EMULATOR), "-lm", "-o", str(emulator)])
    words = run([sys.executable, "-c", ENGINE, str(emulator), str(bundle), str(floats)]).split()
    without, emulated, prompt, decode, size = map(float, words)
    assert size > 0.1 and 0 < prompt < decode < 0.1 * size
    assert without == 0 and (emulated > 100) != HAS_TILES
