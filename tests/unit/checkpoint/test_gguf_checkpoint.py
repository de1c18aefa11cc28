"""GGUF files as checkpoints: names, what is refused, and what the commands do with them."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="files are written by the gguf package")

from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.gguf import GgufCheckpoint
from mlcpipe.errors import CheckpointError, ConfigError, MlcpipeError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.defaults import DEFAULT_QUANTIZATION
from mlcpipe.tuning.tasks import model_of
from tests.conftest import TinyLlama, write_llama
from tests.unit.checkpoint.gguf_files import F32, add_vocabulary, write_gguf

Q8_0, F16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16
MODEL = TinyLlama(intermediate_size=96, layers=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path_factory.mktemp("llama"), MODEL))


def changed(
    source: Checkpoint, path: Path, arch: str = "llama", drop: str = "", kv_heads: Any = None, **tensors: Any
) -> Path:
    """A file with `tensors` in addition to or in place of the checkpoint's, and `arch`'s keys; without the key `drop`."""
    values = {"token_embd.weight": source.read("model.embed_tokens.weight"), **tensors}
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "embedding_length": 64,
        "attention.head_count": 4,
        "feed_forward_length": 96,
        "block_count": 1,
        "context_length": 256,
    }
    for key, value in keys.items():
        if key != drop:
            writer.add_uint32(f"{arch}.{key}", value)
    if kv_heads is not None:
        writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocabulary(writer, MODEL.vocab_size)
    for name, value in values.items():
        if value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_quantized_weights_are_kept(source: Checkpoint, tmp_path: Path) -> None:
    quantized = open_checkpoint(write_gguf(source, tmp_path / "q.gguf", Q8_0))
    assert quantized.quantized_as == "Q8_0"
    assert quantized.quantization(None) == "keep" and quantized.quantization("q8f16_1") == "q8f16_1"
    for kind in (F32, F16):
        plain = open_checkpoint(write_gguf(source, tmp_path / f"{kind.name}.gguf", kind))
        assert plain.quantized_as is None and plain.quantization(None) == DEFAULT_QUANTIZATION


def test_tuning_reads_its_configuration(source: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "q.gguf", Q8_0)
    assert model_of(path, "q4f16_1").config == open_checkpoint(path).config


def test_split_model(source: Checkpoint, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "m.gguf", split_max_tensors=4)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    found = open_checkpoint(parts[-1])
    assert found.weight_files == tuple(parts)
    for name in source.tensors:
        np.testing.assert_array_equal(found.read(name), source.read(name))


def test_texts_and_names(source: Checkpoint, tmp_path: Path) -> None:
    found = open_checkpoint(write_gguf(source, tmp_path / "my-model.gguf"))
    assert found.name == "my-model"
    folder = found.folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text()) == found.config
    tokenizer = Tokenizer.load(folder, generation_config=found.generation_config, config=found.config)
    assert tokenizer.encode("ab", add_special_tokens=True)[0] == 1 and tokenizer.eos_token_ids == {2}
    assert tokenizer.chat_template().render([{"role": "user", "content": "a"}]) == "user: a</s>"
    del tokenizer, found
    gc.collect()
    assert not folder.exists()  # it goes with its checkpoint


def test_content_hash_is_of_the_weights(source: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "m.gguf")
    first = open_checkpoint(path).content_hash()
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    assert open_checkpoint(path).content_hash() != first


def test_a_file_without_suffix_is_known_by_its_magic(source: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "m.gguf").rename(tmp_path / "sha256-0123")
    assert isinstance(open_checkpoint(path), GgufCheckpoint)
    (tmp_path / "other").write_bytes(b"text")
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        open_checkpoint(tmp_path / "other")
    with pytest.raises(CheckpointError, match="not a checkpoint folder.*found nothing"):
        open_checkpoint(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        open_checkpoint(tmp_path / "pipe")


def test_a_file_that_was_cut_meanwhile(source: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "m.gguf", Q8_0)
    found = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="the file ends inside tensor|not finite"):
        for name in found.tensors:
            found.read(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "rwkv6"}, "unknown architecture in general.architecture.*found 'rwkv6'"),
        ({"drop": "block_count"}, "key llama.block_count"),
        ({"drop": "embedding_length"}, "key llama.embedding_length"),
        ({"token_embd.weight": None, "a": np.zeros((2, 2), np.float32)}, "no embedding"),
        ({"token_embd.weight": np.zeros((271, 64), np.float32)}, "key tokenizer.ggml.tokens.* expected 271 tokens"),
        ({"blk.0.attn_q.weight": np.zeros((12, 64), np.float32)}, "the rows of model.layers.0.self_attn.q_proj"),
        ({"rope_freqs.weight": np.full(8, 0.5, np.float32)}, "rope_freqs.weight is not supported"),
        ({"rope_freqs.weight": np.arange(1, 9).astype(np.float32)}, "rope_freqs.weight is not supported"),
        ({"rope_freqs.weight": np.ones(7, np.float32)}, "rope_freqs.weight has the wrong shape"),
        ({"rope_freqs.weight": np.full(8, np.nan, np.float32)}, "is not finite"),
    ],
)
def test_refusals(source: Checkpoint, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    path = changed(source, tmp_path / "m.gguf", **arguments)
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        open_checkpoint(path)
    assert isinstance(error.value, MlcpipeError) and "\n" not in str(error.value)


@pytest.mark.parametrize("kv_heads", [None, 2, [2, 2], [0], [-2], [2.0]], ids=str)
def test_a_family_where_some_layers_attend_has_kv_heads_for_each(
    source: Checkpoint, tmp_path: Path, kv_heads: Any
) -> None:
    with pytest.raises(ConfigError, match="lfm2.attention.head_count_kv"):
        open_checkpoint(changed(source, tmp_path / "m.gguf", "lfm2", kv_heads=kv_heads))
    with pytest.raises(ConfigError, match="lfm2.shortconv.l_cache"):
        open_checkpoint(changed(source, tmp_path / "good.gguf", "lfm2", kv_heads=[2]))


def test_a_tensor_that_would_not_be_used_keeps_its_name(source: Checkpoint, tmp_path: Path) -> None:
    """The weight table then refuses it."""
    extra = {"blk.0.ffn_down_exps.weight": np.zeros((2, 2, 2), np.float32)}
    assert set(extra) <= open_checkpoint(changed(source, tmp_path / "m.gguf", **extra)).tensors.keys()


def test_keys_that_change_the_result_are_refused(source: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "m.gguf")
    values = dict(open_checkpoint(path).metadata.values)  # type: ignore[attr-defined]
    from mlcpipe.checkpoint.gguf.families import family_of
    from mlcpipe.checkpoint.gguf.header import read_header
    from mlcpipe.checkpoint.gguf.metadata import Metadata

    tensors = {tensor.name: tensor for tensor in read_header(path).tensors}
    family_of(Metadata(values, "m.gguf"), tensors)
    for key, value in {
        "llama.logit_scale": 2.0, "llama.rope.scaling.type": "longrope", "llama.rope.dimension_count": 8,
        "llama.attention.value_length": 8, "llama.attention.causal": False, "llama.context_length": "long",
        "llama.rope.scaling.attn_factor": 1.5, "llama.attention.head_count": 0,
        "llama.feed_forward_length": np.array([96], np.uint32),
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=key):
            family_of(Metadata({**values, "llama.rope.scaling.factor": 4.0, key: value}, "m.gguf"), tensors)
