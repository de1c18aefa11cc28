"""Tokenizers of GGUF metadata give the ids of the tokenizers that they were made of, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.gguf.pre_tokenizers import PIPELINES as KNOWN
from mlcpipe.checkpoint.gguf.vocabulary import SETTINGS, TOKENIZER, tokenizer_files
from mlcpipe.errors import ConfigError, MlcpipeError, TokenizerError
from mlcpipe.runtime.text import tokenizer as text_tokenizer
from tests.native.pipelines import PIPELINES
from tests.native.texts import texts
from tests.unit.text.conftest import LINES

# Pipeline -> `tokenizer.ggml.pre`.
PRE = {
    "llama3": "llama-bpe", "olmo2": "dbrx", "mistral-nemo": "tekken", "qwen2": "qwen2", "qwen3.5": "qwen35", "o200k": "gpt-4o",
    "gpt2": "gpt-2", "starcoder": "starcoder", "deepseek3": "deepseek-v3", "falcon": "falcon",
}  # fmt: skip
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def metadata_of(library: Tokenizer, model: str, /, **values: Any) -> Metadata:
    """What llama.cpp's conversion stores of a tokenizer."""
    state = json.loads(library.to_str())["model"]
    vocab = library.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    assert [vocab[token] for token in tokens] == list(range(len(tokens)))
    types = {
        token.content: CONTROL if token.special else USER_DEFINED
        for token in library.get_added_tokens_decoder().values()
    }
    types |= {"<unk>": UNKNOWN} | {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    stored = {
        "model": model,
        "tokens": tokens,
        "token_type": np.array([types.get(token, NORMAL) for token in tokens], np.int32),
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["</s>"],
    }
    if model == "gpt2":
        stored["merges"] = [" ".join(pair) for pair in state["merges"]]
    else:
        rank = {left + right: -float(i) for i, (left, right) in reversed([*enumerate(state["merges"])])}
        stored["scores"] = np.array([rank.get(token, -1e6) for token in tokens], np.float32)
    return Metadata(
        {f"tokenizer.ggml.{key}": value for key, value in {**stored, **values}.items() if value is not None}, "m.gguf"
    )


def loaded(metadata: Metadata, folder: Path) -> text_tokenizer.Tokenizer:
    for name, content in tokenizer_files(metadata).items():
        (folder / name).write_text(content, encoding="utf-8")
    return text_tokenizer.Tokenizer.load(folder, generation_config={}, config={})


def plain_texts(library: Tokenizer) -> list[str]:
    """Texts without added tokens, whose flags GGUF does not have."""
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    return [text for text in [*LINES, *texts(300, LINES, seed=3)] if not any(token in text for token in added)]


@pytest.mark.parametrize("name", PRE)
def test_ids_of_byte_level_vocabularies(name: str, tmp_path: Path) -> None:
    library = PIPELINES[name]()
    found = loaded(metadata_of(library, "gpt2", pre=PRE[name], add_bos_token=False), tmp_path)
    for text in plain_texts(library):
        assert found.encode(text) == library.encode(text, add_special_tokens=False).ids, text
    assert found.encode("a<|im_start|>b") == library.encode("a<|im_start|>b", add_special_tokens=False).ids


def test_of_one_token_s_merges_the_longer_left_side_comes_first() -> None:
    """As transformers orders merges of equal scores (convert_slow_tokenizer.generate_merges)."""
    values = {"model": "llama", "tokens": ["a", "b", "c", "ab", "bc", "abc"], "scores": -np.arange(6.0)}
    made = tokenizer_files(Metadata({f"tokenizer.ggml.{key}": value for key, value in values.items()}, "m.gguf"))
    assert json.loads(made[TOKENIZER])["model"]["merges"] == [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]]


