"""The native runtime on a Vulkan device: the same tokens, logits and files as Python on the same device."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("torch", reason="a checkpoint is written by torch")
pytest.importorskip("transformers", reason="a checkpoint is a transformers model")

import mlcpipe
from mlcpipe import Engine
from mlcpipe.bundle import read_manifest
from tests.conftest import QUICK, TinyLlama, write_llama
from tests.models import tiny
from tests.native.conftest import private_cache
from tests.native.engine import CANCELLED, RESOURCE, TARGET, USAGE, Answer, NativeEngine, NativeError, Runtime
from tests.native.prompts import GREEDY, SETTINGS, prompt

pytestmark = pytest.mark.full  # compiles TVM's runtime
ROOT = Path(__file__).parents[2]
FAKE_LOADER = ROOT / "tests" / "vulkan" / "fake_loader.c"
CHAT = {"messages": [{"role": "user", "content": "Hello!"}]}
Copy = Callable[[Path], Path]


@pytest.fixture(scope="module")
def python(vulkan_bundle: Path) -> Engine:
    return Engine(vulkan_bundle)


@pytest.fixture
def bundle(vulkan_bundle: Path, copy_of: Copy) -> Path:
    return copy_of(vulkan_bundle)


@pytest.fixture
def native(bundle: Path, vulkan_runtime: Runtime) -> NativeEngine:
    return vulkan_runtime.open(bundle)


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_python(setting: str, native: NativeEngine, python: Engine) -> None:
    tokens, params = prompt(60, python.vocab_size), SETTINGS[setting]
    python.reset()
    expected = python.generate(tokens, sampling=params, max_tokens=60, ignore_eos=True)
    found = native.generate(tokens, params, max_tokens=60)
    assert native.device == "vulkan" and native.device_title in python.device
    assert (found.tokens, found.decode_bytes) == (expected.token_ids, expected.stats.decode_bytes)
    assert len(set(found.tokens)) > 3


def test_the_demo_conversation(native: NativeEngine, python: Engine, demo: Engine) -> None:
    """Greedy, its tokens are those of Python on the device, and of the CPU."""
    for engine in (python, demo):
        engine.reset()
    expected = [engine.chat(CHAT["messages"], sampling=GREEDY, max_tokens=60).token_ids for engine in (python, demo)]
    found = native.generate(messages=CHAT["messages"], max_tokens=60)
    assert [found.tokens] * 2 == expected
    assert found.finish == "stop" and "".join(found.pieces)


def test_logits_have_the_bits_of_python(native: NativeEngine, python: Engine) -> None:
    tokens = prompt(700, 3000)  # two chunks
    np.testing.assert_array_equal(native.logits(tokens), python.logits(tokens))


def test_the_next_turn_computes_what_is_new(native: NativeEngine, python: Engine) -> None:
    """Conversations also share what they begin with: the page where they part is copied."""
    python.reset()
    tokens = prompt(100, python.vocab_size)
    first = native.generate(tokens, max_tokens=9).tokens
    assert native.generate(tokens[:53] + [7, 8], max_tokens=3).cached_tokens == 53
    again = native.generate([*tokens, *first, 5], max_tokens=9)
    expected = python.generate([*tokens, *first, 5], sampling=GREEDY, max_tokens=9, ignore_eos=True)
    assert (again.tokens, again.cached_tokens) == (expected.token_ids, 96)


@pytest.mark.parametrize("sequences", [3, 8])
def test_each_of_several_has_the_tokens_that_it_has_alone(
    sequences: int, native: NativeEngine, bundle: Path, vulkan_runtime: Runtime
) -> None:
    asked = [(prompt(length, 250, length), params) for length, params in zip((3, 17, 60, 16, 33), SETTINGS.values())]
    asked.append((asked[2][0][:40] + [9, 9], GREEDY))  # shares pages with another
    expected = []
    for tokens, params in asked:
        native.call("reset")
        expected.append(native.generate(tokens, params, max_tokens=20).tokens)
    engine = vulkan_runtime.open(bundle, sequences=sequences)
    several = [engine.submit(tokens, params, max_tokens=20) for tokens, params in asked]
    cancelled = engine.submit(prompt(20, 250), max_tokens=20)
    engine.step()
    cancelled.cancel()
    while engine.step():
        pass
    assert isinstance(cancelled.end, NativeError) and cancelled.end.code == CANCELLED
    assert all(isinstance(one.end, Answer) for one in several)
    assert [one.tokens for one in several] == expected


@pytest.mark.full_cases("q8")
@pytest.mark.parametrize("kv_cache_dtype", ["f32", "q8"])
def test_a_saved_chat_goes_on(kv_cache_dtype: str, vulkan_runtime: Runtime, copy_of: Copy, tmp_path: Path) -> None:
    """In both runtimes, which write the same file, and on the CPU."""
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(head_dim=32))
    options = {"quantization": "q0f32", "kv_cache_dtype": kv_cache_dtype}
    bundle = mlcpipe.compile(checkpoint, target="vulkan", output=tmp_path / "gpu", **options)
    engine, native = Engine(bundle), vulkan_runtime.open(copy_of(bundle))
    tokens = prompt(30, 272)
    for one in (prompt(50, 272, 3), tokens):  # so that the chat's pages are not the first ones
        expected = engine.generate(one, sampling=GREEDY, max_tokens=9, ignore_eos=True).token_ids
        assert native.generate(one, max_tokens=9).tokens == expected
    engine.save(tmp_path / "python", chat=CHAT)
    native.save(tmp_path / "native", CHAT)
    assert (tmp_path / "native").read_bytes() == (tmp_path / "python").read_bytes()
    turn = [*tokens, *expected, 7]
    goes_on = native.generate(turn, max_tokens=20)
    native.call("reset")
    native.generate(prompt(20, 272, 4), max_tokens=1)
    assert native.restore(tmp_path / "python") == CHAT
    restored = native.generate(turn, max_tokens=20)
    assert (restored.tokens, restored.cached_tokens) == (goes_on.tokens, 38)
    cpu = mlcpipe.compile(checkpoint, target=QUICK, output=tmp_path / "cpu", **options)
    on_cpu = vulkan_runtime.open(copy_of(cpu), threads=2)
    assert (on_cpu.device, on_cpu.restore(tmp_path / "native")) == ("cpu", CHAT)
    assert on_cpu.generate(turn, max_tokens=1).tokens == goes_on.tokens[:1]


def test_rows_of_tables_are_gathered(vulkan_runtime: Runtime, copy_of: Copy, tmp_path: Path) -> None:
    """Gemma 4's for each layer, of which the device has none but those of a step; also in a batch."""
    case = tiny.TinyCase("gemma4_text", "default")
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    bundle = mlcpipe.compile(
        checkpoint, target="vulkan", output=tmp_path / "bundle", quantization="q0f32", context_length=128
    )
    python, copy = Engine(bundle), copy_of(bundle)
    assert python.manifest.model.gathered == ("model.per_layer.table.weight",)
    tokens = tiny.prompt_tokens(case, 40)
    native, logits = vulkan_runtime.open(copy), python.logits(tokens)
    np.testing.assert_allclose(logits, tiny.reference_logits(case, tokens), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(native.logits(tokens), logits)
    expected = python.generate(tokens, sampling=SETTINGS["greedy"], max_tokens=12, ignore_eos=True).token_ids
    assert native.generate(tokens, SETTINGS["greedy"], max_tokens=12).tokens == expected
    native.close()
    several = vulkan_runtime.open(copy, sequences=2)
    answers = [several.submit(tokens[:length], SETTINGS["greedy"], max_tokens=12) for length in (40, 20)]
    while several.step():
        pass
    shorter = python.generate(tokens[:20], sampling=SETTINGS["greedy"], max_tokens=12, ignore_eos=True).token_ids
    assert [one.tokens for one in answers] == [expected, shorter]
    several.close()
    manifest = json.loads((copy / "mlcpipe.json").read_text())
    manifest["model"]["gathered"].append("model.norm.weight")
    (copy / "mlcpipe.json").write_text(json.dumps(manifest))
    with pytest.raises(NativeError, match="field gathered .* expected parameters that are matrices, each once"):
        vulkan_runtime.open(copy)


def test_the_plan_refuses_in_words(bundle: Path, vulkan_runtime: Runtime) -> None:
    """What a bundle takes is known before anything is loaded."""
    stated = read_manifest(bundle)
    plan = vulkan_runtime.plan(bundle, context_length=128)
    expected = (stated.memory_plan.weights_bytes, 144 * stated.kv_bytes_per_token)
    assert (plan.weights_bytes, plan.kv_bytes) == expected
    assert plan.fits and 0 < plan.free_bytes <= psutil.virtual_memory().total
    manifest = json.loads((bundle / "mlcpipe.json").read_text())
    manifest["memory_plan"]["weights_bytes"] = 1 << 44
    (bundle / "mlcpipe.json").write_text(json.dumps(manifest))
    assert not vulkan_runtime.plan(bundle).fits
    with pytest.raises(
        NativeError, match=r"not enough memory for .* weights 16777216 MiB, .* within .*llvmpipe"
    ) as refused:
        vulkan_runtime.open(bundle)
    assert refused.value.code == RESOURCE


def test_a_cancel_waits_for_one_chunk(bundle: Path, vulkan_runtime: Runtime) -> None:
    native = vulkan_runtime.open(bundle, context_length=1600)
    tokens = prompt(native.context_length - 20, native.vocab_size)
    timer = threading.Timer(0.05, native.call, ("cancel",))
    timer.start()
    with pytest.raises(NativeError) as cancelled:
        native.generate(tokens, max_tokens=1)
    timer.join()
    assert cancelled.value.code == CANCELLED
    kept = native.generate(tokens[:-1], max_tokens=1).cached_tokens
    assert kept % 512 == 0 and kept < len(tokens) - 512


def test_trim_gives_memory_back(vulkan_runtime: Runtime, copy_of: Copy, tmp_path: Path) -> None:
    """With the pages of all conversations forgotten; a chat keeps its pages."""
    model = TinyLlama(head_dim=32, heads=4, kv_heads=4, layers=4, positions=1 << 15)
    checkpoint = write_llama(tmp_path / "checkpoint", model)
    bundle = mlcpipe.compile(
        checkpoint, target="vulkan", quantization="q0f32", kv_cache_dtype="f32", output=tmp_path / "gpu"
    )
    native, process = vulkan_runtime.open(copy_of(bundle), context_length=1 << 15), psutil.Process()
    kv_bytes, tokens = vulkan_runtime.plan(bundle, context_length=1 << 15).kv_bytes, prompt(100, 272)
    assert kv_bytes == (128 << 20) + (64 << 10)
    expected = native.generate(tokens, max_tokens=9).tokens
    native.call("trim")
    assert native.generate([*tokens, 3], max_tokens=1).cached_tokens == 100
    before = process.memory_info().vms
    native.call("reset")
    native.call("trim")
    assert process.memory_info().vms < before - kv_bytes // 2
    assert native.generate(tokens, max_tokens=9).tokens == expected


def test_another_device_than_the_code_is_for(
    bundle: Path, vulkan_runtime: Runtime, runtime: Runtime, copy_of: Copy, demo_bundles: Any
) -> None:
    for open_it, code, words in (
        (lambda: vulkan_runtime.open(bundle, device="cpu"), TARGET, "expected code for cpu; found code for vulkan"),
        (
            lambda: vulkan_runtime.open(bundle, device="gpu"),
            USAGE,
            "device; expected cpu, vulkan, metal or auto; found gpu",
        ),
        (
            lambda: vulkan_runtime.open(copy_of(demo_bundles["q4f16_1"]), device="vulkan"),
            TARGET,
            "expected code for vulkan; found code for cpu; compile the model with --target vulkan",
        ),
        (lambda: runtime.open(bundle), TARGET, "expected a runtime that was built with MLCPIPE_VULKAN"),
    ):
        with pytest.raises(NativeError, match=words) as refused:
            open_it()
        assert refused.value.code == code


@pytest.fixture(scope="module")
def fake(vulkan_runtime: Runtime, python: Engine, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`fake(CACHE, BUNDLE, [GPU BUNDLE], FAKE_...="")`: what `vulkan_scenario` prints, with a loader of ours below it."""
    folder = tmp_path_factory.mktemp("fake")
    compiler = shutil.which("cc") or shutil.which("gcc")
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(folder / "libvulkan.so.1"), str(FAKE_LOADER)]
    subprocess.run([str(compiler), *flags, "-ldl"], check=True, timeout=120)
    lines = Path("/proc/self/maps").read_text().splitlines()
    real = next(line.split()[-1] for line in lines if "/libvulkan.so.1" in line)

    def start(cache: Path, *bundles: Path, **changes: str) -> Any:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_REAL": real, **changes}
        arguments = [vulkan_runtime.library._name, str(cache), *map(str, bundles)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.native.vulkan_scenario", *arguments],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return start


def test_drivers_that_cannot_be_trusted(fake: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    """One whose kernels compute nothing, one of an old Vulkan, and none at all: each is refused in words."""
    cache = tmp_path / "cache"
    idle = fake(cache, bundle, FAKE_IDLE="1")
    assert "computes wrong numbers in the driver check arithmetic" in idle["error"] and idle["code"] == TARGET
    assert not list(cache.glob("checked-*"))  # what failed is not kept
    old = fake(cache, bundle, FAKE_VERSION=str(1 << 22 | 1 << 12))
    assert "no Vulkan device can be used" in old["error"] and "1.2" in old["error"] and old["code"] == TARGET
    none = fake(cache, bundle, FAKE_REAL="/nowhere/libvulkan.so.1")
    assert none["code"] == TARGET and "install the GPU's driver" in none["error"]
    passed = fake(cache, bundle)
    assert len(passed["tokens"]) == 5
    assert [path.stat().st_size for path in cache.glob("checked-*")] == [0]
    assert list(cache.glob("pipelines-*"))  # compiled kernels, for the next process
    assert fake(cache, bundle) == passed


def test_what_passed_is_not_checked_again(fake: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    """A driver that computes nothing passes where a file says that it did: the model's numbers are refused then."""
    fake(tmp_path, bundle)
    assert "driver check" not in str(fake(tmp_path, bundle, FAKE_IDLE="1"))


def test_auto_measures_once(
    bundle: Path, vulkan_runtime: Runtime, copy_of: Copy, demo_bundles: Any, tiny_bundles: Any, tmp_path: Path
) -> None:
    """lavapipe is slower than the CPU that it runs on; a file that says otherwise is believed."""
    cpu, cache = copy_of(demo_bundles["q4f16_1"]), tmp_path / "a" / "cache"
    options = {"device": "auto", "cache": cache, "gpu_path": bundle}
    engine = vulkan_runtime.open(cpu, **options)
    assert engine.device == "cpu" and len(engine.generate([1, 2, 3], max_tokens=3).tokens) == 3
    (choice,) = cache.glob("faster-*")
    assert re.fullmatch(r"cpu of [\d.]+ s on the CPU, [\d.]+ s on the GPU", choice.read_text())
    choice.write_text("gpu")
    assert vulkan_runtime.open(cpu, **options).device == "cpu"  # as measured in this process
    with pytest.raises(NativeError, match="gpu_path names a bundle of another model") as refused:
        vulkan_runtime.open(copy_of(tiny_bundles["q4f16_1"]), **options)
    assert refused.value.code == USAGE


def test_auto_takes_a_gpu_that_is_faster(
    fake: Callable[..., Any], bundle: Path, copy_of: Copy, demo_bundles: Any, tmp_path: Path
) -> None:
    """As a file of an earlier process says; never one whose driver does not pass."""
    cpu, cache = copy_of(demo_bundles["q4f16_1"]), tmp_path / "cache"
    assert fake(cache, cpu, bundle)["device"] == "cpu"
    (choice,) = cache.glob("faster-*")
    choice.write_text("gpu of another time")
    assert fake(cache, cpu, bundle)["device"] == "vulkan"
    for path in cache.iterdir():
        path.unlink()
    assert fake(cache, cpu, bundle, FAKE_IDLE="1")["device"] == "cpu"
    assert "none on the GPU" in next(cache.glob("faster-*")).read_text()
    assert fake(cache, cpu, bundle, FAKE_REAL="/nowhere/libvulkan.so.1")["device"] == "cpu"


def test_the_command_line_on_a_device(
    vulkan_plugin: Any, native: NativeEngine, bundle: Path, shared: Path, tmp_path: Path
) -> None:
    from mlcpipe.compiler.link import find_cxx
    from mlcpipe.compiler.native_runtime import write_program

    program, home = tmp_path / "chat", tmp_path / "cache"
    write_program(find_cxx(), private_cache(shared), None, program, plugin=vulkan_plugin)

    def run(*options: str) -> Any:
        command = [str(program), "-m", str(bundle), "--greedy", "--max-tokens", "9", "-p", "Hello!", *options]
        environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)

    done = run("--device", "vulkan")
    expected = native.generate(messages=CHAT["messages"], max_tokens=9)
    assert (done.returncode, done.stdout.strip()) == (0, "".join(expected.pieces).strip()), done.stderr
    assert list((home / "mlcpipe" / "native").glob("checked-*"))
    refused = run("--device", "cpu")
    assert refused.returncode == 2 and "expected code for cpu; found code for vulkan" in refused.stderr
    assert "--gpu-model has no effect" in run("--gpu-model", str(bundle)).stderr


def test_code_that_is_linked_into_the_program(
    vulkan_plugin: Any, vulkan_runtime: Runtime, copy_of: Copy, tiny_bundles: Any, shared: Path, tmp_path: Path
) -> None:
    from mlcpipe.compiler.container import write_container
    from mlcpipe.compiler.link import find_cxx, find_zig
    from mlcpipe.compiler.native_runtime import object_files
    from mlcpipe.support.progress import SilentProgress

    if find_zig() is None:
        pytest.skip("static libraries need ziglang")
    (tmp_path / "board.toml").write_text('base = "vulkan"\narchive = true\n')
    bundle = mlcpipe.compile(
        tiny_bundles.checkpoint, target=str(tmp_path / "board.toml"), quantization="q4f16_1", output=tmp_path / "bundle"
    )
    compiler, app = find_cxx(), tmp_path / "libapp.so"
    objects = object_files(compiler, private_cache(shared), vulkan_plugin)
    archive = ["-Wl,--whole-archive", str(bundle / "lib" / "libmodel.a"), "-Wl,--no-whole-archive"]
    compiler.run(["-shared", "-pthread", *map(str, objects), *archive, "-lm", "-ldl", "-o", str(app)])
    expected = vulkan_runtime.open(copy_of(bundle)).generate(prompt(20, 272), max_tokens=9)
    data = write_container(bundle, tmp_path / "model.mlcp", SilentProgress())  # without code
    assert Runtime(app).open(data).generate(prompt(20, 272), max_tokens=9).tokens == expected.tokens


@pytest.mark.full_cases("android-adreno")  # kernels of both: tests/kernels/test_golden.py
@pytest.mark.parametrize("target", ["android-adreno", "android-mali"])
def test_targets_for_phones(target: str, vulkan_bundle: Path, tiny_bundles: Any, tmp_path: Path) -> None:
    """Linked for Android, and in a project with the runtime's sources for Vulkan. No phone has run them."""
    from mlcpipe.cli import main
    from mlcpipe.compiler.link import find_zig

    if find_zig() is None:
        pytest.skip("code for Android needs ziglang")
    bundle = mlcpipe.compile(tiny_bundles.checkpoint, target=target, quantization="q4f16_1", output=tmp_path / "tiny")
    manifest = read_manifest(bundle)
    assert (manifest.target.triple, manifest.model.prefill_chunk) == ("aarch64-linux-android", 128)
    code = (bundle / "lib" / "model.so").read_bytes()
    assert (code[:4], int.from_bytes(code[18:20], "little")) == (b"\x7fELF", 183)  # AArch64
    assert main(["package", str(bundle), "--app", "android", "-o", str(tmp_path / "project")]) == 0
    runtime = tmp_path / "project" / "mlcpipe" / "src" / "main" / "cpp" / "runtime"
    assert "set(kinds vulkan)" in (runtime / "CMakeLists.txt").read_text()
    assert (runtime / "src" / "vulkan" / "plugin.cc").is_file()
