"""Experts of some layers on a device of their own, on CPUs: the bits of one device, whatever runs together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle.stages import Experts
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.cli import main
from mlcpipe.compiler.stage_plan import Room, plan_stages
from mlcpipe.errors import BundleError, MlcpipeError
from mlcpipe.runtime.loading import load_bundle
from tests.conftest import QUICK, write_llama
from tests.models import tiny
from tests.models.edits import edit
from tests.models.stepping import Alone, Steps

pytestmark = pytest.mark.full
GREEDY = SamplingParams(temperature=0.0)
# Shared experts with a gate, and a first layer without a mixture.
CASE = next(case for case in tiny.tiny_checkpoints()["qwen2_moe"] if case.id == "qwen2_moe-default")
PROMPT = tiny.prompt_tokens(CASE, 40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(CASE, tmp_path_factory.mktemp("experts") / "checkpoint")


def compiled(checkpoint: Path, name: str, **options: Any) -> Path:
    return mlcpipe.compile(
        checkpoint, target=QUICK, quantization="q4f16_1", output=checkpoint.parent / name,
        context_length=256, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Path:
    return compiled(checkpoint, "whole")


@pytest.fixture(scope="module")
def apart(checkpoint: Path) -> Path:
    """Two stages of layers, and experts of layers of both."""
    return compiled(checkpoint, "apart", stages=[2, 1, Experts(2)])


def test_logits_and_what_crosses(whole: Path, apart: Path) -> None:
    with Engine(whole, threads=1) as one, Engine(apart, threads=1) as two:
        assert two.manifest.stages == ("layers-0-1", "layers-2-2", "experts-1-2")
        assert (two.device, two.manifest.states) == ("CPU, then CPU, experts on CPU", one.manifest.states)
        expected = one.model.all_logits(PROMPT).copy()
        np.testing.assert_array_equal(two.model.all_logits(PROMPT), expected)
        answers = [
            engine.generate(PROMPT, max_tokens=9, sampling=GREEDY, ignore_eos=True).token_ids for engine in (one, two)
        ]
        assert answers[0] == answers[1]
        config, experts = tiny.tiny_config(CASE), two.model.core.executor.experts
        rows = 2 * (2 * len(PROMPT) + 8)  # of two layers: all logits, then a prompt and its answer
        assert experts is not None
        assert experts.transfers.rows == rows
        assert experts.transfers.nbytes == 8 * rows * (config.hidden_size + config.num_experts_per_tok)


def test_batches_prefixes_and_preemption(whole: Path, apart: Path) -> None:
    alone = Alone.of(load_bundle(whole, 256, 1), (1, 33, 90, 70, 40, 17), 30)
    steps = Steps(load_bundle(apart, 256, 1), kv_tokens=256)
    alone.check(steps, stagger=2)
    assert steps.scheduler.totals.preemptions > 0


def test_a_chat_moves(whole: Path, apart: Path, tmp_path: Path) -> None:
    with Engine(whole, threads=1) as one, Engine(apart, threads=1) as two:
        begun = PROMPT + one.generate(PROMPT, max_tokens=5, sampling=GREEDY, ignore_eos=True).token_ids
        one.save(tmp_path / "chat")
        two.load(tmp_path / "chat")
        found = [
            engine.generate([*begun, 1, 2], max_tokens=5, sampling=GREEDY, ignore_eos=True) for engine in (one, two)
        ]
        assert found[0].token_ids == found[1].token_ids
        assert found[1].stats is not None and found[1].stats.cached_tokens == len(begun) - 1


@pytest.mark.parametrize(
    ("folder", "change", "words"),
    [
        ("", lambda whole: whole["stages"].pop(), "expected experts that its stages call, in the last part"),
        ("", lambda whole: whole["stages"].reverse(), "expected experts that its stages call, in the last part"),
        ("layers-0-1", lambda part: part["model"]["stage"].update(calls=False), "differ in stage"),
        (
            "experts-1-2",
            lambda part: part["model"]["stage"].update(alone=False),
            "expected experts that its stages call",
        ),
        ("experts-1-2", lambda part: part["model"]["stage"].update(end=2), "expected experts of layers up to 3"),
        ("experts-1-2", lambda part: part["model"]["stage"].update(begin=2), "differ in stage"),
    ],
)
def test_hand_edited_manifests(
    apart: Path, tmp_path: Path, folder: str, change: Callable[[Any], object], words: str
) -> None:
    bundle = Path(shutil.copytree(apart, tmp_path / "copy"))
    edit(bundle, change, folder)
    with pytest.raises(BundleError) as raised:
        load_bundle(bundle, 256, 1)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_plan_and_its_table(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card lacks a byte for all experts: those of the last layer go to the processor, with their bytes."""
    opened = open_checkpoint(checkpoint)
    card, cpu = (Room(name, name, "cpu-native", 1 << 40, name, gb_s) for name, gb_s in (("card", 100.0), ("cpu", 10.0)))
    (alone,) = plan_stages(opened, [card, cpu], "q0f32", "f32", 64).stages
    tight = replace(card, free=alone.nbytes - 1)
    found = plan_stages(opened, [tight, cpu], "q0f32", "f32", 64)
    config = tiny.tiny_config(CASE)
    matrices = 3 * config.num_experts * config.hidden_size * config.moe_intermediate_size
    home, experts = found.stages
    assert found.counts == (3, 1) and str(found.counts[1]) == "1e"
    assert (experts.layers, experts.cost.weights, experts.cost.states) == (range(2, 3), 4 * matrices, 0)
    assert experts.cost.read == 4 * matrices * config.num_experts_per_tok // config.num_experts
    assert home.cost == alone.cost - experts.cost
    monkeypatch.setattr("mlcpipe.compiler.stage_plan.host_gb_s", lambda: 40.0)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(checkpoint), "--devices", "cpu,cpu", "--stages", "3,2e", "--context", "64"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "experts of 1 to 2" in shown and "to the experts of each layer, and back" in shown
    assert "--target cpu-native,cpu-native --stages 3,2e" in shown


def test_what_has_no_experts(tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "checkpoint")
    layers = open_checkpoint(plain).config["num_hidden_layers"]
    for stages, words in (
        ([layers, Experts(1)], "expected layers with one mixture each; found no experts"),
        ([layers, Experts(layers + 1)], f"expected experts of at most {layers} layers; found {layers + 1}e"),
        ([Experts(1), layers], f"expected numbers that add up to the model's {layers} layers; found 1e,{layers}"),
    ):
        with pytest.raises(MlcpipeError, match=words):
            mlcpipe.compile(plain, target="cpu", output=tmp_path / "bundle", stages=stages)
