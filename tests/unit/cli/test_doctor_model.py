"""`mlcpipe doctor --model`: a verdict, memory, device and speed of a model whose weights are not here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.preview import Download, config_preview
from mlcpipe.cli import doctor_model, main
from mlcpipe.cli.doctor_model import ModelReport, report_on
from mlcpipe.host.memory import FreeMemory
from mlcpipe.support.progress import SilentProgress
from tests.conftest import TinyLlama, write_byte_tokenizer, write_llama
from tests.unit.cards import CPU_GB_S, Cards, install

LLAMA = TinyLlama(vocab_size=4096, hidden_size=512, intermediate_size=1024, layers=2).config_json()
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
BERT = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cards:
    """No GPU until `shown` says so, and no cache of the CPU that holds a model."""
    monkeypatch.setattr(doctor_model, "last_cache_bytes", lambda: 0)
    cards = install(monkeypatch, tmp_path / "cache")
    cards.shown = ""
    return cards


def folder(path: Path, config: Mapping[str, Any]) -> str:
    """A model by its configuration and tokenizer."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(path)
    return str(path)


def report(model: str) -> ModelReport:
    return report_on(model, SilentProgress())


def test_memory_and_speed_of_each_quantization(cards: Cards, tmp_path: Path) -> None:
    found = report(folder(tmp_path / "m", LLAMA))
    assert found.runs and found.verdict.startswith("Runs: llama, chats; q4f16_m for cpu-native, at most ")
    first, *others = found.quantizations
    assert first.quantization == "q4f16_m" and {"q3f16_1", "q8f16_1", "q0f16"} <= {row.quantization for row in others}
    assert [row.weights_bytes for row in others] == sorted(row.weights_bytes for row in others)
    for row in found.quantizations:
        assert row.memory_bytes > row.weights_bytes and row.why == "no GPU was found" and row.context_tokens == 256
        assert row.tokens_per_s == pytest.approx(CPU_GB_S * 1e9 / row.weights_bytes)  # all that a token reads


def test_a_token_reads_the_chosen_experts_alone(cards: Cards, tmp_path: Path) -> None:
    first = report(folder(tmp_path / "m", MIXTRAL)).quantizations[0]
    assert first.tokens_per_s and first.tokens_per_s * first.weights_bytes > 2 * CPU_GB_S * 1e9


def test_the_weights_of_a_checkpoint_change_nothing(cards: Cards, tmp_path: Path) -> None:
    bare, whole = report(folder(tmp_path / "bare", LLAMA)), write_llama(tmp_path / "whole", TinyLlama(config=LLAMA))
    assert report(str(whole)).refused.startswith("tensor ")  # its sizes are others
    tiny = write_llama(tmp_path / "tiny")
    rows = report(str(tiny)).quantizations
    (tiny / "model.safetensors").unlink()
    assert report(str(tiny)).quantizations == rows != bare.quantizations


def test_what_auto_takes(cards: Cards, tmp_path: Path) -> None:
    cards.shown = "card, driver 1"
    model = folder(tmp_path / "m", LLAMA | {"hidden_size": 8192, "num_attention_heads": 128})
    found = report(model)
    assert found.quantizations[0].target == "vulkan" and "q4f16_m for vulkan, at most" in found.verdict
    assert found.quantizations[0].why == "Fast card reads 4.0 TB/s, the CPU 40 GB/s" and cards.measured == 1


@pytest.mark.parametrize(
    ("config", "lost", "does", "refused"),
    [
        (LLAMA | {"model_type": "gemma3n"}, "", "", "unknown architecture in config.json model_type of MODEL"),
        (LLAMA | {"clip_qkv": 4}, "", "", "field clip_qkv is not supported"),
        (LLAMA, "tokenizer.json", "", "no tokenizer in MODEL; expected tokenizer.json"),
        (LLAMA, "tokenizer_config.json", "continues text with --raw: the model has no chat template", ""),
        (BERT, "", "embeds texts", ""),
    ],
)
def test_what_it_does_and_what_is_refused(
    cards: Cards, tmp_path: Path, config: dict[str, Any], lost: str, does: str, refused: str
) -> None:
    model = folder(tmp_path / "m", config)
    if lost:
        (Path(model) / lost).unlink()
    found = report(model)
    assert found.does == does and refused.replace("MODEL", model) in found.refused and found.runs == (not refused)
    assert does != "embeds texts" or found.quantizations[0].tokens_per_s is None


def test_a_machine_without_room(cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_model, "free_memory", lambda: FreeMemory(1 << 20))
    found = report(folder(tmp_path / "m", LLAMA))
    assert not found.runs and "MiB, and there are 1.00 MiB free" in found.verdict


def test_a_quantized_model_whose_weights_are_not_here(cards: Cards, tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    first, second, *_ = report(folder(tmp_path / "m", LLAMA | {"quantization_config": gptq})).quantizations
    assert first.quantization == "keep" and "size of its weights is not known" in first.problem
    assert not second.problem and second.weights_bytes
    preview, download = config_preview(tmp_path / "m"), Download(tmp_path, 300 << 20)
    kept = doctor_model._judged("m", preview, download, SilentProgress()).quantizations[0]
    assert (kept.quantization, kept.weights_bytes, kept.problem) == ("keep", 300 << 20, "")
    assert kept.tokens_per_s == pytest.approx(CPU_GB_S * 1e9 / (300 << 20))


def test_a_gguf_file(cards: Cards, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.unit.checkpoint.gguf_files import write_gguf

    source = open_checkpoint(write_llama(tmp_path / "source"))
    found = report(str(write_gguf(source, tmp_path / "tiny.gguf")))
    assert (found.family, found.refused) == ("llama", "") and found.quantizations[0].weights_bytes
    assert report(str(tmp_path / "other.gguf")).refused


def test_the_command(cards: Cards, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "m", LLAMA | {"model_type": "\x1b[31m"})
    assert main(["doctor", "--model", model]) == 1
    assert capsys.readouterr().out.startswith("Does not run: unknown architecture")
    folder(tmp_path / "m", LLAMA)
    assert main(["doctor", "--model", model, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["runs"] and printed["verdict"].startswith("Runs: ") and printed["quantizations"][0]["tokens_per_s"]
    assert main(["doctor", "--model", model]) == 0
    table = capsys.readouterr().out
    assert "memory, 256 tokens" in table and "runs on  cpu-native: no GPU was found" in table
    assert main(["doctor", "--model", model, "--bandwidth"]) == 2
    assert "leave one of them out" in capsys.readouterr().err
    (tmp_path / "m" / "mlcpipe.json").touch()
    assert main(["doctor", "--model", model]) == 2
    assert "compiled already" in capsys.readouterr().err
