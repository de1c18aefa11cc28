"""`--device auto` for a checkpoint: the rule, the measurement that it follows, and what is looked at before any work."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlcpipe import devices
from mlcpipe.bundle import read_manifest
from mlcpipe.bundle.memory import Need, need_of
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler.automatic import Place, choose
from mlcpipe.compiler.preflight import Purpose
from mlcpipe.devices import cpu, cuda, vulkan
from mlcpipe.devices.support import speeds, tvm_runtime
from mlcpipe.errors import CompileError, ResourceError, TargetError
from mlcpipe.support.progress import SilentProgress
from tests.conftest import Bundles
from tests.unit.cards import Card, Cards, install

GB = 10**9
MODEL = Need(weights=4 * GB, read=4 * GB, states=0, running=0, context=4096)
NO_GPU = Place("cpu-native", "no GPU was found")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cards:
    return install(monkeypatch, tmp_path)


def chosen(need: Need = MODEL) -> Place:
    return choose(lambda target: [need], SilentProgress())


@pytest.mark.parametrize(
    ("gb_s", "free", "read", "target", "why"),
    [
        (4000, 8, 4 * GB, "vulkan", "Fast card reads 4.0 TB/s, the CPU 40 GB/s"),
        (65, 8, 4 * GB, "vulkan", "Fast card reads 65 GB/s, the CPU 40 GB/s"),
        (58, 8, 4 * GB, "cpu-native", "Fast card reads 58 GB/s, the CPU 40 GB/s"),  # not clearly faster
        (4000, 3, 4 * GB, "cpu-native", "Fast card has 2.79 GiB free, and the model takes 3.73 GiB"),
        (4000, 8, 2 << 20, "cpu-native", "Fast card gains nothing for a model of 2.00 MiB"),
        (4000, 8, 100 << 20, "vulkan", "Fast card reads 4.0 TB/s, the CPU 40 GB/s"),
    ],
)
def test_the_rule(cards: Cards, gb_s: float, free: int, read: int, target: str, why: str) -> None:
    cards.gb_s, cards.card = gb_s, replace(cards.card, free=free * GB)
    place = chosen(replace(MODEL, read=read))
    assert (place.target, place.why, place.saw_gpu) == (target, why, True)
    assert place.gb_s == (gb_s if target == "vulkan" else 0)


@pytest.mark.parametrize(
    ("free", "cuts", "in_stages"),
    [
        (3.0, True, True),  # three quarters on the card
        (3.0, False, False),
        (0.5, True, False),  # an eighth gains little
    ],
)
def test_stages_where_a_card_is_too_small(cards: Cards, free: float, cuts: bool, in_stages: bool) -> None:
    cards.card = replace(cards.card, free=int(free * GB))
    place = choose(lambda target: [MODEL], SilentProgress(), cuts=cuts)
    assert (place.target, place.devices) == (
        ("vulkan,cpu-native", ("card:0", "cpu:0")) if in_stages else ("cpu-native", ())
    )
    assert "and the model takes 3.73 GiB" in place.why


def test_every_estimate_counts(cards: Cards) -> None:
    def needs(target: str) -> Iterator[Need]:
        yield MODEL
        raise TargetError("KV cache dtype", next_step="take another")

    assert choose(needs, SilentProgress()) == Place("cpu-native", "KV cache dtype; take another", True)


def test_a_preview_has_the_numbers_of_the_bundle(demo_bundles: Bundles) -> None:
    checkpoint, manifest = open_checkpoint(demo_bundles.checkpoint), read_manifest(demo_bundles["q4f16_1"])
    assert Purpose("cpu-native", "q4f16_1", useful=True).judge(checkpoint) == need_of(manifest, None)
    assert Purpose("cpu-native", "q4f16_1", context=64).judge(checkpoint) == need_of(manifest, 64)


def test_nothing_is_asked_where_no_gpu_is_shown(cards: Cards, tmp_path: Path) -> None:
    cards.shown = ""
    assert chosen() == NO_GPU and cards.asked == 0 and list(tmp_path.iterdir()) == []


def test_a_software_device_is_no_gpu(cards: Cards) -> None:
    cards.card = replace(cards.card, software=True)
    assert chosen() == chosen() == NO_GPU and (cards.asked, cards.measured) == (1, 0)


def test_the_answer_is_kept_for_driver_card_and_version(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [chosen(), chosen()]
    assert places[0] == places[1] and cards.measured == 1
    cards.shown = "card, driver 2"
    assert chosen().target == "vulkan" and cards.measured == 2
    monkeypatch.setattr(speeds, "__version__", "9.9")
    assert chosen().target == "vulkan" and cards.measured == 3
    cards.card, cards.gb_s = Card(0, "Other card"), 100.0  # which the system shows alike
    assert chosen().why.startswith("Other card reads 100 GB/s") and cards.measured == 4
    cards.card = Card(0, "No card", software=True)
    assert chosen() == NO_GPU and chosen() == NO_GPU


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"\xff", b"x" * (1 << 15), {"gb_s": -1}, {"gb_s": 1e9}, {"gb_s": float("nan")}, {"gb_s": "4000"},
        {"identity": [1]}, {"identity": ["x"] * 9}, {"identity": ["\x1b[31m"]}, {"key": "other"}, {"more": 1}, None,
    ],
)  # fmt: skip
def test_a_file_that_somebody_else_wrote_is_not_believed(cards: Cards, tmp_path: Path, content: Any) -> None:
    expected = chosen()
    (path,) = (tmp_path / "speeds").iterdir()
    written = json.loads(path.read_text())
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(json.dumps(written | content).encode() if isinstance(content, dict) else content)
    assert chosen() == expected and cards.measured == 2


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("lacks", CompileError("no NVRTC", next_step="pip install 'mlcpipe[cuda]'"), "no NVRTC; pip install 'mlcpipe"),
        ("problem", TargetError("there is no driver"), "there is no driver"),
        ("problem", RuntimeError("the driver\nis broken"), "is broken"),
    ],
)
def test_what_is_missing_is_the_reason(cards: Cards, tmp_path: Path, where: str, error: Exception, words: str) -> None:
    setattr(cards, where, error)
    place = chosen()
    assert place.target == "cpu-native" and place.why.startswith(words) and place.saw_gpu
    assert not (tmp_path / "speeds").exists()
    setattr(cards, where, None)
    assert chosen().target == "vulkan"


def test_reasons_of_several_kinds(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_kinds", lambda: ("metal", Card.KIND))
    no_mac = "mlcpipe's kernels have not run on a Mac's GPU yet; --device metal tries them"
    assert chosen().why == f"Fast card reads 4.0 TB/s, the CPU 40 GB/s ({no_mac})"
    cards.shown = ""
    assert chosen() == Place("cpu-native", no_mac, True)


def files(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


RENDER, ICD, LAVAPIPE = (
    "dev/dri/renderD128",
    "usr/share/vulkan/icd.d/radeon_icd.json",
    "usr/share/vulkan/icd.d/lvp_icd.json",
)


@pytest.mark.skipif(cuda.sys.platform != "linux", reason="reads Linux's files")
@pytest.mark.parametrize(
    ("kind", "names", "words"),
    [
        (cuda, (), ""),
        (cuda, (RENDER, ICD), ""),
        (cuda, ("proc/driver/nvidia/version",), ""),  # a module without a card
        (cuda, ("dev/nvidiactl", "proc/driver/nvidia/version"), "dev/nvidiactl\nproc/driver/nvidia/version"),
        (cuda, ("dev/nvhost-gpu",), "dev/nvhost-gpu"),
        (vulkan, (), ""),
        (vulkan, (ICD,), ""),
        (vulkan, ("dev/dri/card0", ICD), ""),  # a display without a renderer
        (vulkan, (RENDER, ICD, "sys/class/drm/renderD128/device/vendor"), "sys/class/drm/renderD128/device/vendor"),
        (vulkan, ("dev/nvidiactl", "etc/vulkan/icd.d/nvidia_icd.json"), "nvidia_icd.json"),
    ],
)
def test_what_the_system_shows(tmp_path: Path, kind: Any, names: tuple[str, ...], words: str) -> None:
    shown = kind.hardware(files(tmp_path, *names))
    assert bool(shown) == bool(words) and words in shown and shown == kind.hardware(tmp_path)


@pytest.mark.skipif(cuda.sys.platform != "linux", reason="reads Linux's files")
@pytest.mark.parametrize("names", [(RENDER,), (RENDER, LAVAPIPE)])
def test_a_gpu_without_a_driver_comes_with_the_command(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(TargetError, match=f"a GPU has no Vulkan driver in .*/{RENDER}; .*install "):
        vulkan.hardware(files(tmp_path, *names))


def test_copies_are_counted_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, by a clock that a second passes on at each look."""
    device = cpu.devices()[0]
    monkeypatch.setattr(speeds, "_BUFFER_BYTES", 16 << 20)
    monkeypatch.setattr(speeds.time, "perf_counter", itertools.count().__next__)
    made: list[Any] = []
    monkeypatch.setattr(tvm_runtime, "copy", lambda source, destination: made.append((source, destination)))
    assert speeds.copied_gb_s(device) == 2 * (16 << 20) * speeds._COPIES / 1e9
    assert len(made) == speeds._COPIES * (speeds._ROUNDS + 1) and made[0] == made[1][::-1]
    monkeypatch.setattr(type(device), "free_memory", lambda _: Card(0, "", free=1 << 20).free_memory())
    with pytest.raises(ResourceError, match="too little memory of .* to measure it; expected 128.00 MiB free"):
        speeds.copied_gb_s(device)
