"""LoRA adapters on a GPU: logits are those of the merged weights, and depend on the request alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")

import mlcpipe
from mlcpipe.errors import TargetError
from mlcpipe.runtime.loading import load_bundle
from tests.gpu.conftest import Gpu
from tests.models import tiny
from tests.models.adapter_batch import CASES, Batch, assert_is_merged, model_of
from tests.models.adapter_files import config, random_pairs, write_adapter
from tests.models.stepping import Steps

NAME = "llama-default"


def compiled(folder: Path, quantization: str, target: str, *, adapters: bool = True) -> Path:
    return mlcpipe.compile(
        tiny.write_tiny(CASES[NAME], folder / f"checkpoint{adapters}"), target=target, quantization=quantization,
        output=folder / f"bundle{adapters}", adapters=adapters,
    )  # fmt: skip


def test_logits_are_those_of_merged_weights(gpu: Gpu, tmp_path: Path) -> None:
    pairs = random_pairs(model_of(NAME), 20, seed=1)
    folder = write_adapter(tmp_path / "adapter", pairs, config(20))
    assert_is_merged(compiled(tmp_path, "q0f32", gpu.plain), NAME, folder, pairs, 2.0)


@pytest.mark.parametrize("quantization", ["q4f16_1", pytest.param("q0f32", marks=pytest.mark.everything)])
def test_beside_other_adapters_as_alone(quantization: str, gpu: Gpu, tmp_path: Path) -> None:
    """Those without an adapter have the bits of a bundle that knows none."""
    batch = Batch(load_bundle(compiled(tmp_path, quantization, gpu.plain)), NAME, tmp_path)
    steps, adapters = batch.steps((2, 0, 1))
    sequences = []
    for index, choice in enumerate(batch.choices):
        sequences.append(batch.submit(steps, adapters, index, choice))
        steps.step()
    steps.run()
    plain = Steps(load_bundle(compiled(tmp_path, quantization, gpu.plain, adapters=False)))
    for index, (sequence, choice) in enumerate(zip(sequences, batch.choices)):
        wanted = batch.alone(index, choice)
        np.testing.assert_array_equal(steps.logits[sequence.id], wanted, f"prompt {index}")
        if choice is None:
            same = plain.submit(batch.prompts[index], len(wanted))
            plain.run()
            np.testing.assert_array_equal(plain.logits[same.id], wanted)


def test_activations_in_float16_are_refused(gpu: Gpu, tmp_path: Path) -> None:
    with pytest.raises(
        TargetError, match=f"no adapters for this target in {gpu.half}; expected activations in float32"
    ):
        compiled(tmp_path, "q4f16_1", gpu.half)
