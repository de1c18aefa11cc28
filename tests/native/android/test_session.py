"""A chat session of the Android library on a JVM: its states, memory, heat, and a process that ends while it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Bundles
from tests.native.android.conftest import Scenario

pytestmark = pytest.mark.full  # compiles Kotlin


@pytest.fixture
def demo(demo_bundles: Bundles) -> Path:
    return demo_bundles["q4f16_1"]


def test_a_dropped_model_goes_on(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    first, closed, refused, other, damaged, cleared = scenario("dropped", demo, tmp_path / "chat")
    assert first["states"] == [
        "Dropped",
        "Loading",
        "Ready",
        "Busy",
        "Ready",
        "Dropped",
        "Loading",
        "Ready",
        "Busy",
        "Ready",
    ]
    assert first["cached"] > 5 and first["messages"] == ["user", "assistant"] * 2
    assert closed["closed"] == "Dropped" and refused["code"] == "USAGE" and "closed" in refused["line"]
    assert other == {"continued": True, "mark": False}
    assert damaged == {"cached": 0, "messages": 6} and cleared["cleared"] == 0 and cleared["answer"]


def test_memory_that_is_wanted_ends_the_answer(scenario: Scenario, tiny_bundles: Bundles, tmp_path: Path) -> None:
    ended, dropped, twice, again = scenario("droppedMeanwhile", tiny_bundles["q4f16_1"], tmp_path / "chat")
    assert ended["code"] == "CANCELLED" and "memory" in ended["line"]
    assert dropped == {"messages": ["user", "assistant"], "state": "Dropped"}
    assert twice["code"] == "USAGE" and "is running" in twice["line"]
    assert again == {"again": 1, "state": "Ready"}


def test_a_load_that_ended_the_process_is_not_repeated_unasked(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    assert scenario("killed", demo, tmp_path / "chat", "kill") == []
    unasked, message, asked, later = scenario("killed", demo, tmp_path / "chat", "")
    assert unasked["code"] == message["code"] == "RESOURCE" and "ended while it loaded" in unasked["line"]
    assert asked == {"state": "Failed RESOURCE", "again": "Ready"} and later["code"] is None


def test_an_answer_is_held(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    held, same, cancelled = scenario("paused", demo, tmp_path / "chat")
    assert held == {"held": True, "state": "Busy"} and same["same"] and cancelled["cancelled"]


def test_a_hot_device_computes_with_fewer_threads(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    at, asks, threads = scenario("hot", demo, tmp_path / "chat")
    assert at == {"four": [4, 4, 3, 2, 1, 1, 1], "one": [1] * 7}
    assert asks["asks"] == [15, 40, 60, 80]  # all but moderate and low while running, and a hidden user interface
    assert threads == {"threads": [4, 2, 1], "opened": 1}
