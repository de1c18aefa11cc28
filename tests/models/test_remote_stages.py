"""Stages behind links, as on several machines: the bits of one process; a stage that ends, hangs or does not fit."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle import MANIFEST, read_manifest
from mlcpipe.bundle.memory import Units
from mlcpipe.bundle.stages import weights_digest
from mlcpipe.errors import BundleError, ComputeError, MlcpipeError, ResourceError, UsageError
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.remote import stages as remote_stages
from mlcpipe.runtime.remote.lane import StageLostError
from mlcpipe.runtime.remote.opening import open_with_stages
from mlcpipe.runtime.remote.worker import StageReport, StageWorker
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request, TokenEvent
from tests.conftest import WINDOWS, CutModel
from tests.models.edits import edit
from tests.models.linked import links_of, opened
from tests.models.stepping import Alone, Steps

pytestmark = pytest.mark.full
GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(7 * place) % 250 for place in range(59)]


@pytest.fixture(scope="module")
def whole(cut_model: CutModel) -> Path:
    return cut_model[()]


@pytest.fixture(scope="module")
def cut(cut_model: CutModel) -> Path:
    return cut_model[1, 2, 1]


def test_batches_prefixes_and_preemption(whole: Path, cut: Path) -> None:
    """Each alone in one process, all together over links, with pages for some of them, which are copied."""
    alone = Alone.of(load_bundle(whole, 256, 1), (1, 33, 90, 70, 40, 17), 30)
    bundle, links = opened(cut)
    assert bundle.place == "stage 0, then stage 1, then CPU"
    steps = Steps(bundle, kv_tokens=256)
    alone.check(steps, stagger=2)
    assert steps.scheduler.totals.preemptions > 0
    steps = Steps(bundle)
    alone.check(steps)
    assert steps.core.executor.earlier is bundle.elsewhere
    assert {"look", "load", "forward"} <= {*links[0].calls} <= {"look", "load", "forward", "copy_pages"}


def test_prompts_in_pieces_and_what_crosses(whole: Path, cut: Path) -> None:
    alone = Alone.of(load_bundle(whole, 256, 1), (1, 33, 90, 70), 5)
    bundle, links = opened(cut)
    bundle.elsewhere._piece_rows = 16
    alone.check(Steps(bundle))
    steps = Steps(bundle)
    before, several = bundle.elsewhere.transfers.rows, links[0].calls.count("forward")
    steps.submit(PROMPT, 2)
    steps.run()
    assert links[0].calls.count("forward") - several == 5  # four pieces, and a token
    assert bundle.elsewhere.transfers.rows - before == 2 * (len(PROMPT) + 1)
    assert bundle.elsewhere.transfers.nbytes == 4 * WINDOWS.hidden_size * bundle.elsewhere.transfers.rows


def ended(answer: Any) -> tuple[list[int], TokenEvent]:
    """The tokens of an answer, and its last event."""
    events = [*answer]
    return [one.token for one in events if one.token is not None], events[-1]


def test_a_stage_that_ends_ends_its_answers_and_comes_back(whole: Path, cut: Path) -> None:
    """Those that wait in the queue are computed afterwards; each with the bits of one process."""
    with Engine(whole, threads=1) as one:
        expected = one.generate(PROMPT, max_tokens=20, sampling=GREEDY, ignore_eos=True).token_ids
    bundle, links = opened(cut)
    engine, seen = Batching(bundle, kv_tokens=512, max_sequences=1, drafts=False), links[1].before
    left = 9

    def dies(method: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        seen(method, arguments)
        if method == "call":
            left -= 1
            if left == 0:
                links[1].end()
                raise links[1].lost()

    links[1].before = dies
    request = Request(PROMPT, 20, GREEDY)
    with engine.together:
        answers = [engine.submit(request) for _ in range(2)]
    tokens, last = ended(answers[0])
    assert last.finish_reason == "error" and tokens == expected[: len(tokens)] and 0 < len(tokens) < 20
    assert isinstance(last.error, StageLostError) and "stage 1 ended; send the request again" in str(last.error)
    assert ended(answers[1])[0] == expected and links[1].ends == 1 and links[0].ends == 0
    assert ended(engine.submit(request))[0] == expected and not engine.fault
    engine.close()


def test_an_error_of_a_stage_ends_the_answers_of_its_step(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of others stay, and the next forward is computed."""
    bundle, links = opened(cut)
    engine = Batching(bundle, kv_tokens=512, drafts=False)
    request = Request(PROMPT, 4, GREEDY)
    expected = ended(engine.submit(request))[0]
    run, fails = StageWorker._forward, [False, True]

    def failing(worker: StageWorker, *arguments: Any) -> Any:
        if worker is links[0].worker and fails and fails.pop():
            raise ComputeError("of the first stage")
        return run(worker, *arguments)

    monkeypatch.setattr(StageWorker, "_forward", failing)
    last = ended(engine.submit(Request(PROMPT[::-1], 4, GREEDY)))[1]
    assert isinstance(last.error, ComputeError) and "of the first stage" in str(last.error)
    found = engine.submit(request)
    assert ended(found)[0] == expected
    assert links[0].ends == links[1].ends == 0
    engine.close()


