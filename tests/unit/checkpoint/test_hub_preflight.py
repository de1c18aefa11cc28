"""A hub's model is judged before its weights are downloaded: no weight file is asked for, of GGUF only the header."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.gguf import metadata
from mlcpipe.checkpoint.hub import resolve
from mlcpipe.cli import main
from mlcpipe.compiler import preflight
from mlcpipe.compiler.preflight import Purpose
from mlcpipe.errors import MlcpipeError
from mlcpipe.host.memory import FreeMemory
from mlcpipe.support import disk
from mlcpipe.support.defaults import ANY, CHAT, EMBED, SERVE, WRITE
from mlcpipe.support.progress import SilentProgress
from tests.conftest import write_llama

pytest.importorskip("huggingface_hub")
from tests.unit.checkpoint.hub_cases import SPEC
from tests.unit.checkpoint.hub_server import Hub, serve

pytestmark = pytest.mark.usefixtures("plain_network")
WEIGHTS = "model.safetensors"
BERT = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def hub(plain_network: None, tmp_path: Path) -> Iterator[Hub]:
    """A whole model for chats."""
    folder = write_llama(tmp_path / "source")
    with serve(Hub({file.name: file.read_bytes() for file in folder.iterdir()})) as server:
        yield server


def judged(hub: Hub, tmp_path: Path, spec: str = SPEC, task: str = CHAT, **options: Any) -> Path:
    purpose = Purpose("cpu", task=task, disk=tmp_path / "cache" / "bundles", title=spec, **options)
    cache = tmp_path / "cache"
    return resolve(spec, SilentProgress(), check=purpose.check, cache_dir=cache, endpoint=hub.endpoint)


def refusal(hub: Hub, tmp_path: Path, *arguments: Any, **options: Any) -> str:
    with pytest.raises(MlcpipeError) as caught:
        judged(hub, tmp_path, *arguments, **options)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500 and str(tmp_path) not in line and "mlcpipe-header" not in line, line
    return line


@pytest.mark.parametrize(
    ("fields", "lost", "options", "message"),
    [
        ({"model_type": "gemma3n"}, "", {}, "unknown architecture in config.json model_type of hf://org/tiny-model"),
        ({"clip_qkv": 4}, "", {}, "field clip_qkv is not supported in config.json of hf://org/tiny-model"),
        ({"quantization_config": {"quant_method": "hqq"}}, "", {}, "quant_method is not supported"),
        ({}, "tokenizer.json", {}, "no tokenizer in hf://org/tiny-model@main; expected tokenizer.json"),
        ({}, "tokenizer.json", {"task": SERVE}, "no tokenizer in hf://org/tiny-model@main"),
        ({}, "tokenizer_config.json", {}, "the model has no chat template in hf://org/tiny-model@main; expected chat_te"),
        ({}, "", {"context": 99_999_999}, "--context; expected 1 to the model's"),
        ({}, "", {"task": EMBED}, "the model writes text and has no embeddings in hf://org/tiny-model; expected an "
                                  "encoder; type: mlcpipe chat hf://org/tiny-model"),
        (BERT, "", {}, 'the model embeds texts and writes none in hf://org/tiny-model; expected a model that writes '
                       'text; type: mlcpipe embed hf://org/tiny-model "a text"'),
        (BERT, "", {"task": WRITE}, "the model embeds texts"),
        ({}, "", {"quantization": "q9"}, "unknown quantization"),
    ],
)  # fmt: skip
def test_refusals(
    hub: Hub, tmp_path: Path, fields: dict[str, Any], lost: str, options: dict[str, Any], message: str
) -> None:
    hub.files["config.json"] = json.dumps(json.loads(hub.files["config.json"]) | fields).encode()
    hub.files.pop(lost, None)
    assert message in refusal(hub, tmp_path, **options)
    assert hub.gets(WEIGHTS) == []


@pytest.mark.parametrize("command", ["compile -o out", "convert -o out", "tune", "inspect"])
def test_commands_that_download(
    hub: Hub, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = partial(resolve, cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    monkeypatch.setattr("mlcpipe.checkpoint.resolve", there)
    monkeypatch.chdir(tmp_path)
    hub.files["config.json"] = json.dumps(json.loads(hub.files["config.json"]) | {"model_type": "rwkv6"}).encode()
    assert main([*command.split(), SPEC]) == 2 and hub.gets(WEIGHTS) == []
    assert "unknown architecture in config.json model_type of hf://" in " ".join(capsys.readouterr().err.split())


def test_a_tokenizer_to_convert(hub: Hub, tmp_path: Path) -> None:
    hub.files["tokenizer.model"] = hub.files.pop("tokenizer.json")
    assert "found only tokenizer.model; convert it once: python -c" in refusal(hub, tmp_path)
    assert hub.gets(WEIGHTS) == []


@pytest.mark.parametrize(("lost", "task"), [("", CHAT), ("tokenizer_config.json", WRITE), ("tokenizer.json", ANY)])
def test_what_is_good_enough_is_downloaded(hub: Hub, tmp_path: Path, lost: str, task: str) -> None:
    hub.files.pop(lost, None)
    assert open_checkpoint(judged(hub, tmp_path, task=task)).tensors
    hub.requests.clear()
    assert judged(hub, tmp_path, task=EMBED).is_dir()  # all is here: whoever opens it judges it
    assert hub.requests == [("GET", "info", None)]


def test_memory(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory", lambda: FreeMemory(1 << 20))  # enough for the weights alone
    words = "not enough memory for the model; expected at least 16.24 MiB free: weights 5"
    assert words in (line := refusal(hub, tmp_path, runs_here=True)) and "KV cache 68.00 KiB" in line
    assert hub.gets(WEIGHTS) == [] and judged(hub, tmp_path, runs_here=False)


def test_the_disk_holds_download_and_bundle(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, download = shutil.disk_usage(tmp_path), len(hub.files[WEIGHTS])
    free = preflight.BUNDLE_BYTES + download  # not for the weights of the bundle, too
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=free))
    with pytest.raises(MlcpipeError, match="not enough space on the disk"):
        judged(hub, tmp_path)
    assert hub.gets(WEIGHTS) == []
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=free + download))
    assert judged(hub, tmp_path)


def test_without_weights_nothing_more_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    seen: list[Checkpoint] = []

    def look() -> Path:
        return resolve(
            SPEC, SilentProgress(), check=lambda preview, _: seen.append(preview), weights=False,
            cache_dir=tmp_path / "cache", endpoint=hub.endpoint,
        )  # fmt: skip

    folder = look()
    assert hub.gets(WEIGHTS) == [] and (folder / "config.json").is_file() and len(seen) == 1
    judged(hub, tmp_path)
    assert look() == folder and len(seen) == 1  # whoever opens it judges it


@pytest.fixture
def gguf_hub(plain_network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A model in GGUF whose header is read in small parts."""
    pytest.importorskip("gguf")
    from tests.unit.checkpoint.gguf_files import write_gguf

    monkeypatch.setattr(metadata, "FIRST_READ_BYTES", 1024)
    source = write_llama(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 64}  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    file = write_gguf(open_checkpoint(source), tmp_path / "tiny-F32.gguf")
    with serve(Hub({file.name: file.read_bytes()})) as server:
        yield server


