"""What kernels of models as they are published take of a multiprocessor: registers, spills, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlcpipe.compiler.cuda import build
from mlcpipe.compiler.cuda.nvrtc import Nvrtc
from mlcpipe.compiler.cuda.resources import Usage
from mlcpipe.compiler.export import export, prefill_chunk, prepare_model
from mlcpipe.compiler.library import CudaLibrary
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
SHARED_BYTES = 48 << 10  # of a block, without asking the driver for more
REGISTERS = 128  # of a thread: 16 warps of 32 fit a multiprocessor's 65536


def generated(family: str, target_name: str, scheme: str) -> str:
    """The CUDA C++ of a model's kernels."""
    target, quantization = load_target(target_name), load_scheme(scheme)
    layers = 2 if family.startswith("gemma") else 1
    sizes = {"head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096, **SIZES[family]}
    model = prepare_model(small_configs.config(family, num_hidden_layers=layers, **sizes), target, quantization)
    chunk = prefill_chunk(model.facts, target, 4096)
    scheduled, _ = pipeline.run(export(model, target, quantization, chunk))
    return CudaLibrary(Linker("none", "", ()), lambda _: ()).source(scheduled)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The code of each family, int4 weights and activations in float16."""
    return {family: generated(family, "cuda", "q4f16_1") for family in SIZES}


def check(usage: tuple[Usage, ...]) -> None:
    """All kernels within the limits."""
    assert len(usage) > 20
    over = [
        use
        for use in usage
        if use.spill_bytes or use.stack_bytes or use.registers > REGISTERS or use.shared_bytes > SHARED_BYTES
    ]
    assert not over, "\n".join(map(str, over))


def test_every_family_of_the_package_is_here() -> None:
    assert sorted(SIZES) == sorted(small_configs.FAMILIES)


@pytest.mark.parametrize("number, family", enumerate(SIZES))
def test_kernels_of_a_family(number: int, family: str, sources: dict[str, str], nvrtc: Nvrtc) -> None:
    """On one architecture each, in turns; all of them on all are in `test_everything`."""
    check(nvrtc.compile(sources[family], ARCHITECTURES[number % len(ARCHITECTURES)]).usage)


@pytest.mark.everything
@pytest.mark.parametrize("scheme, target", [("q4f16_1", "cuda"), ("q8f16_1", "cuda"), ("q0f16", "cuda"), ("q4f32_1", "cuda-f32")])
@pytest.mark.parametrize("family", SIZES)
def test_everything(family: str, scheme: str, target: str, nvrtc: Nvrtc) -> None:
    source = generated(family, target, scheme)
    for code in build.machine_code(nvrtc, source, ARCHITECTURES):
        check(code.usage)
