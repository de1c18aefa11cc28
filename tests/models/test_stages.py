"""A model cut into stages, on CPUs: the bits of one device, whatever runs together; parts that do not fit are refused."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle import read_manifest
from mlcpipe.cli import main
from mlcpipe.errors import BundleError, ComputeError, MlcpipeError, UsageError
from mlcpipe.loading import prepare_bundle
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.stages import EarlierStages
from tests.conftest import HYBRID, QUICK, WINDOWS, CutModel
from tests.models.edits import edit
from tests.models.stepping import Alone, Steps

pytestmark = pytest.mark.full
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(7 * place) % 250 for place in range(59)]


@pytest.fixture(scope="module")
def checkpoint(cut_model: CutModel) -> Path:
    return cut_model.checkpoint


@pytest.fixture(scope="module")
def whole(cut_model: CutModel) -> Path:
    return cut_model[()]


@pytest.fixture(scope="module")
def cut(cut_model: CutModel) -> Path:
    return cut_model[1, 2, 1]


@pytest.fixture
def copied(cut: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut, tmp_path / "copy"))


def test_logits_and_what_crosses_the_borders(whole: Path, cut: Path) -> None:
    with Engine(whole, threads=1) as one, Engine(cut, threads=1) as three:
        assert three.manifest.states == one.manifest.states
        expected = one.model.all_logits(PROMPT).copy()
        np.testing.assert_array_equal(three.model.all_logits(PROMPT), expected)
        earlier = three.model.core.executor.earlier
        assert earlier is not None
        rows = 2 * len(PROMPT)
        assert (earlier.transfers.rows, earlier.transfers.nbytes) == (rows, 4 * WINDOWS.hidden_size * rows)
        assert (three.device, three.on_host) == ("CPU, then CPU, then CPU", True)


def test_batches_prefixes_and_preemption(whole: Path, cut: Path) -> None:
    """Each alone on one device, all together in stages, with pages for some of them."""
    alone = Alone.of(load_bundle(whole, 256, 1), (1, 33, 90, 70, 40, 17), 30)
    steps = Steps(load_bundle(cut, 256, 1), kv_tokens=256)
    alone.check(steps, stagger=2)
    assert steps.scheduler.totals.preemptions > 0


def overlapping(core: Core) -> EarlierStages:
    """The stages before the last, of which each computes a piece of a prompt while the others compute theirs."""
    earlier = core.executor.earlier
    assert earlier is not None and not earlier.overlaps  # as they share the CPU
    earlier.overlaps, earlier.piece_rows = True, 16
    return earlier


def test_prompts_overlap(whole: Path, cut: Path) -> None:
    """Together, in pieces of a page or more; and a stage begins the next piece before another ends the one before."""
    alone = Alone.of(load_bundle(whole, 256, 1), (1, 33, 90, 70, 40, 17), 5)
    steps = Steps(load_bundle(cut, 256, 1))
    overlapping(steps.core)
    alone.check(steps)
    with Engine(cut, threads=1) as engine:
        core = engine.model.core
        earlier, met = overlapping(core), threading.Barrier(2, timeout=600)
        first, last = earlier._stages[0]._functions, core.executor._prefill
        order: list[str] = []

        def meeting(name: str, function: Callable[..., Any], *pieces: int) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                order.append(name)
                if order.count(name) - 1 in pieces:
                    met.wait()  # for the other stage, in a later piece
                return function(*arguments)

            return run

        first["prefill"] = meeting("first", first["prefill"], 2)
        core.executor._prefill = meeting("last", last, 0)
        found = engine.generate(PROMPT, max_tokens=2, sampling=GREEDY, ignore_eos=True).token_ids
        assert (order.count("first"), order.count("last")) == (4, 4)
        assert earlier.transfers.rows == 2 * (len(PROMPT) + 1)
    with Engine(whole, threads=1) as one:
        assert one.generate(PROMPT, max_tokens=2, sampling=GREEDY, ignore_eos=True).token_ids == found


def test_an_error_of_a_piece_ends_all(cut: Path) -> None:
    """It is the error of the forward, and the next prompt is answered as before."""
    with Engine(cut, threads=1) as engine:
        first = overlapping(engine.model.core)._stages[1]._functions
        function, calls = first["prefill"], itertools.count()

        def fails(*arguments: Any) -> Any:
            if next(calls) == 1:
                raise ComputeError("the second piece")
            return function(*arguments)

        expected = engine.generate(PROMPT, max_tokens=2, sampling=GREEDY, ignore_eos=True).token_ids
        engine.reset()
        first["prefill"] = fails
        with pytest.raises(ComputeError, match="the second piece"):
            engine.generate(PROMPT, max_tokens=2, sampling=GREEDY, ignore_eos=True)
        assert engine.generate(PROMPT, max_tokens=2, sampling=GREEDY, ignore_eos=True).token_ids == expected


def test_a_chat_moves_between_one_device_and_stages(whole: Path, cut: Path, tmp_path: Path) -> None:
    with Engine(whole, threads=1) as one, Engine(cut, threads=1) as three:
        for here, there in ((one, three), (three, one)):
            here.reset()
            begun = PROMPT + here.generate(PROMPT, max_tokens=9, sampling=GREEDY, ignore_eos=True).token_ids
            here.save(tmp_path / "chat")
            there.reset()
            there.load(tmp_path / "chat")
            found = [
                engine.generate([*begun, 1, 2], max_tokens=9, sampling=GREEDY, ignore_eos=True)
                for engine in (here, there)
            ]
            assert found[0].token_ids == found[1].token_ids
            assert found[1].stats is not None and found[1].stats.cached_tokens == len(begun) - 1


@pytest.mark.everything
def test_recurrent_states_and_drafts(tmp_path: Path) -> None:
    """Slots, of the trained hybrid; without the layer that drafts, which stages leave out."""
    options: dict[str, Any] = {"target": QUICK, "quantization": "q8f16_0", "context_length": 512}
    one = mlcpipe.compile(HYBRID, output=tmp_path / "one", draft_head="none", **options)
    for counts in ([2, 2], [3, 1]):
        two = mlcpipe.compile(HYBRID, output=tmp_path / "two", stages=counts, overwrite=True, **options)
        answers = []
        for bundle in (one, two):
            with Engine(bundle, threads=1, draft="lookup") as engine:
                messages = [{"role": "user", "content": "What is the KV cache?"}]
                answers.append([engine.chat(messages, max_tokens=48, sampling=GREEDY).token_ids for _ in range(2)])
        assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("folder", "change", "words"),
    [
        ("", lambda whole: whole["stages"].reverse(), "expected layers from 0 on"),
        ("", lambda whole: whole["stages"].pop(), "expected stages of all 4 layers; found 3"),
        ("", lambda whole: whole["stages"].append("../other"), "a relative path with forward slashes"),
        ("", lambda whole: whole["stages"].append("elsewhere"), "expected the hash of elsewhere/mlcpipe.json"),
        ("", lambda whole: whole["stages"].extend(["x"] * 70), "at most 64"),
        ("", lambda whole: whole["states"].reverse(), "expected the states of its stages, in order"),
        ("", lambda whole: whole["files"].pop("layers-1-2/lib/model.so"), "the hash of layers-1-2/lib/model.so"),
        ("", lambda whole: whole["model"].update(draft_heads=2), "expected the model's draft_heads"),
        ("", lambda whole: whole["model"].update(kv_dtype="float64"), "expected the model's kv_dtype"),
        ("layers-1-2", lambda stage: stage["model"]["stage"].update(begin=0), "expected layers from 1 on"),
        ("layers-1-2", lambda stage: stage["model"]["stage"].update(end=9), "expected layers from 1 on, at most 4"),
        ("layers-1-2", lambda stage: stage["model"]["stage"].update(windows=[0]), "expected the model's windows"),
        ("layers-1-2", lambda stage: stage["model"].update(stage=None), "expected a stage; found a whole bundle"),
        ("layers-1-2", lambda stage: stage["model"].update(hidden_size=1 << 20), "expected the model's hidden_size"),
        ("layers-1-2", lambda stage: stage["model"].update(dtype="float16"), "manifest and library differ in dtype"),
    ],
)
def test_hand_edited_manifests(copied: Path, folder: str, change: Callable[[Any], object], words: str) -> None:
    edit(copied, change, folder)
    with pytest.raises(BundleError) as raised:
        load_bundle(copied, 256, 1)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_flipped_bit_of_a_stage(copied: Path) -> None:
    shard = copied / "layers-3-3" / "params_shard_0.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BundleError, match="layers-3-3/params_shard_0.bin"):
        load_bundle(copied, 256, 1)


def test_what_opens_no_stages(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action, words in (
        (lambda: load_bundle(cut / "layers-0-0"), "the folder is one stage of a bundle"),
        (lambda: load_bundle(cut, device="cpu,cpu"), "one device for each of the bundle's 3 stages"),
        (lambda: mlcpipe.load(cut, "cpu,cpu,cpu", stages=[1, 2, 1]), "--stages; expected a checkpoint"),
    ):
        with pytest.raises(UsageError, match=words):
            action()
    assert main(["package", str(cut), "-o", str(tmp_path / "out"), "--app", "cli"]) == 2
    assert "`mlcpipe package` takes no bundle in stages" in capsys.readouterr().err
    assert main(["inspect", str(cut)]) == 0
    shown = capsys.readouterr().out
    assert "layers-1-2" in shown and "256 bytes a token cross each border" in shown


def test_the_targets_of_a_bundle_of_one_s_own(cut: Path) -> None:
    """Those that it was compiled for: one for each stage, or one for all."""
    own = read_manifest(cut).target.name
    for target in (own, f"{own},{own},{own}"):
        assert prepare_bundle(cut, "cpu,cpu,cpu", target=target) == cut
    for target in (f"{own},{own}", f"{own},{own},vulkan", "vulkan"):
        with pytest.raises(UsageError, match=f"another target .* expected {own},{own},{own}; found {target}"):
            prepare_bundle(cut, target=target)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adapters": True}, "no stages with adapters"),
        ({"draft_head": "folder"}, "no stages with a draft head"),
        ({"method": "gptq"}, "no stages with a calibration text"),
        ({"stages": [1, 2]}, "expected numbers that add up to the model's 4 layers; found 1,2: 3 layers"),
        ({"stages": [1, 2, 1], "target": "cpu,cpu"}, "one target for each stage, or one for all; found 2 for 3 stages"),
        ({"target": "cpu,webgpu"}, "no stages in webgpu"),
        ({"target": "cpu,android"}, "no stages in android"),
    ],
)
def test_what_has_no_stages(checkpoint: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(MlcpipeError) as raised:
        mlcpipe.compile(checkpoint, output=tmp_path / "bundle", **{"target": "cpu", "stages": [2, 2], **options})
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "bundle").exists()
