"""Plans of stages: the fastest device gets what its memory holds, the others the rest; what does not fit says so."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlcpipe.bundle.stages import counts_of, runs_of
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.cli import main
from mlcpipe.compiler import staged_place
from mlcpipe.compiler.automatic import Place
from mlcpipe.compiler.stage_plan import Cost, Costs, PlannedStage, Room, plan, plan_stages
from mlcpipe.errors import MlcpipeError, ResourceError, UsageError
from mlcpipe.loading import engine_device
from mlcpipe.support.stage_options import check_stages, pairs
from tests.conftest import TinyLlama, write_llama

GB = 10**9
LAYER = Cost(weights=GB, read=GB // 2, states=GB // 10)
COSTS = Costs((LAYER,) * 16, Cost(weights=2 * GB, read=1000), Cost(weights=2 * GB, read=2 * GB), running=GB // 2)
GPU = Room("gpu:0", "a card", "vulkan", 8 * GB, "gpu:0", 400.0)
CPU = Room("cpu:0", "a processor", "cpu", 64 * GB, "", 40.0)

MODEL = TinyLlama(layers=3, intermediate_size=112)  # rows in whole blocks of 16


def counts(stages: tuple[PlannedStage, ...]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def test_as_many_layers_as_fit_on_the_fastest() -> None:
    """8 GB less half a gigabyte and the 2 of the embedding, or of the output: 5 layers of 1.1."""
    for rooms in ((GPU, CPU), (CPU, GPU)):
        stages = plan(rooms, [COSTS, COSTS])
        by_device = {stage.room.spec: stage for stage in stages}
        assert len(by_device["gpu:0"].layers) == math.floor(5.5 / 1.1) == 5
        assert sum(counts(stages)) == 16 and [stage.layers.start for stage in stages] == [0, counts(stages)[0]]
        assert by_device["gpu:0"].nbytes <= GPU.free
    gpu, cpu = plan((GPU, CPU), [COSTS, COSTS])
    assert gpu.token_s == pytest.approx((5 * 0.5 + 1e-6) / 400) and cpu.token_s == pytest.approx((11 * 0.5 + 2) / 40)


def test_one_device_that_holds_everything() -> None:
    assert [stage.room for stage in plan((replace(GPU, free=40 * GB), CPU), [COSTS, COSTS])] == [
        replace(GPU, free=40 * GB)
    ]
    assert counts(plan((CPU, replace(CPU, spec="cpu:0")), [COSTS, COSTS])) == [15, 1]  # of one memory, as asked


def test_by_hand() -> None:
    assert counts(plan((GPU, CPU), [COSTS, COSTS], (2, 14))) == [2, 14]
    with pytest.raises(ResourceError, match=r"layers 0 to 7 of the model do not fit in gpu:0, a card; expected 10.5"):
        plan((GPU, CPU), [COSTS, COSTS], (8, 8))


def machines(*gb_s: float, free: int = 64 * GB) -> list[Room]:
    return [Room(f"10.0.0.{index}", "a processor", "cpu", free, f"m{index}", rate) for index, rate in enumerate(gb_s)]


def test_machines_share_the_layers_by_their_speed() -> None:
    """The last one has the output matrix, which is read as four layers are; every machine has a layer."""
    assert counts(plan(machines(40, 40), [COSTS] * 2, even=True)) == [10, 6]
    assert counts(plan(machines(80, 40, 40), [COSTS] * 3, even=True)) == [10, 5, 1]
    assert counts(plan(machines(400, 1), [COSTS] * 2, even=True)) == [15, 1]
    assert counts(plan(machines(1, 400), [COSTS] * 2, even=True)) == [1, 15]
    small = machines(40, 40, free=13 * GB)  # 9 layers of 1.1 GB, and the rest
    assert counts(plan(small, [COSTS] * 2, even=True)) == [9, 7]
    with pytest.raises(ResourceError, match=r"layers 6 to 15 of the model do not fit in 10\.0\.0\.1"):
        plan(machines(40, 40, free=10 * GB), [COSTS] * 2, even=True)


def test_devices_of_one_memory_share_it() -> None:
    small = replace(CPU, free=20 * GB)
    with pytest.raises(ResourceError, match="do not fit in cpu:0"):
        plan((small, small), [COSTS, COSTS], (8, 8))  # 11 GB each fit alone
    plan((small, replace(small, memory="other")), [COSTS, COSTS], (8, 8))


def test_any_plan_fits_or_is_refused() -> None:
    """Every layer is in one stage, in order, and no memory holds more than it has free."""
    rng = random.Random(0)
    planned = 0
    for _ in range(300):
        layers = tuple(
            Cost(rng.randint(0, GB), rng.randint(0, GB), rng.randint(0, GB)) for _ in range(rng.randint(1, 9))
        )
        edges = [Cost(rng.randint(0, GB), rng.randint(0, GB)) for _ in range(2)]
        costs = Costs(layers, *edges, running=rng.randint(0, GB // 4))
        rooms = [
            Room(f"card:{i}", "card", "t", rng.randint(0, 8 * GB), rng.choice("ab"), rng.uniform(1, 100))
            for i in range(rng.randint(2, 4))
        ]
        memory = {room.memory: room.free for room in rooms}
        rooms = [replace(room, free=memory[room.memory]) for room in rooms]
        try:
            stages = plan(rooms, [costs] * len(rooms))
        except (ResourceError, UsageError):
            continue
        planned += 1
        assert [index for stage in stages for index in stage.layers] == list(range(len(layers)))
        assert all(stage.layers for stage in stages)
        for name, free in memory.items():
            assert sum(stage.nbytes for stage in stages if stage.room.memory == name) <= free
    assert 30 < planned < 270


def test_the_only_device_of_a_plan_is_the_one_that_runs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two cards the second is the faster one, and holds the whole model: it is not the first of its kind."""
    rooms = [replace(GPU, spec=f"card:{i}", memory=f"card:{i}", target="cpu", gb_s=100.0 * (i + 1)) for i in range(2)]
    asked = SimpleNamespace(kv_cache_dtype="f32", context=64, stages=None, device_memory_bytes=None, rooms=None)
    monkeypatch.setattr(staged_place, "room_of", lambda spec, *_: rooms[int(spec[-1])])
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path))
    place = Place("cpu,cpu", devices=("card:0", "card:1"))
    found = staged_place.planned(place, open_checkpoint(checkpoint), "q0f32", asked, lambda words: words)
    assert found == Place("cpu", devices=("card:1",)) and engine_device("card:0,card:1", found) == "card:1"
    asked.stages = (1, 2)
    found = staged_place.planned(place, open_checkpoint(checkpoint), "q0f32", asked, lambda words: words)
    assert engine_device("card:0,card:1", found) == "card:0,card:1"
    assert (
        engine_device("auto") is None
        and engine_device("auto", Place("cpu", devices=("card:0", "cpu:0"))) == "card:0,cpu:0"
    )


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: counts_of("12,4;rm"), "numbers of layers such as 12,4"),
        (lambda: counts_of("12,,4"), "numbers of layers such as 12,4"),
        (lambda: counts_of("-1,5"), "numbers of layers such as 12,4"),
        (lambda: counts_of("٣,4"), "numbers of layers such as 12,4"),
        (lambda: counts_of("0,16"), "at least one layer in each stage"),
        (lambda: counts_of(",".join(["1"] * 65)), "numbers of layers such as 12,4"),
        (lambda: runs_of(counts_of("9" * 5000 + ",1"), 16), "add up to the model's 16 layers"),
        (lambda: plan((GPU, CPU), [COSTS, COSTS], (16,)), "a number of layers for each device; found 1 for 2 devices"),
        (lambda: plan((GPU,) * 17, [COSTS] * 17), "at most 16 devices"),
        (lambda: plan((replace(GPU, free=GB), CPU), [COSTS, COSTS]), "one layer of the model does not fit in gpu:0"),
        (lambda: pairs("vulkan,cpu", "a,b,c"), "one target for each of --device"),
        (lambda: pairs("auto", "vulkan,cpu"), "one target for each of --device"),
    ],
)
def test_hostile_plans(action: Callable[[], object], words: str) -> None:
    with pytest.raises(MlcpipeError) as raised:
        action()
    assert words in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_options_that_have_no_stages(tmp_path: Path) -> None:
    none = {"adapters": False, "draft_head": None, "best": False}
    check_stages(None, "vulkan,cpu", (1, 2), 1 << 30, **none)
    check_stages(None, "auto", None, 1 << 30, **none)
    for bundle, device in ((tmp_path, "vulkan,cpu"), (None, "cpu")):
        with pytest.raises(UsageError, match="--device-memory-bytes; expected a checkpoint and several devices"):
            check_stages(bundle, device, None, 1 << 30, **none)
    assert pairs("vulkan,cpu", None) == [("vulkan", None), ("cpu", None)]
    assert pairs("cpu,cpu", "quick") == [("cpu", "quick")] * 2
    for bundle, device, options, words in (
        (tmp_path, "vulkan,cpu", none, "found a bundle, which is cut already"),
        (None, "auto", none, "found --device auto"),
        (None, "vulkan,cpu", none | {"adapters": True}, "no stages with adapters"),
        (None, "vulkan,cpu", none | {"draft_head": "x"}, "no stages with a draft head"),
        (None, "vulkan,cpu", none | {"best": True}, "no stages with --best"),
    ):
        with pytest.raises(UsageError, match=words):
            check_stages(bundle, device, (1, 2), **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("plan") / "checkpoint", MODEL)


