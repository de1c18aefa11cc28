from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.checkpoint import TensorInfo, open_checkpoint
from mlcpipe.checkpoint.checkpoint import MAX_CONFIG_BYTES
from mlcpipe.checkpoint.open import MAX_INDEX_BYTES
from mlcpipe.errors import CheckpointError, ConfigError, MlcpipeError
from tests.unit.checkpoint.helpers import numbers, write_checkpoint, write_header, write_index, write_tensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", {"model.safetensors": {"b": numbers(2, 3), "a": numbers(4)}})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", {FIRST: {"b": numbers(2, 3)}, SECOND: {"a": numbers(4)}})


def refused(folder: Path, message: str, kind: type[MlcpipeError] = CheckpointError) -> str:
    with pytest.raises(kind, match=message) as caught:
        open_checkpoint(folder)
    line = str(caught.value)
    assert "\n" not in line and "\x1b" not in line and len(line) < 700
    return line


def test_single_file(single: Path) -> None:
    (single / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(single)
    assert checkpoint.path == single
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert list(checkpoint.tensors) == ["a", "b"]
    assert isinstance(checkpoint.tensors["b"], TensorInfo) and checkpoint.tensors["b"].shape == (2, 3)
    np.testing.assert_array_equal(checkpoint.read("b"), numbers(2, 3))
    assert checkpoint.read_raw("a") == numbers(4).tobytes()


def test_shards(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.generation_config == {}
    assert [file.name for file in checkpoint.weight_files] == [FIRST, SECOND]
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == {"b": FIRST, "a": SECOND}
    np.testing.assert_array_equal(checkpoint.read("a"), numbers(4))
    np.testing.assert_array_equal(checkpoint.read("b"), numbers(2, 3))


def test_shards_written_by_transformers_read_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.weight_files) > 1
    assert checkpoint.config["hidden_size"] == 32
    state = model.state_dict()
    assert set(checkpoint.tensors) == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.float().numpy(), err_msg=name)


def test_the_single_file_goes_before_an_index_as_in_transformers(single: Path) -> None:
    write_index(single, {"a": "absent.safetensors"})
    assert list(open_checkpoint(single).tensors) == ["a", "b"]


def test_links_to_files_are_followed(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--a-name" / "snapshots" / "1f"
    snapshot.mkdir(parents=True)
    for file in sharded.iterdir():
        (snapshot / file.name).symlink_to(Path("../../..") / "m" / file.name)
    checkpoint = open_checkpoint(snapshot)
    np.testing.assert_array_equal(checkpoint.read("a"), numbers(4))
    assert checkpoint.content_hash() == open_checkpoint(sharded).content_hash()
    assert (checkpoint.name, open_checkpoint(sharded).name) == ("org/a-name", "m")


def test_a_tensor_that_the_index_forgot_is_not_lost(sharded: Path) -> None:
    write_index(sharded, {"b": FIRST, "a": SECOND})
    write_tensors(sharded / SECOND, {"a": numbers(4), "extra": numbers(1)})
    assert list(open_checkpoint(sharded).tensors) == ["a", "b", "extra"]


@pytest.mark.parametrize("method", ["read", "read_raw"])
def test_asking_for_an_absent_tensor(single: Path, method: str) -> None:
    with pytest.raises(CheckpointError, match="missing tensor 'nope'"):
        getattr(open_checkpoint(single), method)("nope")


def test_tensors_cannot_be_changed(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    with pytest.raises(TypeError):
        checkpoint.tensors["a"] = checkpoint.tensors["b"]  # type: ignore[index]


# The folder


def test_an_absent_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nope", "not a checkpoint folder.*found nothing")


def test_a_file_instead_of_a_folder(single: Path) -> None:
    refused(single / "model.safetensors", "not a checkpoint folder.*found a file")


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refused(single, "no weights.*expected model.safetensors or model.safetensors.index.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_refused_and_not_opened(single: Path, name: str) -> None:
    (single / "model.safetensors").rename(single / name)
    os.chmod(single / name, 0)
    refused(single, f"pickled weights are refused.*found '{name}'.*convert them to safetensors")


def test_safetensors_under_another_name(single: Path) -> None:
    (single / "model.safetensors").rename(single / "consolidated.safetensors")
    (single / "pytorch_model.bin").write_bytes(b"")
    refused(single, "no usable weights.*found 'consolidated.safetensors'; rename")


def test_a_file_without_tensors(single: Path) -> None:
    write_header(single / "model.safetensors", {})
    refused(single, "no tensors")


def test_a_broken_link(single: Path) -> None:
    (single / "model.safetensors").rename(single / "gone")
    write_index(single, {"a": "link.safetensors"})
    (single / "link.safetensors").symlink_to("nowhere")
    refused(single, "missing weight file.*link.safetensors")


def test_a_pipe_does_not_block(single: Path) -> None:
    (single / "model.safetensors").unlink()
    os.mkfifo(single / "model.safetensors")
    refused(single, "cannot read weight file.*model.safetensors.*a pipe")


def test_a_folder_in_place_of_the_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").mkdir()
    refused(single, "cannot read weight file.*found a folder")


# Shards


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    refused(sharded, f"missing weight file.*{SECOND}.*download the checkpoint again")


def test_a_truncated_shard(sharded: Path) -> None:
    whole = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(whole[:-1])
    refused(sharded, f"truncated.*{SECOND}.*expected {len(whole)} bytes.*found {len(whole) - 1}")


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/secret.safetensors",
        "..\\secret.safetensors",
        "C:secret.safetensors",
        ".safetensors",
        "..",
        "",
        "pytorch_model.bin",
        "a\0.safetensors",
        "a\n.safetensors",
        "a" * 300 + ".safetensors",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_an_index_that_points_elsewhere(sharded: Path, shard: Any) -> None:
    write_tensors(sharded.parent / "secret.safetensors", {"a": numbers(4)})
    write_index(sharded, {"b": FIRST, "a": shard})
    refused(sharded, "the index names a shard that is not allowed.*model.safetensors.index.json")


def test_a_tensor_in_a_shard_without_it(sharded: Path) -> None:
    write_index(sharded, {"b": SECOND, "a": SECOND, "c": FIRST})
    refused(sharded, f"assigns tensor 'b' to a shard that does not contain it.*expected '{SECOND}'; found '{FIRST}'")


def test_a_tensor_in_no_shard(sharded: Path) -> None:
    """As an index has it that was not written again when two tensors became one: who needs it will miss it."""
    write_index(sharded, {"b": FIRST, "a": SECOND, "c": FIRST})
    assert list(open_checkpoint(sharded).tensors) == ["a", "b"]


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    write_tensors(sharded / SECOND, {"a": numbers(4), "b": numbers(2, 3)})
    refused(sharded, f"tensor 'b' is stored twice.*found '{FIRST}' and '{SECOND}'")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", {"": FIRST}, {"a\x1b": FIRST}])
def test_an_index_without_a_map(sharded: Path, weight_map: Any) -> None:
    write_index(sharded, weight_map)
    refused(sharded, "no weight_map|bad tensor name")


def test_an_index_with_a_duplicate_key(sharded: Path) -> None:
    text = f'{{"weight_map": {{"a": "{SECOND}", "b": "{FIRST}", "a": "{FIRST}"}}}}'
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "duplicate key 'a'.*index.json")


def test_an_index_too_large(sharded: Path) -> None:
    with (sharded / "model.safetensors.index.json").open("r+b") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    refused(sharded, f"file too large.*index.json.*expected at most {MAX_INDEX_BYTES} bytes")


# Configuration


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "wrong type of JSON.*found a list"),
        (b"null", "wrong type of JSON.*found a NoneType"),
        (b'{"a": \xff}', "not UTF-8"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "file too large"),
        (b'{"a": ["\\ud800"]}', "half of a surrogate pair"),
        (b'{"\\uDFFFa": 1}', "half of a surrogate pair"),
    ],
)
def test_bad_configurations(single: Path, name: str, content: bytes, message: str) -> None:
    (single / name).write_bytes(content)
    assert name in refused(single, message, ConfigError)


