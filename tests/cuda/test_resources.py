"""What kernels of models as they are published take of a multiprocessor: registers, spills, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlcpipe.compiler.cuda import build
from mlcpipe.compiler.cuda.nvrtc import MachineCode, Nvrtc
from mlcpipe.compiler.cuda.resources import Usage
from mlcpipe.compiler.export import export, prefill_chunk, prepare_model
from mlcpipe.compiler.library import CudaLibrary, DeviceLibrary
from mlcpipe.compiler.link import Linker
from mlcpipe.passes import pipeline
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target, target_names
from tests.models import small_configs

ARCHITECTURES = sorted({a for name in target_names() for a in load_target(name).architectures})
# Of each family a model that people run, one layer of it (of gemma two: with and without a window).
SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "head_dim": 64},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8},
    "phi3": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 96},
    "gemma2": {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"hidden_size": 1152, "intermediate_size": 6912, "num_key_value_heads": 1, "head_dim": 256},
    "olmo2": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16},
    "mixtral": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8},
    "qwen3_moe": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8},
}  # fmt: skip
CUDA = CudaLibrary(Linker("none", "", ()), lambda _: ())
SHARED_BYTES = 48 << 10  # of a block, without asking the driver for more
# Of a thread: 512 of them fit a multiprocessor's 65536. Those that multiply matrices keep sums of a tile: 256 fit.
REGISTERS, REGISTERS_OF_PRODUCTS = 128, 255
# For each architecture a family, with heads of 64, 96, 128 and 256, and experts; `test_everything` has the others.
FEW = dict(zip(("llama", "qwen2", "phi3", "gemma2", "olmo2", "qwen3_moe"), ARCHITECTURES))


def generated(family: str, target_name: str, scheme: str, library: DeviceLibrary = CUDA) -> str:
    """The code of a model's kernels."""
    target, quantization = load_target(target_name), load_scheme(scheme)
    layers = 2 if family.startswith("gemma") else 1
    sizes = {"head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096, **SIZES[family]}
    model = prepare_model(small_configs.config(family, num_hidden_layers=layers, **sizes), target, quantization)
    chunk = prefill_chunk(model.facts, target, 4096)
    scheduled, _ = pipeline.run(export(model, target, quantization, chunk))
    return library.source(scheduled)


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


def test_every_family_of_the_package_is_here() -> None:
    assert sorted(SIZES) == sorted(small_configs.FAMILIES)


@pytest.mark.parametrize("family", FEW)
def test_kernels_of_a_family(family: str, nvrtc: Nvrtc) -> None:
    """Int4 weights, activations in float16: products on matrix units in prefill, loads of 16 bytes in decode."""
    entries = check(nvrtc.compile(generated(family, "cuda", "q4f16_1"), FEW[family]))
    products = [name for name, body in entries.items() if "mma.sync" in body]
    prefill = [name for name in entries if "prefill" in name]
    assert len(prefill) >= 2 and set(prefill) <= set(products)
    products = [name for name in products if name not in prefill]
    assert family != "qwen3_moe" or [name for name in products if "expert" in name]
    assert len(products) >= (2 if family == "qwen3_moe" else 4), products
    decode = [name[: name.rindex("kernel") + 6] for name in products]  # of the same function: one row of x
    assert all(".v4.u32" in entries[name] or ".v4.b32" in entries[name] for name in decode), decode


@pytest.mark.everything
@pytest.mark.parametrize("scheme, target", [("q4f16_1", "cuda"), ("q8f16_1", "cuda"), ("q0f16", "cuda"), ("q4f32_1", "cuda-f32")])
@pytest.mark.parametrize("family", SIZES)
def test_everything(family: str, scheme: str, target: str, nvrtc: Nvrtc) -> None:
    source = generated(family, target, scheme)
    for code in build.machine_code(nvrtc, source, ARCHITECTURES):
        check(code)
