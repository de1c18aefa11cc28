"""Layers on a GPU and on the CPU: a limit that the model does not fit in cuts it, and it answers as on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler.automatic import Place
from mlcpipe.compiler.stage_plan import plan_stages, room_of
from mlcpipe.compiler.staged_place import planned
from mlcpipe.loading import prepare_bundle
from mlcpipe.runtime.loading import load_bundle
from tests.conftest import QUICK, TinyLlama, exact_target, write_llama
from tests.gpu.conftest import Gpu
from tests.models.stepping import Alone, Steps

pytestmark = pytest.mark.everything
MODEL = TinyLlama(head_dim=32)  # as test_swap.py has it: its kernels are compiled once
SCHEME, DTYPE = "q0f32", "q8"
PROMPT = [(11 * place) % 250 for place in range(40)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("stages") / "checkpoint", MODEL)


@pytest.fixture(scope="module")
def place(checkpoint: Path, gpu: Gpu) -> Place:
    """A plan within a limit that lacks a byte for both layers."""
    opened, spec = open_checkpoint(checkpoint), gpu.device.spec
    room, cpu = room_of(spec, gpu.plain, None, lambda device: 50.0), room_of("cpu", QUICK, None, lambda device: 10.0)
    (alone,) = plan_stages(opened, [replace(room, memory=spec), cpu], SCHEME, DTYPE).stages
    asked = SimpleNamespace(kv_cache_dtype=DTYPE, context=None, stages=None, device_memory_bytes=alone.nbytes - 1)
    whole = Place(f"{gpu.plain},{QUICK}", devices=(spec, "cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlcpipe.compiler.staged_place.gb_s_of", lambda device: 10.0 if device.on_host else 50.0)
        found = planned(whole, opened, SCHEME, asked, lambda name: f"{name}-{gpu.kind}")
        again = planned(whole, opened, SCHEME, asked, lambda name: f"{name}-{gpu.kind}")
    assert found == again == replace(whole, stages=(1, 1))
    return found


@pytest.fixture(scope="module")
def cut(checkpoint: Path, place: Place) -> Path:
    return mlcpipe.compile(
        checkpoint, target=place.target, stages=place.stages, quantization=SCHEME, kv_cache_dtype=DTYPE,
        output=checkpoint.parent / f"cut-{place.devices[0].partition(':')[0]}",
    )  # fmt: skip


def test_answers_and_what_crosses(checkpoint: Path, cut: Path, place: Place) -> None:
    assert prepare_bundle(cut, ",".join(place.devices), target=place.target) == cut
    target = exact_target(checkpoint.parent)
    one = mlcpipe.compile(
        checkpoint, target=target, quantization=SCHEME, kv_cache_dtype=DTYPE, overwrite=True,
        output=checkpoint.parent / "one",
    )  # fmt: skip
    greedy, found = SamplingParams(temperature=0.0), []
    for bundle, device in ((one, None), (cut, ",".join(place.devices))):
        with Engine(bundle, device=device, context_length=128, threads=1) as engine:
            logits = engine.model.all_logits(PROMPT).copy()
            answer = engine.generate(PROMPT, sampling=greedy, max_tokens=12, ignore_eos=True)
            found.append((logits, answer.token_ids))
            earlier = engine.model.core.executor.earlier
    np.testing.assert_allclose(found[1][0], found[0][0], atol=2e-2)
    assert found[1][1] == found[0][1] and earlier is not None
    assert earlier.transfers.nbytes == 4 * MODEL.hidden_size * earlier.transfers.rows
    assert earlier.transfers.rows == 2 * len(PROMPT) + 11  # all logits, then a prompt and its answer


def test_batches_and_pages_on_the_host(cut: Path) -> None:
    """As alone, bit by bit, where the pages of both stages are copied to the host and back."""
    bundle = load_bundle(cut, 256, 1)
    alone = Alone.of(bundle, (1, 33, 90, 70, 40), 30)
    steps = Steps(bundle, kv_tokens=256, swap_bytes=1 << 24)
    swap = steps.scheduler.admission.swap
    assert swap is not None
    swap.is_cheaper = Mock(return_value=True)  # type: ignore[method-assign]
    alone.check(steps)
    assert swap.tokens_out >= swap.tokens_in > 0 == swap.bytes