def test_a_slow_stage_is_waited_for_and_a_silent_one_is_ended(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_stages, "_PING_S", 0.01)
    bundle, links = opened(cut)
    engine = Batching(bundle, kv_tokens=512, drafts=False)
    request, run, pinged = Request(PROMPT, 4, GREEDY), StageWorker._forward, threading.Event()
    expected = ended(engine.submit(request))[0]
    seen = links[1].before

    def counted(method: str, arguments: tuple[Any, ...]) -> None:
        seen(method, arguments)
        if links[1].calls.count("ping") > 2:
            pinged.set()

    def slow(worker: StageWorker, *arguments: Any) -> Any:
        assert pinged.wait(60)
        return run(worker, *arguments)

    links[1].calls.clear()
    links[1].before = counted
    monkeypatch.setattr(StageWorker, "_forward", slow)
    assert ended(engine.submit(Request(PROMPT, 4, GREEDY, namespace="other")))[0] == expected
    assert links[1].ends == 0

    monkeypatch.setattr(remote_stages, "_SILENT_S", 0.05)
    monkeypatch.setattr(StageWorker, "_forward", run)
    links[1].silent = True
    last = ended(engine.submit(request))[1]
    assert isinstance(last.error, StageLostError) and "stage 1 did not answer" in str(last.error)
    assert links[1].ends == 1
    assert ended(engine.submit(request))[0] == expected
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stage_that_does_not_come_back_is_a_fault(cut: Path) -> None:
    """The server replaces the engine, and requests hear why."""
    bundle, links = opened(cut)
    engine = Batching(bundle, kv_tokens=512, drafts=False)
    seen = links[0].before

    def dies(method: str, arguments: tuple[Any, ...]) -> None:
        if method == "call":
            links[0].end()
            raise links[0].lost()
        if method == "load":
            raise BundleError("the files are gone")
        seen(method, arguments)

    links[0].before = dies
    assert "stage 0 ended" in str(ended(engine.submit(Request(PROMPT, 4, GREEDY)))[1].error)
    with pytest.raises(MlcpipeError, match="stage 0 does not load again; found the files are gone"):
        while True:
            last = ended(engine.submit(Request(PROMPT, 4, GREEDY)))[1]
            assert last.error is not None
    assert "stage 0 does not load again" in engine.fault
    engine.close()


def part_of(cut: Path, folder: Path, name: str) -> Path:
    """A folder with one stage of a bundle alone."""
    shutil.copytree(cut / name, folder / name)
    shutil.copy(cut / MANIFEST, folder / MANIFEST)
    return folder


def test_each_machine_needs_the_files_of_its_stage_alone(whole: Path, cut: Path, tmp_path: Path) -> None:
    last = tmp_path / "last"
    shutil.copytree(cut, last, ignore=lambda folder, names: ["lib", *[n for n in names if n.startswith("params")]]
                    if Path(folder).name in ("layers-0-0", "layers-1-2") else [])  # fmt: skip
    links = links_of(part_of(cut, tmp_path / "0", "layers-0-0"), part_of(cut, tmp_path / "1", "layers-1-2"))
    bundle = open_with_stages(last, links, 256, 1)
    alone = Alone.of(load_bundle(whole, 256, 1), (33,), 4)
    alone.check(Steps(bundle))


def test_files_that_are_not_there_or_not_the_bundle_s(cut: Path, tmp_path: Path) -> None:
    folder = part_of(cut, tmp_path / "part", "layers-1-2")
    StageWorker(folder, 1, None, "stage", None).look()
    for index, words in ((0, "layers-0-0/mlcpipe.json with the hash"), (3, "expected 3 stages; found 4")):
        with pytest.raises((BundleError, UsageError), match=words):
            StageWorker(folder, index, None, "stage", None).look()
    shard = folder / "layers-1-2" / "params_shard_0.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleError, match="params_shard_0.bin has changed"):
        StageWorker(folder, 1, None, "stage", None).look()
    shard.write_bytes(content)
    (folder / "layers-1-2" / "lib" / "model.so").unlink()
    with pytest.raises(BundleError, match="lib/model.so"):
        StageWorker(folder, 1, None, "stage", None).look()
    other = Path(shutil.copytree(cut, tmp_path / "other"))
    assert weights_digest(read_manifest(other)) == weights_digest(read_manifest(cut))
    edit(other, lambda stage: stage["model"].update(hidden_size=128), "layers-1-2")
    with pytest.raises(BundleError, match="the model's hidden_size"):
        StageWorker(other, 1, None, "stage", None).look()
    with pytest.raises(UsageError, match="2 processes before the last; found 1"):
        open_with_stages(cut, links_of(cut), 256, 1)


def test_memory_of_each_machine_is_checked_before_it_loads(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = links_of(cut, cut)
    look = StageWorker.look

    def little(worker: StageWorker) -> StageReport:
        found = look(worker)
        return replace(found, free=replace(found.free, nbytes=1 << 20)) if worker is links[1].worker else found

    monkeypatch.setattr(StageWorker, "look", little)
    with pytest.raises(
        ResourceError, match=r"not enough memory for 256 tokens of context in stage 1; expected .* free"
    ):
        open_with_stages(cut, links, 256, 1)
    assert links[0].calls == links[1].calls == ["look"]
    monkeypatch.setattr(StageWorker, "look", look)
    manifest = read_manifest(cut)
    with pytest.raises(ResourceError, match="not enough memory for the keys and values of stage 0 in CPU; expected"):
        links[0].call("load", 256, 1, manifest.states, Units((1 << 34, 1 << 34))).result()
