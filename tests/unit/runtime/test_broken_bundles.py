"""Bundles that were damaged, altered or made for another machine: an error in words, never a wrong answer or a crash."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle.memory import running_bytes
from mlcpipe.cli import main
from mlcpipe.errors import BundleError, MlcpipeError, ResourceError, TargetError

if TYPE_CHECKING:
    from tests.conftest import Bundles

Edit = Callable[[Callable[[dict[str, Any]], None]], Path]
GREEDY = SamplingParams(temperature=0)
PROMPT = list(b"a prompt")


def answer(bundle: Path) -> list[int]:
    return Engine(bundle, threads=1).generate(PROMPT, sampling=GREEDY, max_tokens=8, ignore_eos=True).token_ids


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["lib/model.so", "params_shard_0.bin", "tensor-cache.json", "config.json", "tokenizer.json"]
)
def test_a_flipped_bit(copied: Path, name: str) -> None:
    if name == "lib/model.so":
        name = next(str(path.relative_to(copied)) for path in (copied / "lib").iterdir())
    size = (copied / name).stat().st_size
    for position in (0, size // 3, size // 2, size - 1):
        flip(copied / name, position, 4)
        with pytest.raises(BundleError, match=name):
            Engine(copied)
        flip(copied / name, position, 4)
    assert answer(copied)


def test_a_shard_that_changes_after_it_was_checked(copied: Path) -> None:
    """Its hash is remembered by size and times, so that a start is quick; a write changes them."""
    answer(copied)
    flip(copied / "params_shard_0.bin", 1000)
    with pytest.raises(BundleError, match="params_shard_0.bin"):
        Engine(copied)


def test_a_flipped_bit_in_the_manifest(copied: Path, tiny_bundles: Bundles) -> None:
    """Nothing signs it: either it is refused, or the change is in words that do not count and the answer is the same."""
    path, draw = copied / "mlcpipe.json", random.Random(5)
    whole = path.read_bytes()
    expected = answer(tiny_bundles["q0f32"])
    refused = 0
    for _ in range(60):
        flip(path, draw.randrange(len(whole)), draw.randrange(7))
        try:
            assert answer(copied) == expected
        except MlcpipeError as error:
            assert "\n" not in str(error)
            refused += 1
        path.write_bytes(whole)
    assert refused > 20


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 300), ("context_length", 4096), ("prefill_chunk", 512), ("max_batch", 32), ("kv_dtype", "float16"),
     ("num_layers", 3), ("recompute_above", 16)],
)  # fmt: skip
def test_a_manifest_that_contradicts_the_library(manifest_with: Edit, field: str, value: object) -> None:
    bundle = manifest_with(lambda manifest: manifest["model"].update({field: value}))
    with pytest.raises(BundleError, match=f"manifest and library differ in {field}"):
        Engine(bundle)


def test_another_abi(manifest_with: Edit) -> None:
    with pytest.raises(BundleError, match="another version of mlcpipe or TVM.*recompile with"):
        Engine(manifest_with(lambda manifest: manifest.update(abi="0" * 64)))


def test_another_processor(manifest_with: Edit) -> None:
    bundle = manifest_with(lambda manifest: manifest["target"]["variants"][0]["features"].append("quantum"))
    with pytest.raises(TargetError, match="a CPU with more instructions; expected this CPU to have quantum"):
        Engine(bundle)


@pytest.mark.parametrize(
    "triple",
    ["aarch64-unknown-linux-gnu", "x86_64-pc-windows-msvc", "arm64-apple-darwin23", "riscv64", "x86_64-apple-macosx"],
)
def test_another_system(manifest_with: Edit, triple: str) -> None:
    import tvm

    if triple.split("-")[0] == tvm.target.codegen.llvm_get_system_triple().split("-")[0] and "linux" in triple:
        pytest.skip("that is this system")
    with pytest.raises(TargetError, match="made for another system"):
        Engine(manifest_with(lambda manifest: manifest["target"].update(triple=triple)))


@pytest.mark.parametrize("name", ["mlcpipe.json", "tensor-cache.json", "params_shard_0.bin", "lib", "tokenizer.json"])
def test_a_missing_file(copied: Path, name: str) -> None:
    path = copied / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(BundleError):
        Engine(copied)


def test_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BundleError):
            Engine(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"].update({"../outside": m["files"]["config.json"]}),
        lambda m: m["files"].update({"/etc/passwd": m["files"]["config.json"]}),
        lambda m: m["model"].update(vocab_size=-1),
        lambda m: m["model"].update(context_length=0),
        lambda m: m["memory_plan"].update(weights_bytes=-(2**60)),
        lambda m: m["states"].pop(),
        lambda m: m["memory_plan"].update(weights_bytes=0),
        lambda m: m["memory_plan"].update(decode_weights_bytes=1),
        lambda m: m["memory_plan"]["workspace_bytes"].clear(),
        lambda m: m["files"].update({"lib/second.so": m["files"]["config.json"]}),
        lambda m: m["params"].pop(),
        lambda m: m["params"].reverse(),
        lambda m: m["params"][0].update(shape=[2**40]),
        lambda m: m["params"][0].update(name="model.norm.weight"),
    ],
)
def test_a_hostile_manifest(manifest_with: Edit, change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(BundleError):
        Engine(manifest_with(change))


# ---- memory


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets how much memory is free."""
    yield lambda free: monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))


def test_memory_is_counted_before_it_is_taken(tiny_bundles: Bundles, little_memory: Callable[[int], None]) -> None:
    manifest = Engine(tiny_bundles["q0f32"]).manifest
    kv, fixed = manifest.kv_bytes_per_token, manifest.memory_plan.weights_bytes + running_bytes(manifest)
    little_memory(fixed + 112 * kv)  # whole pages, and one
    assert Engine(tiny_bundles["q0f32"], context_length=96).context_length == 96
    with pytest.raises(ResourceError, match="not enough memory for 97 tokens of context; .*weights .*KV cache"):
        Engine(tiny_bundles["q0f32"], context_length=97)
    little_memory(0)
    with pytest.raises(ResourceError, match="not enough memory"):
        Engine(tiny_bundles["q0f32"])


@pytest.mark.full
def test_the_context_is_what_fits(demo_bundles: Bundles, little_memory: Callable[[int], None]) -> None:
    """Without a wish: as much as fits in half of what is free, at least 512 tokens."""
    manifest = Engine(demo_bundles["q4f16_1"]).manifest
    kv, fixed = manifest.kv_bytes_per_token, manifest.memory_plan.weights_bytes + running_bytes(manifest)
    little_memory(fixed + 2000 * kv)
    assert Engine(demo_bundles["q4f16_1"]).context_length == 976
    little_memory(fixed + 600 * kv)
    assert Engine(demo_bundles["q4f16_1"]).context_length == 512
    little_memory(fixed + 500 * kv)
    with pytest.raises(ResourceError, match="not enough memory for 512 tokens"):
        Engine(demo_bundles["q4f16_1"])


# ---- the command line


def test_the_command_says_it_in_one_line(
    manifest_with: Edit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLCPIPE_DEBUG", raising=False)
    bundle = manifest_with(lambda manifest: manifest["target"]["variants"][0]["features"].append("quantum"))
    assert main(["bench", str(bundle)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "quantum" in err
