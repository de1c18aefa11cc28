"""`mlcpipe.load`: what may be named, what is compiled once, and mistakes that are told before any work."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlcpipe
from mlcpipe import cli, loading
from mlcpipe.cli import main
from mlcpipe.compiler import automatic
from mlcpipe.compiler.preflight import Purpose
from mlcpipe.errors import ConfigError, DownloadError, MlcpipeError, TargetError, TemplateError, UsageError
from mlcpipe.support.defaults import CHAT, EMBED
from mlcpipe.support.progress import SilentProgress
from mlcpipe.support.resources import demo_model_path
from tests.conftest import Bundles, linked_cache, write_llama
from tests.unit.cards import Cards, install

QUESTION = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture
def cache(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("MLCPIPE_CACHE", str(linked_cache(tmp_path / "cache", shared)))
    return tmp_path / "cache"


@pytest.fixture
def cards(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """A GPU that gains for models of any size."""
    monkeypatch.setattr(automatic, "STEP_S", 0.0)
    return install(monkeypatch, cache)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """(target, quantization) of each compilation, and a method if one was asked for; it makes an empty bundle."""
    made: list[tuple[str, ...]] = []

    def compile(
        checkpoint: Path, target: str, quantization: str, output: Path, method: str | None, **options: Any
    ) -> None:
        made.append((target, quantization, *filter(None, [method])))
        output.mkdir(parents=True)
        (output / "mlcpipe.json").write_text("{}")

    monkeypatch.setattr(mlcpipe, "compile", compile)
    return made


def test_a_checkpoint_is_compiled_once_and_runs(cache: Path) -> None:
    engine = mlcpipe.load(quantization="q4f16_1", context_length=256, threads=1)
    assert engine.on_host and engine.threads == 1 and engine.context_length == 256
    assert engine.manifest.target.name == "cpu-native" and engine.manifest.quantization == "q4f16_1"
    bundles = list((cache / "bundles").iterdir())
    again = mlcpipe.load(demo_model_path(), "cpu", "q4f16_1")
    assert list((cache / "bundles").iterdir()) == bundles
    greedy = mlcpipe.SamplingParams(temperature=0)
    texts = [e.chat(QUESTION, sampling=greedy, max_tokens=16).text for e in (engine, again, mlcpipe.load(bundles[0]))]
    assert texts[0] and texts == [texts[0]] * 3


def test_target_and_quantization_have_bundles_of_their_own(
    cache: Path, compiled: list[tuple[str, ...]], tmp_path: Path
) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    for _ in range(2):
        for quantization in (None, "q4f16_m", "q8f16_1"):
            for target in (None, "cpu"):
                loading.prepare_bundle(checkpoint, quantization=quantization, target=target)
    assert compiled == [("cpu-native", "q4f16_m"), ("cpu", "q4f16_m"), ("cpu-native", "q8f16_1"), ("cpu", "q8f16_1")]


def test_the_best_has_a_bundle_of_its_own(cache: Path, compiled: list[tuple[str, ...]], tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    bundles = [loading.prepare_bundle(checkpoint, best=best) for best in (True, False, True)]
    assert compiled == [("cpu-native", "q4f16_m", "gptq"), ("cpu-native", "q4f16_m")]
    assert bundles[0] == bundles[2] != bundles[1]
    with pytest.raises(UsageError, match="--best has no effect on a bundle"):
        loading.prepare_bundle(bundles[0], best=True)
    for quantization in ("keep", "q8f16_1"):
        with pytest.raises(
            UsageError, match=f"--method gptq has no effect on {quantization}.*leave it, or --best, out"
        ):
            loading.prepare_bundle(checkpoint, quantization=quantization, best=True)
    assert len(compiled) == 2


def test_new_tuning_records_need_a_new_bundle(cache: Path, compiled: list[tuple[str, ...]], tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    for content in (None, "records", "other records"):
        if content is not None:
            (cache / "tuned").mkdir(exist_ok=True)
            (cache / "tuned" / "cpu.json").write_text(content)
        loading.prepare_bundle(checkpoint)
    assert len(compiled) == 3


def test_each_kv_cache_dtype_has_a_bundle(cache: Path, compiled: list[tuple[str, ...]], tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    bundles = [loading.prepare_bundle(checkpoint, kv_cache_dtype=dtype) for dtype in (None, "auto", "q8", "q8")]
    assert bundles[0] == bundles[1] != bundles[2] == bundles[3] and len(compiled) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"device": "toaster"}, UsageError, "there is no such device; expected cpu, cuda or metal; found 'toaster'; "),
        ({"device": "gpu"}, UsageError, "expected vulkan, cuda or metal; found 'gpu'; `mlcpipe doctor` lists"),
        ({"device": "MPS"}, UsageError, "expected metal; found 'MPS'"),
        ({"device": "Vulkan:1"}, UsageError, "expected vulkan; found 'Vulkan'"),
        ({"device": "cpu:1"}, UsageError, "no device cpu:1"),
        ({"device": "auto:0"}, UsageError, "no such device"),
        ({"device": ""}, UsageError, "no such device"),
        ({"quantization": "q9"}, ConfigError, "q9"),
        ({"kv_cache_dtype": "q9"}, ConfigError, "expected auto, f32, f16, q8, q4; found q9"),
        ({"target": "toaster"}, TargetError, "expected one such as cpu, vulkan or webgpu; found toaster"),
        ({"target": "CPU"}, TargetError, "unknown target; expected cpu; found CPU; `mlcpipe doctor` lists all"),
        ({"target": "auto"}, TargetError, "expected cpu or cpu-native; found auto"),
        ({"target": "wasm"}, TargetError, "expected webgpu; found wasm"),
        ({"target": "gpu"}, TargetError, "expected vulkan, cuda or metal; found gpu"),
        ({"target": "nvidia-rtz"}, TargetError, "expected nvidia-rtx"),
        ({"target": "mps"}, TargetError, "expected metal; found mps"),
        ({"target": "cpu", "device": "vulkan"}, UsageError, "expected a target for vulkan; found cpu"),
        ({"target": "webgpu"}, UsageError, "run in browsers"),
        ({"model": "no/such/folder"}, MlcpipeError, "no/such/folder"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_the_work(
    cache: Path, compiled: list[tuple[str, ...]], arguments: dict[str, Any], error: type[MlcpipeError], words: str
) -> None:
    with pytest.raises(error) as caught:
        mlcpipe.load(**arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value) and not compiled


@pytest.mark.parametrize(
    ("lost", "arguments", "words"),
    [
        ("tokenizer.json", {"task": CHAT}, "no tokenizer in CHECKPOINT; expected tokenizer.json"),
        ("tokenizer_config.json", {"task": CHAT}, "the model has no chat template in CHECKPOINT"),
        ("", {"task": CHAT, "context": 99_999_999}, "--context; expected 1 to the model's"),
        ("", {"task": EMBED}, "no embeddings in CHECKPOINT; expected an encoder; type: mlcpipe chat CHECKPOINT"),
    ],
)
def test_a_checkpoint_is_judged_for_its_task(
    cache: Path, compiled: list[tuple[str, ...]], tmp_path: Path, lost: str, arguments: dict[str, Any], words: str
) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    if lost:
        (checkpoint / lost).unlink()
    with pytest.raises(MlcpipeError) as caught:
        loading.prepare_bundle(checkpoint, **arguments)
    assert words.replace("CHECKPOINT", str(checkpoint)) in str(caught.value) and not compiled
    assert loading.prepare_bundle(checkpoint)


@pytest.mark.parametrize(
    ("arguments", "target", "why"),
    [
        ({}, "vulkan", "Fast card reads 4.0 TB/s, the CPU 40 GB/s"),
        ({"device": "cpu"}, "cpu-native", ""),
        ({"target": "cpu"}, "cpu", ""),
        ({"target": "webgpu", "runs_here": False}, "webgpu", ""),
        ({"kv_cache_dtype": "f32"}, "vulkan", "Fast card reads 4.0 TB/s, the CPU 40 GB/s"),
        ({"context": 99_999_999, "task": CHAT}, "", "--context; expected 1 to the model's"),
    ],
)
def test_auto_takes_a_gpu_that_gains(
    cards: Cards, compiled: list[tuple[str, str]], tmp_path: Path, arguments: dict[str, Any], target: str, why: str
) -> None:
    places: list[automatic.Place] = []
    checkpoint = write_llama(tmp_path / "checkpoint")
    if not target:
        with pytest.raises(UsageError, match=why):
            loading.prepare_bundle(checkpoint, **arguments)
    else:
        loading.prepare_bundle(checkpoint, chosen=places.append, **arguments)
    assert [name for name, _ in compiled] == [target] * bool(target)
    assert [place.why for place in places] == [why] * bool(why and target)


def test_a_choice_is_noted_and_the_bundle_of_the_cpu_is_an_estimate(
    cards: Cards, tiny_bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing judges the checkpoint again to find that the card, which is full, does not hold the model."""
    noted: list[str] = []
    made = tiny_bundles["q0f32"]
    cards.card = replace(cards.card, free=1 << 20)
    monkeypatch.setattr(SilentProgress, "note", lambda _, text: noted.append(text))

    def compile(checkpoint: Path, output: Path, **options: Any) -> None:
        shutil.copytree(made, output)

    monkeypatch.setattr(mlcpipe, "compile", compile)
    first = loading.prepare_bundle(tiny_bundles.checkpoint)
    monkeypatch.setattr(Purpose, "judge", None)
    assert loading.prepare_bundle(tiny_bundles.checkpoint) == first
    assert noted[-1].startswith("compiled for cpu-native: Fast card has 1.00 MiB free, and the model takes 16.")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for m in messages %}{{ m.content }",
            "does not compile in chat_template of CHECKPOINT, line 1; found Temp",
        ),
        ("{{ messages[0].no.more }}", "the chat template failed in chat_template of CHECKPOINT; found UndefinedError"),
        ("{{ raise_exception('first a system message') }}", ""),
    ],
)
def test_a_chat_template_is_tried_before_the_work(
    cache: Path, compiled: list[tuple[str, str]], tmp_path: Path, template: str, words: str
) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    (checkpoint / "chat_template.jinja").write_text(template)
    raised = ""
    try:
        loading.prepare_bundle(checkpoint, task=CHAT)
    except TemplateError as error:
        raised = str(error)
    assert words.replace("CHECKPOINT", str(checkpoint)) in raised and bool(compiled) == (not words) == (not raised)