def test_a_gguf_file_by_its_header(gguf_hub: Hub, tmp_path: Path) -> None:
    ((name, content),) = gguf_hub.files.items()
    spec = f"{SPEC}:F32"
    assert f"the model writes text and has no embeddings in {spec}" in refusal(gguf_hub, tmp_path, spec, EMBED)
    ranges = [str(asked).removeprefix("bytes=").split("-") for asked in gguf_hub.gets(name)]
    assert sum(int(last) - int(first) + 1 for first, last in ranges) < len(content) / 2
    gguf_hub.files[name] = content.replace(b"llama", b"rwkv6")
    words = "unknown architecture in general.architecture of 'hf://org/tiny-model@main:F32'"
    assert words in refusal(gguf_hub, tmp_path, spec)
    assert None not in gguf_hub.gets(name)  # never the whole file


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(60), b"no GGUF file at all"], ids=["empty", "zeros", "text"])
def test_a_tower_that_does_not_fit_stays_where_it_is(gguf_hub: Hub, tmp_path: Path, content: bytes) -> None:
    """One that fits is downloaded, as tests/unit/checkpoint/test_mmproj.py shows."""
    gguf_hub.files["mmproj-tiny.gguf"] = content
    path = judged(gguf_hub, tmp_path, f"{SPEC}:F32")
    assert [file.name for file in path.parent.iterdir()] == ["tiny-F32.gguf"]
    assert None not in gguf_hub.gets("mmproj-tiny.gguf")


def test_a_gguf_file_is_not_downloaded_without_weights(gguf_hub: Hub, tmp_path: Path) -> None:
    ((name, content),) = gguf_hub.files.items()
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "endpoint": gguf_hub.endpoint}
    path = resolve(f"{SPEC}:F32", SilentProgress(), check=lambda *_: None, weights=False, **options)
    assert not path.exists() and None not in gguf_hub.gets(name)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_gguf_file_that_is_good_is_downloaded(gguf_hub: Hub, tmp_path: Path, ranges: bool) -> None:
    gguf_hub.without_ranges = not ranges
    seen: list[Checkpoint] = []
    path = resolve(
        f"{SPEC}:F32", SilentProgress(), check=lambda preview, _: seen.append(preview),
        cache_dir=tmp_path / "cache", endpoint=gguf_hub.endpoint,
    )  # fmt: skip
    opened = open_checkpoint(path)
    assert opened.config == seen[0].config and list(opened.tensors) == list(seen[0].tensors)
    assert opened.config["rope_scaling"]["factor"] == 8
