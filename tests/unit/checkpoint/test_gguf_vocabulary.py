"""Tokenizers of GGUF metadata give the ids of the tokenizers that they were made of, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mlcpipe.checkpoint.gguf.checkpoint import generation_of
from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.gguf.pre_tokenizers import PIPELINES as KNOWN
from mlcpipe.checkpoint.gguf.vocabulary import SETTINGS, TOKENIZER, tokenizer_files
from mlcpipe.errors import ConfigError, MlcpipeError, TokenizerError
from mlcpipe.runtime.text import tokenizer as text_tokenizer
from tests.native.pipelines import CL100K, O200K, PIPELINES, QWEN, bytes_after, split
from tests.native.texts import texts
from tests.unit.text.conftest import LINES

# Pipeline -> `tokenizer.ggml.pre`.
PRE = {
    "llama3": "llama-bpe", "olmo2": "dbrx", "mistral-nemo": "tekken", "qwen2": "qwen2", "qwen3.5": "qwen35", "o200k": "gpt-4o",
    "gpt2": "gpt-2", "starcoder": "starcoder", "deepseek3": "deepseek-v3", "falcon": "falcon",
}  # fmt: skip
# Patterns of published tokenizer.json files by `tokenizer.ggml.pre`, isolated one after the other.
PATTERNS = {
    "bailingmoe2": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "bloom": [r" ?[^(\s|[.,!?…。，、।۔،])]+"],
    "cohere2moe": [r"\d{1,3}(?=(?:\d{3})*\b)", O200K],
    "exaone-moe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "jais-2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)"
        r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ],
    "laguna": [r"[^\n]+|[\n]+", QWEN],
    "minicpm5": [r"\p{N}{1,3}", CL100K.replace("{1,3}", "+")],
    "seed-coder": [QWEN.replace(r"|\p{N}|", r"|\p{N}{1}|").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


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
    added = ["<unk>", *(token.content for token in library.get_added_tokens_decoder().values())]
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


@pytest.mark.parametrize(
    ("name", "model", "prefix"), [("llama2", "llama", None), ("gemma", "llama", False), ("gemma", "gemma4", None)]
)
def test_ids_of_sentence_piece_vocabularies(name: str, model: str, prefix: bool | None, tmp_path: Path) -> None:
    library = PIPELINES[name]()
    merges = json.loads(library.to_str())["model"]["merges"]
    more = {"merges": [" ".join(pair) for pair in merges]} if model == "gemma4" else {}
    found = loaded(metadata_of(library, model, pre="default", add_space_prefix=prefix, **more), tmp_path)
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


def small(
    tokens: dict[str, int], /, model: str = "gpt2", general: dict[str, str] | None = None, **ids: str
) -> Metadata:
    """A vocabulary of the characters `a` to `z` and `tokens` with their types, in that order; `ids` name some."""
    texts = [*"abcdefghijklmnopqrstuvwxyz", *tokens]
    values = {
        "model": model, "pre": "gpt-2", "tokens": texts, "merges": ["a b"] if "ab" in tokens else [],
        "token_type": np.array([NORMAL] * 26 + [*tokens.values()], np.int32),
        **{f"{name}_token_id": texts.index(text) for name, text in ids.items()},
    }  # fmt: skip
    if model == "llama":
        values["scores"] = -np.arange(len(texts), dtype=np.float32)
        del values["merges"]
    named = {f"general.{key}": value for key, value in (general or {}).items()}
    return Metadata({f"tokenizer.ggml.{key}": value for key, value in values.items()} | named, "m.gguf")


@pytest.mark.parametrize(
    ("tokens", "ids", "expected"),
    [
        ("<|endoftext|> <|im_start|> <|im_end|> <|fim_prefix|> <|fim_pad|> <|repo_name|> <|file_sep|>", {"eos": "<|im_end|>"},
         "<|endoftext|> <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|>"),
        ("<|begin_of_text|> <|end_of_text|> <|eom_id|> <|eot_id|>", {"eos": "<|end_of_text|>"}, "<|end_of_text|> <|eom_id|> <|eot_id|>"),
        ("<|endoftext|> <|return|> <|call|> <|end|> <|message|>", {"eos": "<|return|>"}, "<|endoftext|> <|return|> <|call|>"),
        ("<|flush|> <|calls|> <|end|>", {"eos": "<|end|>"}, "<|flush|> <|calls|>"),
        ("<|return|> <|end|>", {}, "<|return|> <|end|>"),
        ("<s> </s> <|endoftext|> <|user|> <|end|>", {"eos": "<|endoftext|>"}, "</s> <|endoftext|> <|end|>"),
        ("<|mine|> <|yours|> <|his|>", {"eos": "<|mine|>", "eot": "<|yours|>", "eom": "<|his|>"}, "<|mine|> <|yours|> <|his|>"),
        ("<PAD> <|fim_pad|> <|other|>", {"fim_pad": "<|other|>"}, "<|other|>"),
    ],
)  # fmt: skip
def test_ends_of_an_answer(tokens: str, ids: dict[str, str], expected: str) -> None:
    """As llama.cpp's src/llama-vocab.cpp derives them, from ids and from texts."""
    metadata = small(dict.fromkeys(tokens.split(), CONTROL), **ids)
    found = generation_of(metadata).get("eos_token_id", [])
    assert [metadata.strings("tokenizer.ggml.tokens")[index] for index in found] == expected.split()


