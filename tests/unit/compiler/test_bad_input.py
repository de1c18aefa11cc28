"""Checkpoints, options and disks that cannot be used: one error of one line, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import mlcpipe
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler import compile as compiler
from mlcpipe.compiler import job, link
from mlcpipe.errors import (
    CheckpointError,
    CompileError,
    ConfigError,
    MlcpipeError,
    ResourceError,
    TargetError,
    TokenizerError,
    UsageError,
)
from tests.conftest import QUICK, TinyLlama, write_llama, write_tensors

if TYPE_CHECKING:
    from tests.conftest import Bundles

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "in" / "checkpoint")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "bundle"


def refused(checkpoint: Path, output: Path, error: type[MlcpipeError], words: str, **options: Any) -> str:
    """The message of the error; the folder of the output stays as it was."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(error, match=words) as caught:
        mlcpipe.compile(checkpoint, output=output, **{"target": QUICK, "quantization": "q4f16_1", **options})
    message = str(caught.value)
    assert "\n" not in message
    assert sorted(output.parent.iterdir()) == before
    return message


def edit_config(checkpoint: Path, **fields: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites model.safetensors after `change` to a dict of float32 arrays."""
    source = open_checkpoint(checkpoint)
    tensors: dict[str, Any] = {name: source.read(name) for name in source.tensors}
    change(tensors)
    write_tensors(
        checkpoint / "model.safetensors",
        {name: (array.shape, "float32", array.astype(np.float32).tobytes) for name, array in tensors.items()},
    )


# ---- names


def test_unknown_names(checkpoint: Path, output: Path) -> None:
    assert "q8f16_1" in refused(checkpoint, output, ConfigError, "unknown quantization", quantization="q5_k")
    assert "`mlcpipe doctor` lists" in refused(checkpoint, output, TargetError, "unknown target", target="tpu")
    refused(checkpoint, output, TargetError, "missing target file", target="./absent.toml")
    edit_config(checkpoint, model_type="rwkv6")
    assert "llama" in refused(checkpoint, output, ConfigError, "unknown architecture")


@pytest.mark.parametrize("context", [0, 15, -1, 2**40])
def test_contexts_that_cannot_be(checkpoint: Path, output: Path, context: int) -> None:
    refused(checkpoint, output, ConfigError, "context length", context_length=context)


# ---- config.json


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 2**30}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": -5}, "vocab_size"),
        ({"intermediate_size": "104"}, "intermediate_size"),
        ({"num_attention_heads": 3.5}, "num_attention_heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": True}, "head_dim"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "magic", "factor": 2}}, "magic"),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"max_position_embeddings": 2**62}, "max_position_embeddings"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "ForCausalLM"),
    ],
    ids=str,
)
def test_absurd_configs(checkpoint: Path, output: Path, fields: dict[str, Any], words: str) -> None:
    edit_config(checkpoint, **fields)
    refused(checkpoint, output, ConfigError, re.escape(words))


def test_the_largest_config_that_is_allowed_takes_no_memory(checkpoint: Path, output: Path) -> None:
    """Sizes that pass one by one: what they stand for is compared with the files before anything is allocated."""
    edit_config(checkpoint, hidden_size=2**24, intermediate_size=2**24, vocab_size=2**24, num_hidden_layers=4)
    (checkpoint / "tokenizer.json").unlink()
    before = psutil.Process().memory_info().rss
    refused(checkpoint, output, CheckpointError, "has a different shape than config.json specifies")
    assert psutil.Process().memory_info().rss - before < 500 << 20


def test_a_model_larger_than_the_disk(checkpoint: Path, output: Path) -> None:
    """Its file has a hole of half a terabyte: what it would take is known before the first byte is written."""
    model = TinyLlama(vocab_size=2**24, hidden_size=2**14, intermediate_size=32, layers=1, tied=False, dtype="bfloat16")
    holes = {name: (shape, model.dtype, bytes) for name, shape in model.shapes().items()}
    path = checkpoint / "model.safetensors"
    write_tensors(path, holes)
    size = sum(2 * int(np.prod(shape, dtype=np.int64)) for shape in model.shapes().values())
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError as error:
        pytest.skip(f"this disk has no file of {size} bytes with holes: {error}")
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "config.json").write_text(json.dumps(model.config_json()))
    refused(checkpoint, output, ResourceError, "not enough (memory|space)", quantization="q0f32")


def test_a_disk_that_is_too_small(checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 30, used=0, free=1 << 20))
    monkeypatch.setattr(compiler, "_write_library", None)  # nothing is compiled before
    refused(checkpoint, output, ResourceError, "not enough space on the disk")


def test_a_machine_with_too_little_memory(checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    monkeypatch.setattr(compiler, "_write_library", None)
    refused(checkpoint, output, ResourceError, r"not enough memory to convert the weight .*embed_tokens")


# ---- weights


def test_weights_that_are_not_the_configs(checkpoint: Path, output: Path) -> None:
    whole = (checkpoint / "model.safetensors").read_bytes()

    def broken(change: Callable[[dict[str, Any]], None], words: str) -> None:
        (checkpoint / "model.safetensors").write_bytes(whole)
        edit_tensors(checkpoint, change)
        refused(checkpoint, output, CheckpointError, words)

    broken(lambda t: t.pop(Q), f"tensor {Q} is missing")
    broken(lambda t: t.update(extra=np.zeros(3)), "tensor extra would not be used")
    broken(lambda t: t.update({Q: t[Q][:-1]}), f"tensor {Q}.* has a different shape")
    broken(lambda t: t.update({Q: t[Q].T[:, :-1]}), "a different shape")
    broken(lambda t: t.update({DOWN: t[DOWN].reshape(-1)}), f"tensor {DOWN} has a different shape")
    broken(lambda t: t.update({"model.norm.weight": np.zeros(())}), "a different shape")
    # The rows of q, k and v are joined: that their sum is right does not make one of them right.
    k = Q.replace("q_proj", "k_proj")
    broken(lambda t: t.update({Q: t[Q][:-2], k: np.concatenate([t[k], t[k][:2]])}), "a different shape")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (Q, np.nan, "NaN|not finite"),
        (DOWN, np.inf, "[Ii]nf|not finite"),
        ("model.norm.weight", np.nan, "NaN|not finite"),
        (Q, 7e4, "does not fit float16"),
        ("model.embed_tokens.weight", -1e30, "does not fit float16"),
    ],
)
def test_numbers_that_cannot_be_stored(checkpoint: Path, output: Path, name: str, value: float, words: str) -> None:
    edit_tensors(checkpoint, lambda t: t[name].reshape(-1).__setitem__(5, value))
    with pytest.raises(CheckpointError, match=words):
        mlcpipe.convert(checkpoint, quantization="q4f16_1", output=output)
    assert not list(output.parent.iterdir())


def test_a_large_number_fits_float32(checkpoint: Path, output: Path) -> None:
    edit_tensors(checkpoint, lambda t: t[Q].reshape(-1).__setitem__(5, 7e4))
    assert mlcpipe.convert(checkpoint, quantization="q4f32_1", output=output) == output
    assert (output / "tensor-cache.json").is_file()


@pytest.mark.parametrize("size", [0, 4, 100, 30_000])
def test_a_shard_that_was_cut(checkpoint: Path, output: Path, size: int) -> None:
    os.truncate(checkpoint / "model.safetensors", size)
    refused(checkpoint, output, CheckpointError, "model.safetensors")


def test_a_checkpoint_that_is_none(tmp_path: Path, output: Path) -> None:
    refused(tmp_path / "absent", output, CheckpointError, "not a checkpoint folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", output, CheckpointError, "an empty folder")


# ---- tokenizer and chat template


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "BPE", "vocab": 3}}'])
def test_a_broken_tokenizer(checkpoint: Path, output: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "export", None)  # it is found before the work
    (checkpoint / "tokenizer.json").write_text(text)
    refused(checkpoint, output, TokenizerError, "tokenizer.json")


def test_a_tokenizer_of_another_model(checkpoint: Path, output: Path) -> None:
    edit_config(checkpoint, vocab_size=200)
    refused(checkpoint, output, TokenizerError, "vocabulary does not fit")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ a * b }}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ messages.__class__.__mro__ }}",
        "{% if %}",
        "{{ raise_exception('no') }}",
    ],
)
@pytest.mark.full
def test_a_hostile_template_does_not_stop_a_bundle(checkpoint: Path, output: Path, template: str) -> None:
    """Whoever only generates needs none: MLC's config gets no conversation template, and chatting says why."""

    def conversation(name: str, settings: dict[str, str]) -> Any:
        (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", **settings}))
        mlcpipe.convert(checkpoint, quantization="q0f32", output=output.with_name(name))
        return json.loads((output.with_name(name) / "mlc-chat-config.json").read_text())["conv_template"]

    assert conversation("hostile", {"chat_template": template}) == conversation("none", {})


def test_without_a_tokenizer(checkpoint: Path, output: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    mlcpipe.convert(checkpoint, quantization="q0f32", output=output)
    assert not (output / "mlc-chat-config.json").exists()


def test_convert_replaces_only_converted_weights(checkpoint: Path, output: Path) -> None:
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"refusing to overwrite.*tensor-cache\.json"):
        mlcpipe.convert(checkpoint, quantization="q0f32", output=output, overwrite=True)
    (output / "thesis.txt").rename(output / "tensor-cache.json")
    mlcpipe.convert(checkpoint, quantization="q0f32", output=output, overwrite=True)
    mlcpipe.convert(checkpoint, quantization="q4f32_1", output=output, overwrite=True)
    with pytest.raises(UsageError, match="not empty"):
        mlcpipe.convert(checkpoint, quantization="q0f32", output=output)


# ---- output


def test_outputs_that_cannot_be(checkpoint: Path, output: Path) -> None:
    output.mkdir()
    (output / "precious").write_text("mine")
    refused(checkpoint, output, UsageError, "output folder not empty")
    assert (output / "precious").read_text() == "mine"
    refused(checkpoint, output / "precious", UsageError, "the output is not a folder")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder in which nobody can write")
def test_a_folder_that_takes_nothing(checkpoint: Path) -> None:
    with pytest.raises((OSError, ResourceError)):
        mlcpipe.convert(checkpoint, quantization="q0f32", output="/proc/bundle")


def test_a_disk_that_gets_full(tmp_path: Path, tiny_bundles: Bundles) -> None:
    """Other programs fill the disk after it was asked: here it is told to be larger than it is."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "_needed_bytes", lambda job: 0)
            with pytest.raises(ResourceError, match="no space left|is full"):
                mlcpipe.convert(tiny_bundles.checkpoint, quantization="q0f32", output=disk / "bundle")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---- tools


def test_no_linker(checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(link.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compiler, "lower", None)  # it is found before the work
    refused(checkpoint, output, CompileError, re.escape("pip install 'mlcpipe[zig]'"))


def test_a_linker_that_fails(tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cc = tmp_path / "bin" / "cc"
    cc.parent.mkdir()
    cc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "cc 1.0" && exit 0\necho "ld: cannot find crt1.o" >&2\nexit 1\n'
    )
    cc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cc.parent}:{os.environ['PATH']}")
    linker = link.find_linker()
    assert (linker.name, linker.version) == ("cc", "cc 1.0")
    with pytest.raises(CompileError, match="linker cc failed; found ld: cannot find crt1.o"):
        linker.link([tmp_path / "a.o"], output)


def test_a_cc_that_only_asks_for_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac without the command line tools: then the next linker is taken."""
    for name, code in (("cc", 1), ("clang", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} 7\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert link.find_linker().name == "clang"


def test_another_version_of_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.15" if name == "apache-tvm-ffi" else real(name))
    for name in ("compile", "convert", "Engine"):
        with pytest.raises(
            TargetError, match=r"apache-tvm-ffi has the wrong version.*pip install apache-tvm==\S+ apache-"
        ):
            getattr(mlcpipe, name)


def test_an_interrupt_leaves_nothing(checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "convert_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mlcpipe.convert(checkpoint, quantization="q0f32", output=output)
    assert not list(output.parent.iterdir())


@pytest.mark.full
def test_odd_sizes_are_no_error(tmp_path: Path) -> None:
    """No extent is a multiple of a vector, a word or a group; the logits are those of step by step."""
    model = replace(
        TinyLlama(), vocab_size=263, hidden_size=42, intermediate_size=53, layers=1, heads=3, kv_heads=1, head_dim=10
    )
    checkpoint = write_llama(tmp_path / "checkpoint", model)
    engine = mlcpipe.Engine(
        mlcpipe.compile(checkpoint, target=QUICK, quantization="q3f16_1", output=tmp_path / "bundle"), threads=2
    )
    tokens = list(range(3, 40))
    rows = engine.logits(tokens)
    assert np.isfinite(rows).all() and rows.std() > 0.1
    np.testing.assert_allclose(engine.logits_stepwise(tokens, prefill_tokens=5), rows[4:], rtol=0, atol=5e-3)
