"""What kernels of models as they are published take of a multiprocessor: registers, spills, shared memory."""

from __future__ import annotations

import pytest

from mlcpipe.compiler.backends import cuda
from mlcpipe.compiler.backends.nvrtc import codegen as build
from mlcpipe.compiler.backends.nvrtc.nvrtc import MachineCode, Nvrtc
from mlcpipe.compiler.backends.nvrtc.resources import Usage
from mlcpipe.targets import load_target, target_names
from tests.models.published import SIZES, generated

ARCHITECTURES = sorted({a for name in target_names() for a in load_target(name).architectures})
SHARED_BYTES = load_target("cuda").limits["max_shared_bytes"]
# Of a thread: 512 of them fit a multiprocessor's 65536. Those that multiply matrices keep sums of a tile: 256 fit.
REGISTERS, REGISTERS_OF_PRODUCTS = 128, 255
# For each architecture a family, with heads of 64, 96, 128 and 256, and experts; `test_everything` has the others.
FEW = dict(zip(("llama", "qwen2", "phi3", "gemma2", "olmo2", "qwen3_moe"), ARCHITECTURES))


def check(code: MachineCode) -> dict[str, str]:
    """All kernels within the limits; PTX by kernel."""
    assert len(code.usage) > 20
    entries = dict(_entry(text) for text in code.ptx.decode().split(".visible .entry ")[1:])
    assert sorted(entries) == [use.kernel for use in code.usage]
    over = [use for use in code.usage if not _within(use, "mma.sync" in entries[use.kernel])]
    assert not over, "\n".join(map(str, over))
    return entries


def _within(use: Usage, product: bool) -> bool:
    registers = REGISTERS_OF_PRODUCTS if product else REGISTERS
    unspilled = use.spill_bytes == use.stack_bytes == 0
    return unspilled and use.registers <= registers and use.shared_bytes <= SHARED_BYTES


def _entry(text: str) -> tuple[str, str]:
    name, _, body = text.partition("(")
    return name, body


@pytest.mark.full_cases("gemma2", "qwen3_moe")
@pytest.mark.parametrize("family", FEW)
def test_kernels_of_a_family(family: str, nvrtc: Nvrtc) -> None:
    """Int4 weights, activations in float16: products on matrix units, and loads of 16 bytes in decode."""
    entries = check(nvrtc.compile(generated(family, "cuda", "q4f16_1", cuda), FEW[family]))
    products = {name for name, body in entries.items() if "mma.sync" in body}
    prefill = {name for name in entries if "attend_many" in name}
    few = {name for name in entries if "matmul_few" in name}
    experts = {name for name in few if "expert" in name}
    assert prefill and few - experts and prefill | few - experts <= products
    assert family != "qwen3_moe" or [name for name in products if "expert" in name]
    assert len(products - prefill) >= (2 if family == "qwen3_moe" else 4), products
    assert all(".v4.u32" in entries[name] or ".v4.b32" in entries[name] for name in few), few


@pytest.mark.everything
@pytest.mark.parametrize(
    "scheme, target", [("q4f16_1", "cuda"), ("q8f16_1", "cuda"), ("q0f16", "cuda"), ("q4f32_1", "cuda-f32")]
)
@pytest.mark.parametrize("family", SIZES)
def test_everything(family: str, scheme: str, target: str, nvrtc: Nvrtc) -> None:
    source = generated(family, target, scheme, cuda)
    for code in build.machine_code(nvrtc, source, ARCHITECTURES):
        check(code)