def test_ends_and_types(tmp_path: Path) -> None:
    """By llama.cpp's rules an end is a control token whatever its type says. Gemma's </s> is text (HTML), no end."""
    metadata = small({"<|im_end|>": NORMAL, "</s>": USER_DEFINED, "<s>": USER_DEFINED, "<end_of_turn>": USER_DEFINED})
    found = loaded(metadata, tmp_path)
    assert generation_of(metadata) == {"eos_token_id": [26, 29]}
    assert found.encode("a<|im_end|></s>b<end_of_turn>") == [0, 26, 27, 1, 29]
    assert found.decode([0, 26, 27, 1, 29]) == "a</s>b" and {26, 29} <= found.control_token_ids


def test_ids_that_sentence_piece_implies(tmp_path: Path) -> None:
    """1, 2 and 0, as llama.cpp has them, where these are special tokens."""
    values = small({}, "llama").values
    texts, types = ["<unk>", "<s>", "</s>", *"abc"], np.array([UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 3], np.int32)
    changes = {"tokens": texts, "token_type": types, "scores": -np.arange(6.0)}
    metadata = Metadata({**values, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}, "m.gguf")
    found = loaded(metadata, tmp_path)
    assert generation_of(metadata) == {"eos_token_id": [2]} and found.bos_token_id == 1
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert generation_of(small({}, "llama")) == {}  # `c` is a letter
    del metadata.values["tokenizer.ggml.token_type"]  # type: ignore[attr-defined]
    assert json.loads(tokenizer_files(metadata)[TOKENIZER])["added_tokens"] and generation_of(metadata) == {
        "eos_token_id": [2]
    }


PHI3 = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<|endoftext|>": CONTROL, "<|user|>": CONTROL, "<|end|>": CONTROL,
        "<|tool|>": USER_DEFINED}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "general", "tokens", "left", "right"),
    [
        ("llama", {"name": "Microsoft Phi-3 Mini", "architecture": "llama"}, PHI3, "", "</s> <|user|> <|end|> <|tool|>"),
        ("llama", {"name": "phi3"}, PHI3, "", "</s> <|user|> <|end|> <|tool|>"),
        ("gpt2", {"name": "mini", "architecture": "phi3"}, {**PHI3, "<|endofprompt|>": CONTROL}, "", "</s> <|user|> <|end|> <|tool|>"),
        ("gpt2", {"architecture": "phi3"}, dict.fromkeys(("<|endoftext|>", "<|im_sep|>"), CONTROL),
         "<|endoftext|> <|im_sep|>", "<|endoftext|> <|im_sep|>"),
        ("llama", {"name": "Llama", "architecture": "llama"}, PHI3, "", ""),
    ],
)  # fmt: skip
def test_white_space_that_tokens_take(
    model: str, general: dict[str, str], tokens: dict[str, int], left: str, right: str
) -> None:
    """Flags of Phi-3's, Phi-4 mini's and Phi-4's tokenizer_config.json; by the name alone llama.cpp has Phi-3's."""
    made = json.loads(tokenizer_files(small(tokens, model, general))[TOKENIZER])["added_tokens"]
    assert [token["content"] for token in made] == list(tokens)
    assert [token["content"] for token in made if token["lstrip"]] == left.split()
    assert [token["content"] for token in made if token["rstrip"]] == right.split()


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_rows_without_a_text(model: str, tmp_path: Path) -> None:
    """Unused tokens, which pad a vocabulary, and empty ones. A merge may need one: it stays."""
    tokens = {"[PAD26]": UNUSED, "ab": UNUSED, "": CONTROL}
    metadata = small({**tokens, "<|end|>": CONTROL}, model)
    metadata.strings("tokenizer.ggml.tokens").insert(0, "")
    types = [NORMAL, *metadata.values["tokenizer.ggml.token_type"]]  # type: ignore[misc]
    metadata.values |= {"tokenizer.ggml.token_type": np.array(types), "tokenizer.ggml.scores": np.zeros(31)}  # type: ignore[operator]
    found = loaded(metadata, tmp_path)
    assert found.encode("ab<|end|>") == ([28, 30] if model == "gpt2" else [1, 2, 30])
    assert [found.token_bytes(index) for index in (0, 27, 29)] == [b"", b"", b""]
    assert found.token_bytes(28) == (b"ab" if model == "gpt2" else b"") and found.vocab_size == 31