@pytest.mark.parametrize(
    ("variant", "options", "words"),
    [
        ("avx9", ["chat", "-p", "hi"], "MLCPIPE_CPU_VARIANT names no variant of the target in cpu-native; expected "),
        (
            "",
            ["compile", "-o", "out", "--bits-per-weight", "4"],
            "expected a model with a context of 512 tokens or more",
        ),
    ],
)
def test_more_that_is_told_before_the_work(
    cache: Path, compiled: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], variant: str, options: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLCPIPE_CPU_VARIANT", variant)
    with open(os.devnull, encoding="utf-8") as empty:
        monkeypatch.setattr("sys.stdin", empty)
        assert main([*options, str(write_llama(tmp_path / "checkpoint"))]) == 2 and not compiled
    assert words in " ".join(capsys.readouterr().err.split())


def test_compile_needs_a_tokenizer_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile(*given: object, **options: object) -> None:
        raise UsageError("compiling")

    monkeypatch.setattr(mlcpipe, "compile", compile)
    checkpoint = write_llama(tmp_path / "checkpoint", tokenizer=False)
    for options, words in (
        ([], f"no tokenizer in {checkpoint}; expected tokenizer.json"),
        (["--no-tokenizer"], "compiling"),
    ):
        assert main(["compile", str(checkpoint), "-o", str(tmp_path / "out"), *options]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_bundle_is_judged_for_its_task(demo_bundles: dict[str, Path]) -> None:
    assert loading.prepare_bundle(demo_bundles["q4f16_1"], task=CHAT)
    with pytest.raises(UsageError, match="the model writes text and has no embeddings in .*; type: mlcpipe chat "):
        loading.prepare_bundle(demo_bundles["q4f16_1"], task=EMBED)


def test_what_a_bundle_is_not_is_an_error(demo_bundles: dict[str, Path]) -> None:
    bundle = demo_bundles["q4f16_1"]
    for name, value in (("target", "vulkan"), ("quantization", "q0f32"), ("kv_cache_dtype", "q8")):
        what = name.replace("kv_cache_dtype", "KV cache dtype")
        with pytest.raises(UsageError, match=f"the bundle has another {what} in .*; expected .*; found {value}"):
            mlcpipe.load(bundle, **{name: value})
    assert mlcpipe.load(bundle, quantization="auto").on_host


def hub_named_folder(folder: Path, bundle: Path) -> str:
    """A bundle in `folder/hf:/org/name`, which is what a program that takes names for paths finds first."""
    shutil.copytree(bundle, folder / "hf:" / "org" / "name")
    return "hf://org/name"


@pytest.mark.full
def test_a_name_of_the_hub_is_never_a_folder(
    cache: Path,
    tiny_bundles: Bundles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name = hub_named_folder(tmp_path, tiny_bundles["q0f32"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DownloadError, match=f"cannot reach the hub for {name}"):
        mlcpipe.load(name)
    with pytest.raises(UsageError, match="mlcpipe.load takes names of the hub"):
        mlcpipe.Engine(name)
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        for verb in ("chat --prompt hi", "chat --web", "bench", "tune", "inspect", "package -o site"):
            command, *options = verb.split()
            assert cli.main([command, name, *options]) == 2
            words = "a bundle is a folder" if command == "package" else "cannot reach the hub"
            assert words in capsys.readouterr().err
    assert mlcpipe.Engine("hf:/org/name").on_host  # a path, written as one


def test_a_checkpoint_that_is_a_bundle_too_is_refused(tiny_bundles: Bundles, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bundles["q0f32"], tmp_path / "both")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (folder / name).touch()
        with pytest.raises(UsageError, match=f"both a checkpoint and a bundle.*found {name} and mlcpipe.json; move"):
            mlcpipe.load(folder)
        (folder / name).unlink()
    assert mlcpipe.load(folder).on_host