@pytest.mark.parametrize(("name", "prefix"), [("llama2", None), ("gemma", False)])
def test_ids_of_sentence_piece_vocabularies(name: str, prefix: bool | None, tmp_path: Path) -> None:
    library = PIPELINES[name]()
    found = loaded(metadata_of(library, "llama", pre="default", add_space_prefix=prefix), tmp_path)
    for text in plain_texts(library):
        assert found.encode(text) == library.encode(text, add_special_tokens=False).ids, text
        assert found.decode(found.encode(text)) == library.decode(library.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("pre", "stated", "bos", "eos"),
    [("llama-bpe", {}, 1, 0), ("llama-bpe", {"add_bos_token": False}, 0, 0), ("qwen2", {}, 0, 0),
     ("qwen2", {"add_bos_token": True, "add_eos_token": True}, 1, 1)],
)  # fmt: skip
def test_tokens_around_a_text(pre: str, stated: dict[str, bool], bos: int, eos: int, tmp_path: Path) -> None:
    library = PIPELINES["gpt2"]()
    found = loaded(metadata_of(library, "gpt2", pre=pre, **stated), tmp_path)
    plain, around = found.encode("fox"), found.encode("fox", add_special_tokens=True)
    assert around == [*[library.token_to_id("<s>")] * bos, *plain, *[library.token_to_id("</s>")] * eos]


def test_templates_and_special_tokens(tmp_path: Path) -> None:
    metadata = metadata_of(PIPELINES["gpt2"](), "gpt2", pre="gpt-2", padding_token_id=0)
    named = {
        "tokenizer.chat_template": "main",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    settings = json.loads(tokenizer_files(Metadata({**metadata.values, **named}, "m.gguf"))[SETTINGS])
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == ("<s>", "</s>", "<unk>")
    assert settings["unk_token"] is None
    tokenizer = loaded(Metadata({**metadata.values, **named}, "m.gguf"), tmp_path)
    assert tokenizer.chat_templates == {"default": "main", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "t5"}, "tokenizer is not supported"),
        ({"model": "bert"}, "tokenizer is not supported"),
        ({"model": 3}, "key tokenizer.ggml.model"),
        ({"pre": "invented"}, "unknown tokenizer.ggml.pre .*'invented'"),
        ({"pre": None}, "unknown tokenizer.ggml.pre"),
        ({"pre": "default"}, "unknown tokenizer.ggml.pre"),
        ({"tokens": None}, "key tokenizer.ggml.tokens"),
        ({"merges": None}, "key tokenizer.ggml.merges"),
        ({"merges": ["a nothing"]}, "a merge names no token"),
        ({"merges": ["a"]}, "a merge names no token"),
        ({"token_type": np.zeros(3, np.int32)}, "key tokenizer.ggml.token_type"),
        ({"token_type": np.full(564, 9, np.int32)}, "unknown type of a token"),
        ({"bos_token_id": 10**6}, "key tokenizer.ggml.bos_token_id"),
        ({"add_bos_token": "yes"}, "key tokenizer.ggml.add_bos_token"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    library = PIPELINES["gpt2"]()
    if "token_type" in values and values["token_type"][0]:
        values = {"token_type": np.full(library.get_vocab_size(), 9, np.int32)}
    metadata = metadata_of(library, "gpt2", **{"pre": "gpt-2", **values})
    with pytest.raises((TokenizerError, ConfigError), match=message) as error:
        tokenizer_files(metadata)
    assert isinstance(error.value, MlcpipeError) and "\n" not in str(error.value)


def test_long_tokens_do_not_take_forever() -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "a" * 20_000]
    metadata = Metadata(
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": np.zeros(5)},
        "m.gguf",
    )
    with pytest.raises(TokenizerError, match="the tokens are too long"):
        tokenizer_files(metadata)


def test_token_twice_is_refused() -> None:
    metadata = metadata_of(PIPELINES["gpt2"](), "gpt2", pre="gpt-2")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    tokens[-1] = tokens[5]
    with pytest.raises(TokenizerError, match="a token is listed twice"):
        tokenizer_files(metadata)


def test_every_pipeline_makes_a_tokenizer() -> None:
    library = PIPELINES["gpt2"]()
    for pre in KNOWN:
        made = Tokenizer.from_str(tokenizer_files(metadata_of(library, "gpt2", pre=pre))[TOKENIZER])
        assert (
            made.decode(made.encode("quick brown 12 žluť\n", add_special_tokens=False).ids) == "quick brown 12 žluť\n"
        )
