"""Errors for names and folders that are no checkpoint: they say what is there instead, and what to type."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mlcpipe.checkpoint.checkpoint import CONFIG, DOWNLOAD_AGAIN, INDEX, PICKLES, SINGLE_FILE
from mlcpipe.checkpoint.gguf.choice import TAG, gguf_models
from mlcpipe.errors import CheckpointError
from mlcpipe.support.files import HUB_PART, HUB_SCHEME, OLLAMA_SCHEME
from mlcpipe.support.json_files import read_json_object, shown, shown_path

ADAPTER = "adapter_config.json"  # of PEFT
_CONVERT = "convert them to safetensors: transformers' model.save_pretrained(folder)"
_WEIGHTS = f"{SINGLE_FILE} or {INDEX}"
_MAX_ADAPTER_BYTES = 1 << 20
_SHOWN_FILES = 3
_GGML = (b"lmgg", b"ggml")  # of ggml files before GGUF, in which whisper.cpp still has its weights
# A page of a hub as a browser shows it; `Path` makes one of the two slashes.
_PAGE = re.compile(
    rf"(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/({HUB_PART}/{HUB_PART})(?::({TAG}))?"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+)(?:/([^?#]*))?)?/?(?:[?#].*)?"
)
_OLLAMA_PAGE = re.compile(r"(?:https?:/+)?(?:www\.)?ollama\.com/(?:library/)?([\w.-]+(?:/[\w.-]+)?(?::[\w.-]+)?)/?")
_HUB_NAME = re.compile(rf"{HUB_PART}/{HUB_PART}(?:@[\w./-]+)?(?::{TAG})?")
_OLLAMA_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(?::[\w.-]+)?")
_FORMAT = re.compile(r"[-.]([A-Za-z]+[0-9]\w*)(?:-\d{5}-of-\d{5})?\.gguf")


def no_path(path: Path) -> CheckpointError:
    """The error for a path that does not exist, or for a file that is no model."""
    if path.exists():
        advice = "give a folder or a GGUF file, or type hf://org/name to download a model"
        if path.with_name(CONFIG).exists():
            advice = "give the folder that the file is in"
        elif path.suffix == ".safetensors":
            advice = f"put {CONFIG} and tokenizer.json of its model beside it, and give the folder"
        elif path.suffix in PICKLES:
            advice = f"pickles are refused: {_CONVERT}"
        if path.is_file() and _begins(path) in _GGML:
            advice = "weights of whisper.cpp are not read: type hf://openai/whisper-base, or another one of these"
        return CheckpointError(
            "not a checkpoint folder", where=shown_path(path), found="a file",
            expected=f"a folder with {CONFIG} and {SINGLE_FILE}, or a GGUF file",
            next_step=advice,
        )  # fmt: skip
    name = suggested_name(path.as_posix())
    advice = f"to use that model, type {name}" if name else "check the path, or type hf://org/name to download a model"
    return CheckpointError(
        "not a checkpoint folder", where=shown_path(path), found="nothing",
        expected="a folder with a checkpoint, or a GGUF file", next_step=advice,
    )  # fmt: skip


def _begins(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


def suggested_name(text: str) -> str | None:
    """`hf://org/name` or `ollama://name` for a pasted address or a bare name of a hub's model; None for others."""
    if match := _PAGE.fullmatch(text):
        repo, tag, revision, file = match.groups()
        if tag is None and file and (form := _FORMAT.search(file)):
            tag = form[1]
        branch = f"@{revision}" if revision not in (None, "main") else ""
        return f"{HUB_SCHEME}{repo}{branch}{f':{tag}' if tag else ''}"
    if match := _OLLAMA_PAGE.fullmatch(text):
        return OLLAMA_SCHEME + match[1]
    if text.endswith((".gguf", ".safetensors", ".json", ".toml")):
        return None
    if _HUB_NAME.fullmatch(text):
        return HUB_SCHEME + text
    return f"{OLLAMA_SCHEME}{text} or hf://ORG/{text.partition(':')[0]}" if _OLLAMA_NAME.fullmatch(text) else None


def no_checkpoint(folder: Path) -> CheckpointError:
    """The error for a folder without config.json, or without weights that can be read."""
    names = sorted(entry.relative_to(folder).as_posix() for entry in folder.iterdir())
    for test in _KINDS:
        if (found := test(folder, names)) is not None:
            return found
    has_config = CONFIG in names
    return CheckpointError(
        "no weights" if has_config else "no checkpoint", where=shown_path(folder),
        expected=_WEIGHTS if has_config else f"{CONFIG}, tokenizer.json and {_WEIGHTS}",
        found=("neither" if has_config else _some(names)) if names else "an empty folder",
        next_step=DOWNLOAD_AGAIN if has_config else "give the folder that has config.json",
    )  # fmt: skip


def _adapter(folder: Path, names: list[str]) -> CheckpointError | None:
    if ADAPTER not in names:
        return None
    base = read_json_object(folder / ADAPTER, limit=_MAX_ADAPTER_BYTES, error=CheckpointError).get(
        "base_model_name_or_path"
    )
    known = isinstance(base, str) and base.isprintable() and 0 < len(base) <= 200
    model = (suggested_name(str(base)) or str(base)) if known else "BASE_MODEL"
    return CheckpointError(
        "the folder has an adapter, not a model", where=shown_path(folder), expected="the model that it changes",
        found=f"{ADAPTER} for {shown(base)}", next_step=f"type: mlcpipe chat {model} --adapter {folder}",
    )  # fmt: skip


def _gguf(folder: Path, names: list[str]) -> CheckpointError | None:
    files = [name for name in names if name.endswith(".gguf")]
    models = [parts[0] for parts in gguf_models(files)]
    if not files or any(name.endswith(".safetensors") for name in names):
        return None
    return CheckpointError(
        "the folder has GGUF files", where=shown_path(folder), expected="the name of one", found=_some(files),
        next_step=f"type: mlcpipe chat {folder / (models or files)[0]}",
    )  # fmt: skip


def _onnx(folder: Path, names: list[str]) -> CheckpointError | None:
    inside = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("onnx/*.onnx"))]
    files = [name for name in names if name.endswith(".onnx")] or inside
    if not files or any(name.endswith(".safetensors") for name in names):
        return None
    return CheckpointError(
        "ONNX files are programs, not checkpoints", where=shown_path(folder), expected=_WEIGHTS, found=_some(files),
        next_step="give the checkpoint that they were made from",
    )  # fmt: skip


def _unindexed(folder: Path, names: list[str]) -> CheckpointError | None:
    files = [name for name in names if name.endswith(".safetensors")]
    if not files or CONFIG not in names:
        return None
    return CheckpointError(
        "no usable weights", where=shown_path(folder), expected=_WEIGHTS, found=_some(files),
        next_step=f"rename a single file to {SINGLE_FILE}, or add the index of the shards",
    )  # fmt: skip


def _pickles(folder: Path, names: list[str]) -> CheckpointError | None:
    files = [name for name in names if name.endswith(PICKLES)]
    if not files:
        return None
    return CheckpointError(
        "pickled weights are refused: loading them can run arbitrary code", where=shown_path(folder),
        expected=_WEIGHTS, found=_some(files),
        next_step=_CONVERT,
    )  # fmt: skip


_KINDS: tuple[Callable[[Path, list[str]], CheckpointError | None], ...] = (
    _adapter, _gguf, _onnx, _unindexed, _pickles,
)  # fmt: skip


def _some(names: list[str]) -> str:
    return ", ".join(map(shown, names[:_SHOWN_FILES])) + (" ..." if len(names) > _SHOWN_FILES else "")
