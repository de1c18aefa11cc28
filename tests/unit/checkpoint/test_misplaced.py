"""Folders and names that are no checkpoint: the error says what they are, and what to type."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.misplaced import suggested_name
from mlcpipe.errors import CheckpointError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
ADAPTER = json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}).encode()
CONFIG = {"config.json": b"{}"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no checkpoint in .*; expected config.json, tokenizer.json and model.safetensors or .*; "
             "found an empty folder; give the folder"),
        ({"README.md": b"", "a": b"", "b": b"", "c": b""}, "no checkpoint in .*found 'README.md', 'a', 'b' ..."),
        ({"mmproj-x.gguf": b"", "x-Q4_0.gguf": b""}, "has GGUF files.*found 'mmproj-x.gguf', 'x-Q4_0.gguf'; "
                                                     "type: mlcpipe chat .*/model/x-Q4_0.gguf$"),
        (CONFIG | {"x.gguf": b""}, "type: mlcpipe chat .*/model/x.gguf$"),
        (CONFIG | {"onnx/model.onnx": b""}, "ONNX files are programs.*found 'onnx/model.onnx'; give the checkpoint"),
        ({"model.onnx": b""}, "ONNX files are programs, not checkpoints"),
        ({"adapter_config.json": ADAPTER, "adapter_model.safetensors": b""},
         "adapter, not a model.*for 'Qwen/Qwen3-0.6B'; type: mlcpipe chat hf://Qwen/Qwen3-0.6B --adapter .*/model$"),
        ({"adapter_config.json": b"{}"}, "adapter, not a model.*type: mlcpipe chat BASE_MODEL --adapter"),
        ({"adapter_config.json": b'{"base_model_name_or_path": "\\u001b[31m"}'}, "mlcpipe chat BASE_MODEL --adapter"),
        ({"pytorch_model.bin": b""}, "pickled weights are refused"),
        (CONFIG, "no weights in .*found neither; download the checkpoint again"),
        (CONFIG | {"model.safetensors": POINTER}, "a pointer of Git LFS, not the weights in .*`git lfs pull`"),
    ],
)  # fmt: skip
def test_folders(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_a_pointer_to_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match="a pointer of Git LFS, not the model in .*`git lfs pull`"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("x.safetensors", "put config.json and tokenizer.json of its model beside it, and give the folder"),
        ("x.pt", "pickles are refused: convert them to safetensors"),
        ("x.png", "give a folder or a GGUF file, or type hf://org/name"),
    ],
)
def test_files(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"not a checkpoint folder in .*{name}.*; found a file; {advice}"):
        open_checkpoint(tmp_path / name)


def test_a_file_of_a_checkpoint(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match="found a file; give the folder that the file is in"):
        open_checkpoint(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@main", "hf://Qwen/Qwen3-0.6B@main"),
        ("org/name-GGUF:Q4_K_M", "hf://org/name-GGUF:Q4_K_M"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"),
        ("https:/huggingface.co/Qwen/Qwen3-0.6B/", "hf://Qwen/Qwen3-0.6B"),
        ("huggingface.co/Qwen/Qwen3-0.6B/tree/main", "hf://Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/v2", "hf://Qwen/Qwen3-0.6B@v2"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B?library=transformers", "hf://Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/o/n-GGUF/blob/main/n-0.6B-Q8_0.gguf", "hf://o/n-GGUF:Q8_0"),
        ("https://hf.co/o/n/resolve/main/Q6_K/n-Q6_K-00001-of-00002.gguf?download=true", "hf://o/n:Q6_K"),
        ("https://huggingface.co/o/n/blob/main/config.json", "hf://o/n"),
        ("hf.co/o/n-GGUF:Q4_K_M", "hf://o/n-GGUF:Q4_K_M"),
        ("https://ollama.com/library/llama3.2:1b", "ollama://llama3.2:1b"),
        ("llama3.2:1b", "ollama://llama3.2:1b or hf://ORG/llama3.2"),
        ("qwen3", "ollama://qwen3 or hf://ORG/qwen3"),
        ("models/my/folder", None),
        ("./qwen3", None),
        ("../a/b", None),
        ("/models/qwen3", None),
        ("model.gguf", None),
        ("org/model.gguf", None),
        ("https://example.com/org/name", None),
        ("a question?", None),
    ],
)
def test_names(name: str, typed: str | None) -> None:
    assert suggested_name(name) == typed


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "to use that model, type hf://Qwen/Qwen3-0.6B"),
        ("models/my/folder", "check the path, or type hf://org/name"),
    ],
)
def test_names_that_are_no_path(name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"not a checkpoint folder.*found nothing; {hint}"):
        open_checkpoint(Path(name))
