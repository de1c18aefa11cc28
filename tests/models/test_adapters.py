"""LoRA adapters: logits are those of the merged weights, and depend on the request alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.runtime.loading import load_bundle
from tests.conftest import QUICK
from tests.models import tiny
from tests.models.adapter_batch import ANSWER, CASES, Batch, assert_is_merged, model_of
from tests.models.adapter_files import config, random_pairs, write_adapter
from tests.models.stepping import Steps

FAMILIES = (
    "llama-default",
    "qwen2-default",
    "gemma2-softcaps",
    "phi3-longrope",
    "qwen3_moe-default",
    "olmo2-default",
    "lfm2-default",
    "gpt_neox-default",
    "gemma4_text-default",
)
Compile = Callable[..., Path]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """compiled(case id, quantization, adapters=True): the bundle's folder; each is made once."""
    made: dict[tuple[Any, ...], Path] = {}

    def get(name: str, quantization: str, adapters: bool = True) -> Path:
        key, case = (name, quantization, adapters), CASES[name]
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = mlcpipe.compile(
                tiny.write_tiny(case, folder / "checkpoint"), target=QUICK, quantization=quantization,
                kv_cache_dtype="f32" if quantization == "q0f32" else "auto", adapters=adapters,
                output=folder / "bundle", context_length=case.context_length,
            )  # fmt: skip
        return made[key]

    return get


@pytest.mark.fast_cases("llama-default")
@pytest.mark.full_cases("gemma2-softcaps", "qwen3_moe-default", "gpt_neox-default")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_merged_weights(name: str, compiled: Compile, tmp_path: Path) -> None:
    pairs = random_pairs(model_of(name), 8, seed=1)
    folder = write_adapter(tmp_path, pairs, config(8))
    assert_is_merged(compiled(name, "q0f32"), name, folder, pairs, 2.0)


@pytest.mark.parametrize("rank", [1, 16, 40])
def test_ranks_scales_and_modules(rank: int, compiled: Compile, tmp_path: Path) -> None:
    """More than one block; a part of a joined projection; rank-stabilized scales; other ranks and factors by module."""
    model = model_of("llama-default")
    pairs = dict(random_pairs(model, rank, seed=2, projections=("q_proj", "v_proj", "up_proj", "down_proj")))
    other = next(name for name in pairs if name.endswith("1.mlp.down_proj"))
    pairs[other] = random_pairs(model, 3, seed=3)[other]
    scales = {name: 5 / math.sqrt(len(a)) for name, (a, _) in pairs.items()}
    scales[other] = 7 / math.sqrt(3)
    fields = config(rank, lora_alpha=5, use_rslora=True)
    fields |= {"rank_pattern": {"1.mlp.down_proj": 3}, "alpha_pattern": {"1.mlp.down_proj": 7}}
    assert_is_merged(
        compiled("llama-default", "q0f32"), "llama-default", write_adapter(tmp_path, pairs, fields), pairs, scales
    )


@pytest.mark.full
@pytest.mark.full_cases("llama-default-q4f16_1", "qwen3_moe-default-q8f16_1")
@pytest.mark.parametrize("format_", [f"{name}-{q}" for name in ("llama-default", "gemma2-softcaps", "gemma4_text-default", "qwen3_moe-default")
                                     for q in ("q4f16_1", "q0f32", "q8f16_1")])  # fmt: skip
def test_beside_other_adapters_as_alone(format_: str, compiled: Compile, tmp_path: Path) -> None:
    """Bits: prompts in chunks beside each other and beside decode, other blocks, pages that prompts share."""
    name, quantization = format_.rsplit("-", 1)
    batch = Batch(load_bundle(compiled(name, quantization)), name, tmp_path)
    expected = [batch.alone(index, choice) for index, choice in enumerate(batch.choices)]
    for order, stagger in (((0, 1, 2), 0), ((2, 0, 1), 2)):
        steps, adapters = batch.steps(order, kv_tokens=1024)
        sequences = []
        for index, choice in enumerate(batch.choices):
            sequences.append(batch.submit(steps, adapters, index, choice))
            for _ in range(stagger):
                steps.step()
        steps.run()
        for index, (sequence, wanted) in enumerate(zip(sequences, expected)):
            np.testing.assert_array_equal(steps.logits[sequence.id], wanted, f"prompt {index}, order {order}")


@pytest.mark.full
def test_decode_adds_adapters_in_the_kernels_of_4_bit_projections(compiled: Compile) -> None:
    """Four kernels of a llama's layer, of which one has the gate; a prompt's rows have kernels beside them."""
    kernels = load_bundle(compiled("llama-default", "q4f16_1")).manifest.kernels
    fused = [one.rule for one in kernels if one.op == "adapted_matmul"]
    assert len(fused) == 4
    assert set(fused) == {one.rule for one in kernels if one.op == "gated_matmul"}
    assert [one.op for one in kernels].count("add_adapters") == 4


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["q4f16_1", pytest.param("q0f32", marks=pytest.mark.everything)])
def test_without_an_adapter_the_bits_are_those_of_a_bundle_without(
    quantization: str, compiled: Compile, tmp_path: Path
) -> None:
    name = "llama-default"
    batch = Batch(load_bundle(compiled(name, quantization)), name, tmp_path)
    plain = Steps(load_bundle(compiled(name, quantization, adapters=False)))
    wanted = [plain.submit(prompt, ANSWER) for prompt in batch.prompts]
    plain.run()
    steps, adapters = batch.steps()
    found = [batch.submit(steps, adapters, index, None) for index in range(len(batch.prompts))]
    for index in range(3):  # so that each step is one with adapters
        batch.submit(steps, adapters, index, index)
    steps.run()
    for one, other in zip(found, wanted):
        np.testing.assert_array_equal(steps.logits[one.id], plain.logits[other.id])


@pytest.mark.full
def test_pages_are_shared_within_an_adapter_alone(compiled: Compile, tmp_path: Path) -> None:
    batch = Batch(load_bundle(compiled("llama-default", "q4f16_1")), "llama-default", tmp_path)
    steps, adapters = batch.steps()
    cached = []
    for choice in (0, 0, 1, None, None, 1):
        sequence = batch.submit(steps, adapters, 0, choice)
        steps.run()
        cached.append(sequence.cached)
        np.testing.assert_array_equal(steps.logits[sequence.id], batch.alone(0, choice))
    assert cached == [0, 32, 0, 0, 32, 32]