def test_padding_that_is_called_unknown() -> None:
    """As in the first files of Phi-3, whose <unk> is a control token."""
    metadata = small({"<unk>": CONTROL, "[PAD27]": UNKNOWN, "[PAD28]": UNKNOWN}, "llama", unknown="<unk>")
    made = json.loads(tokenizer_files(metadata)[TOKENIZER])
    assert [token["content"] for token in made["added_tokens"]] == ["<unk>"] and made["model"]["unk_token"] == "<unk>"
    assert not {"[PAD27]", "[PAD28]"} & made["model"]["vocab"].keys()


def test_no_control_token_is_made_of_characters() -> None:
    """As in SentencePiece; llama.cpp merges them."""
    metadata = small({"</": NORMAL, "s>": NORMAL, "</s>": CONTROL, "<": NORMAL, "/": NORMAL, ">": NORMAL}, "llama")
    assert json.loads(tokenizer_files(metadata)[TOKENIZER])["model"]["merges"] == [["<", "/"], ["s", ">"]]


def test_recommended_sampling() -> None:
    """`general.sampling` is what the conversion reads of generation_config.json."""
    keys = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 0}
    sampling = {f"general.sampling.{key}": value for key, value in keys.items()}
    found = generation_of(Metadata({**small({}).values, **sampling}, "m.gguf"))
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1}
    assert found == expected and type(found["top_k"]) is int
    more = {"general.sampling.xtc_probability": 0.5, "general.sampling.sequence": "temp", "general.sampling.top_k": 0.5}
    others = {"xtc_probability": 0.5, "sequence": "temp"}  # for stated_sampling to name
    assert generation_of(Metadata({**small({}).values, **more}, "m.gguf")) == {"top_k": 0.5, **others}
    with pytest.raises(ConfigError, match="key general.sampling.temp"):
        generation_of(Metadata({**small({}).values, "general.sampling.temp": "hot"}, "m.gguf"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"": "main", ".tool_use": "tools"}, {"default": "main", "tool_use": "tools"}),
        ({"": "main", "s": ["gone", "tool_use"], ".tool_use": "tools"}, {"default": "main", "tool_use": "tools"}),
        ({".tool_use": "tools", ".rag": "rag"}, {"default": "tools", "tool_use": "tools", "rag": "rag"}),
        ({"": "", ".default": "main"}, {"default": "main"}),
        ({"": "main", ".default": "other"}, {"default": "main"}),
        ({".rag": "rag"}, {"rag": "rag"}),
    ],
)
def test_templates(keys: dict[str, Any], expected: dict[str, str], tmp_path: Path) -> None:
    """llama.cpp asks for the key of a template; it does not read the list of names."""
    named = {f"tokenizer.chat_template{key}": value for key, value in keys.items()}
    assert loaded(Metadata({**small({}).values, **named}, "m.gguf"), tmp_path).chat_templates == expected


def test_too_many_templates() -> None:
    named = {f"tokenizer.chat_template.t{index}": "a" for index in range(17)}
    with pytest.raises(ConfigError, match="at most 16 templates"):
        tokenizer_files(Metadata({**small({}).values, **named}, "m.gguf"))


def test_special_tokens() -> None:
    metadata = metadata_of(PIPELINES["gpt2"](), "gpt2", pre="gpt-2", padding_token_id=0)
    settings = json.loads(tokenizer_files(metadata)[SETTINGS])
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == ("<s>", "</s>", "<unk>")
    assert settings["unk_token"] is None
    metadata = metadata_of(PIPELINES["gpt2"](), "gpt2", pre="gpt-2", padding_token_id=2**32 - 1)
    assert json.loads(tokenizer_files(metadata)[SETTINGS])["pad_token"] is None  # as llama.cpp has it


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


@pytest.mark.parametrize("pre", PATTERNS)
def test_words_are_those_of_published_patterns(pre: str) -> None:
    published, found = bytes_after(*map(split, PATTERNS[pre])), KNOWN[pre].pre_tokenizer()
    for text in [*LINES, "12½3456½789 1234567", " " * 700 + "x", *texts(300, LINES, seed=4)]:
        assert found.pre_tokenize_str(text) == published.pre_tokenize_str(text), text


def test_every_pipeline_makes_a_tokenizer() -> None:
    library = PIPELINES["gpt2"]()
    for pre in KNOWN:
        made = Tokenizer.from_str(tokenizer_files(metadata_of(library, "gpt2", pre=pre))[TOKENIZER])
        assert (
            made.decode(made.encode("quick brown 12 žluť\n", add_special_tokens=False).ids) == "quick brown 12 žluť\n"
        )