def test_bytes_of_a_checkpoint(checkpoint: Path) -> None:
    """Weights in float32, and keys and values of 64 tokens and a page more; the tied embedding is in both ends."""
    model, room = MODEL, replace(CPU, target="cpu-native")
    found = plan_stages(open_checkpoint(checkpoint), [room, room], "q0f32", "f32", 64, (2, 1))
    matrices = sum(math.prod(shape) for name, shape in model.shapes().items() if ".0." in name)
    kv = 2 * model.kv_heads * model.head_dim * (64 + 16)
    embedding, norm = model.vocab_size * model.hidden_size, model.hidden_size
    first, last = found.stages
    assert (first.cost.states, last.cost.states) == (4 * 2 * kv, 4 * kv)
    assert (first.cost.weights, last.cost.weights) == (
        4 * (2 * matrices + embedding),
        4 * (matrices + embedding + norm),
    )
    assert first.cost.read == 4 * (2 * matrices + model.hidden_size) and last.cost.read == last.cost.weights
    assert (found.row_bytes, found.context, found.counts) == (4 * 64, 64, (2, 1))


def test_the_table(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlcpipe.compiler.stage_plan.host_gb_s", lambda: 40.0)
    assert main(["inspect", str(checkpoint), "--devices", "cpu,cpu", "--stages", "1,2", "--context", "64"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "cpu:0 0 to 0" in shown and "cpu:0 1 to 2" in shown and "40.0" in shown
    assert "256 bytes a token cross the border" in shown and "--target cpu-native,cpu-native --stages 1,2" in shown
    for arguments, words in (
        (["--devices", "cpu,gpu"], "there is no such device"),
        (["--stages", "1,2"], "--stages has no effect; expected --devices"),
        (["--devices", "cpu,cpu", "--stages", "1,x"], "numbers of layers such as 12,4"),
        (["--devices", "cpu,cpu", "--kernels"], "--devices plans stages alone"),
    ):
        assert main(["inspect", str(checkpoint), *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
