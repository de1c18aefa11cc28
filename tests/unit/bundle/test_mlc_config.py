"""`mlc-chat-config.json`: the fields that MLC's consumers look up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlcpipe.bundle.conv_template import ConvTemplate, assemble
from mlcpipe.bundle.mlc_config import mlc_chat_config, tokenizer_info
from mlcpipe.errors import ConfigError
from tests.unit.bundle.conftest import MODEL

BYTE_LEVEL = {"decoder": {"type": "ByteLevel"}, "normalizer": None}
LLAMA_LIKE = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {"type": "NFC"}]},
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}


def config(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": MODEL.model_copy(update=changes.pop("model", {})),
        "quantization": "q4f16_1",
        "model_config": {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_files": ["tokenizer.json", "tokenizer_config.json"],
        "tokenizer_json": BYTE_LEVEL,
        "conv_template": ConvTemplate({"name": "x"}, ()),
        "generation_config": {},
    }
    return mlc_chat_config(**{**arguments, **changes})


def test_fields() -> None:
    result = config(generation_config={"temperature": 0.6, "eos_token_id": [2, 7]})
    assert result == {
        "version": "0.1.0",
        "model_type": "llama",
        "quantization": "q4f16_1",
        "model_config": {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2},
        "vocab_size": 320,
        "context_window_size": 256,
        "sliding_window_size": -1,
        "prefill_chunk_size": 64,
        "attention_sink_size": -1,
        "tensor_parallel_shards": 1,
        "temperature": 0.6,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "top_p": 1.0,
        "tokenizer_files": ["tokenizer.json", "tokenizer_config.json"],
        "tokenizer_info": {
            "token_postproc_method": "byte_level",
            "prepend_space_in_encode": False,
            "strip_space_in_decode": False,
        },
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "conv_template": {"name": "x"},
    }
    assert json.loads(json.dumps(result)) == result


def test_checkpoint_without_a_template_serves_plain_text() -> None:
    template = config(conv_template=None)["conv_template"]
    assert assemble(template, [{"role": "user", "content": "Once upon"}], reply_header=True) == "Once upon"
    assert template["stop_token_ids"] == [2]


def test_tokenizer_of_the_sentencepiece_kind() -> None:
    assert tokenizer_info(LLAMA_LIKE) == {
        "token_postproc_method": "byte_fallback",
        "prepend_space_in_encode": True,
        "strip_space_in_decode": True,
    }


@pytest.mark.parametrize("hostile", [{}, {"decoder": 3, "normalizer": []}, {"decoder": {"type": "Sequence"}}])
def test_tokenizer_that_says_nothing(hostile: dict[str, Any]) -> None:
    assert tokenizer_info(hostile)["token_postproc_method"] == "byte_fallback"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_files": ["tokenizer.model"]},
        {"generation_config": {"temperature": "hot"}},
        {"generation_config": {"top_p": True}},
        {"generation_config": {"eos_token_id": ["</s>"]}},
        {"generation_config": {"bos_token_id": -2}},
    ],
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config(**changes)
