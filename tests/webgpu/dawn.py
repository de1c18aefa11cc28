"""Running WebGPU libraries in Node: tvmjs on Dawn, over the Vulkan driver that there is, as a rule SwiftShader."""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_FOLDER = Path(__file__).parent
# Chromium brings a Vulkan driver for the CPU; Debian's loader does not know of it.
_SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
# https://github.com/KhronosGroup/Vulkan-Loader/blob/main/docs/LoaderDriverInterface.md
_LOADER_FOLDERS = ("/etc", "/usr/local/share", "/usr/share")
_TIMEOUT_S = 300


def missing() -> str:
    """Why nothing can run here, "" if it can."""
    if shutil.which("emcc") is None:
        return "emcc is not installed"
    if shutil.which("node") is None:
        return "node is not installed"
    if not (_FOLDER / "node_modules" / "webgpu").is_dir():
        return "no packages: npm ci --prefix tests/webgpu"
    if "VK_ICD_FILENAMES" not in os.environ and not _SWIFTSHADER.is_file():
        return "no Vulkan driver: install chromium, or set VK_ICD_FILENAMES"
    return ""


@dataclass(frozen=True)
class Run:
    """A greedy generation: its tokens, and the logits f32[steps, V] that chose them.

    `largest_buffer`: bytes of the largest one that kernels could bind, of all since the library was loaded.
    """

    tokens: list[int]
    logits: Array
    largest_buffer: int


def generate(
    bundle: Path, prompts: Sequence[Sequence[int]], count: int, context: int, chunk: int, driver: str = ""
) -> list[Run]:
    """Greedy tokens of a bundle for each prompt, from an empty cache; with a Vulkan driver of one's own choice."""
    job = {
        "bundle": str(bundle),
        "context": context,
        "chunk": chunk,
        "logits": True,
        "generate": [{"tokens": list(map(int, prompt)), "count": count} for prompt in prompts],
    }
    found = _node(job, driver)
    largest = found["largestBuffer"]
    return [
        Run(run["tokens"], np.stack([_decoded(x).ravel() for x in run["logits"]]), largest) for run in found["runs"]
    ]


@dataclass(frozen=True)
class Turn:
    """A prompt for the chat page's own engine; the first `said` tokens are those that the next begins with.

    `sampling`: what is not greedy, in the page's words.
    """

    tokens: Sequence[int]
    said: int
    count: int
    sampling: Mapping[str, float] = field(default_factory=dict)


def chat(bundle: Path, engine: Path, turns: Sequence[Turn], context: int, driver: str = "") -> list[dict[str, Any]]:
    """Answers of the page's engine, one turn after another: `tokens`, and how many of the prompt were `reused`."""
    asked = [
        {"tokens": list(map(int, t.tokens)), "said": t.said, "sampling": {**t.sampling, "maxTokens": t.count}}
        for t in turns
    ]
    job = {"bundle": str(bundle), "engine": str(engine), "context": context, "turns": asked}
    answers: list[dict[str, Any]] = _node(job, driver)["answers"]
    return answers


@dataclass(frozen=True)
class Call:
    """A function of a library, its arguments, and which of them are read afterwards."""

    name: str
    args: tuple[Array | int, ...]
    outputs: tuple[int, ...]


def call(wasm: Path, calls: Sequence[Call]) -> list[list[Array]]:
    """The outputs of each call."""
    encoded = [{"name": c.name, "args": [_encoded(a) for a in c.args], "outputs": list(c.outputs)} for c in calls]
    results = _node({"wasm": str(wasm), "calls": encoded})["results"]
    return [[_decoded(output) for output in result] for result in results]


def _encoded(value: Array | int) -> Any:
    if isinstance(value, int):
        return value
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"shape": list(value.shape), "dtype": str(value.dtype), "data": data}


def _decoded(tensor: Mapping[str, Any]) -> Array:
    return np.frombuffer(base64.b64decode(tensor["data"]), tensor["dtype"]).reshape(tensor["shape"]).copy()


@functools.cache
def driver_with(feature: str, lanes: int = 0) -> str:
    """The file of a Vulkan driver whose adapter has a feature of WebGPU, and subgroups of one size; "" if there is none.

    The one that the environment names, or else those in `drivers` and where Vulkan's loader looks.
    """
    named = os.environ.get("VK_ICD_FILENAMES")
    folders = (_FOLDER / "drivers", *(Path(folder, "vulkan", "icd.d") for folder in _LOADER_FOLDERS))
    for path in [named] if named else [str(p) for folder in folders for p in sorted(folder.glob("*.json"))]:
        found = _node({"probe": True}, path)
        if feature in found["features"] and (not lanes or found["subgroups"] == [lanes, lanes]):
            return path
    return ""


def usual_driver() -> str:
    """The Vulkan driver that the environment names, or Chromium's."""
    return os.environ.get("VK_ICD_FILENAMES", str(_SWIFTSHADER))


def _node(job: Mapping[str, Any], driver: str = "") -> dict[str, Any]:
    driver = driver or usual_driver()
    environment = {**os.environ, "VK_ICD_FILENAMES": driver}
    done = subprocess.run(
        ["node", str(_FOLDER / "dawn.cjs")],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["errors"] == [], found["errors"][0][:2000]
    return found
