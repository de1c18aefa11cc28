"""The Android library on a JVM of this machine: Kotlin, JNI and the native runtime answer as Python's engine does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlcpipe import Engine
from mlcpipe.cli import main
from mlcpipe.compiler.native_runtime import DevicePlugin
from tests.conftest import Bundles
from tests.native.android.answers import QUESTIONS, conversation
from tests.native.android.conftest import Scenario, jdk, link_jni, scenario_in
from tests.native.conftest import private_cache
from tests.native.cxx import ROOT
from tests.native.engine import Runtime

pytestmark = pytest.mark.full  # compiles Kotlin, and TVM's runtime


@pytest.fixture
def demo(demo_bundles: Bundles) -> Path:
    return demo_bundles["q4f16_1"]


@pytest.fixture
def endless(tiny_bundles: Bundles) -> Path:
    """A model that continues until its context is full."""
    return tiny_bundles["q4f16_1"]


def test_the_demo_conversation_is_python_s(scenario: Scenario, demo: Path) -> None:
    said = scenario("conversation", demo, "", *QUESTIONS)
    ours = [(answer["prompt"], answer["text"], answer["tokens"][2]) for answer in said]
    assert ours == conversation(Engine(demo))
    assert said[1]["tokens"][1] > said[0]["tokens"][0]  # the second prompt begins as the first, with its answer


def test_a_cancelled_coroutine_ends_its_answer(scenario: Scenario, endless: Path, tmp_path: Path) -> None:
    (said,) = scenario("cancel", endless, tmp_path / "chat")
    assert said["until"] < 0.2 * said["whole"]
    assert said["kept"] == ["user", "assistant"] * 2 and said["first"] == said["chunks"] == 3 and said["said"]


def test_close_during_an_answer(scenario: Scenario, endless: Path) -> None:
    said = scenario("close", endless)
    assert [line["code"] for line in said] == ["CANCELLED", "USAGE", "USAGE", "USAGE"] * 2
    assert all("engine" in line["line"] for line in said if line["code"] == "USAGE")


def test_coroutines_take_turns(scenario: Scenario, demo: Path) -> None:
    said = scenario("together", demo)
    (answer,) = set(said[0]["answers"])
    assert said[1]["code"] == "USAGE" and "is running" in said[1]["line"] and said[2]["said"] == 0
    assert said[3]["inner"] == [answer] and said[4]["thrown"] == "of the collector" and said[5]["after"] == answer


def test_a_request_that_cannot_be_honoured_is_an_exception(scenario: Scenario, demo: Path) -> None:
    *said, path, context = scenario("refused", demo)
    after = said.pop()
    codes = {line["name"]: line["code"] for line in [*said, path, context]}
    assert codes.pop("surrogate") is None  # it becomes U+FFFD
    assert codes.pop("role") is None  # of which this template asks nothing
    assert set(codes.values()) == {"USAGE"} and len(codes) == 11, codes
    assert "tokens" in next(line["line"] for line in said if line["name"] == "prompt of 10 MB")
    assert after["after"]


def test_files_that_are_no_model(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    data = tmp_path / "model.mlcp"
    assert main(["package", str(demo), "--app", "weights", "-o", str(data)]) == 0
    content = data.read_bytes()
    at = content.index(b'"abi')
    damaged = {
        "cut": content[:-100],
        "half": content[: len(content) // 2],
        "altered": content[:-20] + b"\0" + content[-19:],
        "abi": content[: at + 12] + b"#" + content[at + 13 :],
        "empty": b"",
        "text": b"no model\n" * 1000,
    }
    for file in ("template.bin", "tokenizer.bin"):
        inside = content.index((demo / file).read_bytes()) + 100
        damaged[file] = content[:inside] + bytes([content[inside] ^ 1]) + content[inside + 1 :]
    for name, bytes_ in damaged.items():
        (tmp_path / name).write_bytes(bytes_)
    os.mkfifo(tmp_path / "pipe")
    shutil.copytree(demo, tmp_path / "bundle")
    (tmp_path / "bundle" / "tensor-cache.json").unlink()
    paths = [*damaged, "pipe", "bundle", "missing", ".", "model.mlcp"]
    said = scenario("open", *(tmp_path / name for name in paths), "")
    assert {line["code"] for line in said} == {"BUNDLE"}, said
    assert "code" in said[-2]["line"]  # weights alone
    assert all("; " in line["line"] or " in " in line["line"] for line in said)


def test_descriptors(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    """A pipe, none, a part that is not in the file, and code that lacks: the descriptor stays open throughout."""
    data = tmp_path / "model.mlcp"
    assert main(["package", str(demo), "--app", "weights", "-o", str(data)]) == 0
    said = scenario("descriptors", data)
    assert [line["code"] for line in said] == ["BUNDLE"] * 6, said
    assert "code" in said[-1]["line"]


def test_weights_that_are_removed_while_they_are_used(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    shutil.copytree(demo, tmp_path / "bundle")
    before, after, again = scenario("removed", tmp_path / "bundle")
    assert before == after and again["code"] == "BUNDLE"


def test_a_model_without_memory_for_it(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    """The plan says so before anything is loaded, and so does what opens it."""
    path = shutil.copytree(demo, tmp_path / "bundle") / "mlcpipe.json"
    manifest = json.loads(path.read_text())
    manifest["memory_plan"]["weights_bytes"] = 1 << 44
    path.write_text(json.dumps(manifest))
    plan, opened, session, state = scenario("memory", path.parent)
    assert (plan["fits"], plan["weights"]) == (False, 1 << 44) and 0 < plan["free"] < 1 << 44
    for said in (opened, session):
        assert said["code"] == "RESOURCE" and "not enough memory for" in said["line"], said
        assert "weights 16777216 MiB, KV cache" in said["line"] and "use a shorter context" in said["line"]
    assert state == {"state": "Failed", "files": [False]}


def test_a_context_that_is_full(scenario: Scenario, demo: Path) -> None:
    refused, chat, answer = scenario("context", demo)
    assert refused["code"] == "USAGE" and "the context is full; expected at most 128 tokens" in refused["line"]
    assert chat["answers"] > 1 and chat["messages"] == 2 * chat["answers"] and answer["answer"]


def test_a_device(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    """The CPU has a name; a kind that the library was built without, and what is no kind, are refused in words."""
    for name in ("cpu", "auto"):
        said, answer, opened = scenario("device", demo, name, tmp_path)
        assert said == {"device": "cpu", "title": ""} and answer["answer"] and opened["code"] is None
    (missing,) = scenario("device", demo, "vulkan", tmp_path)
    assert missing["code"] == "TARGET" and "expected code for vulkan; found code for cpu" in missing["line"]
    (unknown,) = scenario("device", demo, "toaster", tmp_path)
    assert unknown["code"] == "USAGE" and "cpu, vulkan, metal or auto; found toaster" in unknown["line"]


def test_a_gpu(
    library_and_classes: tuple[Path, Path],
    vulkan_plugin: DevicePlugin,
    vulkan_bundle: Path,
    demo: Path,
    shared: Path,
    tmp_path: Path,
) -> None:
    """A library with Vulkan answers on it as on the CPU; `auto` takes the CPU on lavapipe, which is slower."""
    link_jni(tmp_path / "libmlcpipe.so", private_cache(shared), plugin=vulkan_plugin)
    scenario = scenario_in([jdk() / "bin" / "java", "-Xcheck:jni"], tmp_path, library_and_classes[1])
    cache = tmp_path / "cache"
    on_cpu = scenario("device", demo, "cpu", cache)
    for name in ("vulkan", "auto"):
        said, answer, opened = scenario("device", vulkan_bundle, name, cache)
        assert said["device"] == "vulkan" and said["title"] and (answer, opened["code"]) == (on_cpu[1], None)
    assert list(cache.glob("checked-*")) and list(cache.glob("pipelines-*"))
    assert scenario("device", demo, "auto", cache, vulkan_bundle)[:2] == on_cpu[:2]
    (choice,) = cache.glob("faster-*")
    choice.write_text("gpu, of another time")
    assert scenario("device", demo, "auto", cache, vulkan_bundle)[0]["device"] == "vulkan"


def test_a_full_disk(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mount is not permitted here")
    try:
        saved, after, dropped, said = scenario("full", demo, disk / "chat")
        assert saved["code"] == "RESOURCE" and after["code"] is None
        assert dropped["code"] is None and said == {"messages": 4, "files": []}
    finally:
        subprocess.run(["umount", disk], check=True)


def test_code_that_is_none(scenario: Scenario, tmp_path: Path) -> None:
    (tmp_path / "libmodel.so").write_text("no library")
    for name in ("libmodel.so", "missing.so"):
        (said,) = scenario("code", tmp_path / name)
        assert said["code"] == "BUNDLE" and name in said["line"]


def test_a_saved_chat_goes_on_in_another_process(scenario: Scenario, demo: Path, tmp_path: Path) -> None:
    (saved,) = scenario("save", demo, tmp_path / "chat")
    (restored,) = scenario("restore", demo, tmp_path / "chat")
    assert restored.pop("cached") > 10 and restored == saved


def test_a_model_takes_the_memory_that_it_takes_without_java(
    scenario: Scenario, demo: Path, runtime: Runtime, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.native.first_token", runtime.library._name, demo, 1]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    native, kotlin = json.loads(done.stdout)["private_bytes"], scenario("first", demo, 2)[1]["private_bytes"]
    assert native > 256 << 10 and kotlin < native + (8 << 20), (native, kotlin)


@pytest.mark.everything
def test_memory_does_not_grow(scenario: Scenario, endless: Path) -> None:
    (said,) = scenario("growth", endless, 10_000, 1000)
    assert said["after"] - said["before"] < 16 << 20