def test_no_configuration(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, "no checkpoint.*config.json, tokenizer.json and model.*found 'model.safetensors'; give the folder")


def test_a_configuration_that_is_a_folder(single: Path) -> None:
    (single / "generation_config.json").mkdir()
    refused(single, "cannot read file.*generation_config.json", ConfigError)


def test_a_broken_link_to_an_optional_configuration(single: Path) -> None:
    (single / "generation_config.json").symlink_to("nowhere")
    refused(single, "missing file.*generation_config.json", ConfigError)


def test_infinity_in_a_configuration_is_read_as_transformers_does(single: Path) -> None:
    (single / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert open_checkpoint(single).config == {"time_step_limit": [0.0, float("inf")]}


# The hash


RELEVANT = ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "vocab.txt",
            "additional_chat_templates/tool_use.jinja"]  # fmt: skip


def test_the_hash_follows_content_and_not_place_or_time(single: Path, tmp_path: Path) -> None:
    before = open_checkpoint(single).content_hash()
    copy = tmp_path / "elsewhere"
    shutil.copytree(single, copy)
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / "README.md").write_text("not part of the model")
    assert open_checkpoint(copy).content_hash() == before
    assert len(before) == 64 and set(before) <= set("0123456789abcdef")


@pytest.mark.parametrize("name", RELEVANT)
def test_every_relevant_file_changes_the_hash(single: Path, name: str) -> None:
    seen = {open_checkpoint(single).content_hash()}
    (single / name).parent.mkdir(exist_ok=True)
    for text in ('{"a": 1}', '{"a": 2}'):
        (single / name).write_text(text)
        seen.add(open_checkpoint(single).content_hash())
    assert len(seen) == 3


def test_one_bit_of_a_weight_or_of_the_index_changes_the_hash(sharded: Path) -> None:
    seen = {open_checkpoint(sharded).content_hash()}
    raw = bytearray((sharded / SECOND).read_bytes())
    raw[-4] ^= 1
    (sharded / SECOND).write_bytes(raw)
    seen.add(open_checkpoint(sharded).content_hash())
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 1}}))
    seen.add(open_checkpoint(sharded).content_hash())
    assert len(seen) == 3


def test_texts_that_weights_were_fitted_to(single: Path) -> None:
    """They are kept where a checkpoint is made of this one, each once."""
    config = single / "config.json"
    assert open_checkpoint(single).fitted_to == ()
    for text in ("ab" * 32, "cd" * 32, "ab" * 32):
        config.write_text(json.dumps(open_checkpoint(single).config_fitted_to(text)))
    found = open_checkpoint(single)
    assert found.fitted_to == ("ab" * 32, "cd" * 32) and found.config["model_type"] == "llama"


@pytest.mark.parametrize(
    "value", [None, "ab" * 32, ["AB" * 32], ["ab" * 32 + "\n"], [1], {"ab" * 32: 1}, ["ab" * 32] * 65]
)
def test_fitted_to_something_else(value: Any, single: Path) -> None:
    (single / "config.json").write_text(json.dumps({"model_type": "llama", "mlcpipe_fitted_to": value}))
    with pytest.raises(ConfigError, match="mlcpipe_fitted_to in .*; expected at most 64 times 64 hexadecimal digits"):
        _ = open_checkpoint(single).fitted_to
