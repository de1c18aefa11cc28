"""What the files beside tokenizer.json add and override: each pair that can disagree, read as transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers import normalizers
from transformers import AutoTokenizer

from mlcpipe.errors import CheckpointWarning, TokenizerError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.unit.text.published_shapes import SHAPES
from tests.unit.text.side_files import (
    ALPHABET,
    MARKS,
    TEMPLATE,
    TEXTS,
    Files,
    bos,
    byte_level,
    load,
    of_ours,
    of_transformers,
    pieces,
    words,
    write,
)

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
JINJA, MORE = "chat_template.jinja", "additional_chat_templates"
SIZE = len({*MARKS, *ALPHABET})  # of the vocabulary: the next free id
END = "<|endoftext|>"
SHOUTS = {"normalizer": normalizers.Lowercase()}


def flagged(content: str, **flags: bool) -> dict[str, Any]:
    """A token as tokenizer_config.json writes it."""
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"__type": "AddedToken", "content": content, **plain, **flags}


def decoder(**tokens: dict[str, Any]) -> dict[str, Any]:
    listed = {"a": (3, "<|a|>"), "b": (4, "<|b|>"), "s": (0, "<s>"), "new": (SIZE, "<|new|>"), "far": (999, "<|new|>")}
    return {"added_tokens_decoder": {str(listed[name][0]): {"content": listed[name][1], **flags} for name, flags in tokens.items()}}  # fmt: skip


def templates(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": f"{name} {TEMPLATE}"} for name in names]


def padded(made: Tokenizers, token: str) -> Tokenizers:
    made.enable_padding(pad_token=token, pad_id=made.token_to_id(token))
    return made


# Name -> the tokenizer, and the files beside it.
TOKENS: dict[str, tuple[Any, Files]] = {
    # tokenizer.json and tokenizer_config.json
    "named, in the vocabulary": (byte_level(), {CONFIG: {"eos_token": "<|b|>", "bos_token": "<s>"}}),
    "named, nowhere else": (byte_level(), {CONFIG: {"eos_token": "<|new|>"}}),
    "named as an object": (byte_level(), {CONFIG: {"eos_token": flagged("<|b|>", lstrip=True, special=False)}}),
    "named, not special in the list": (
        byte_level(added=[{"content": "<|b|>", "special": False, "rstrip": True}]), {CONFIG: {"eos_token": "<|b|>"}},
    ),
    "named, not special, beside a decoder": (
        byte_level(added=[{"content": "<|b|>", "special": False}]), {CONFIG: {"eos_token": "<|b|>", **decoder(a={})}},
    ),
    "named null": (byte_level(added=["<s>"]), {CONFIG: {"bos_token": None, "eos_token": "</s>"}}),
    "a name of its own": (byte_level(), {CONFIG: {"eot_token": "<|a|>", "image_token": "<|new|>", "x_token": 3}}),
    "an object with a name of its own": (byte_level(), {CONFIG: {"eot_token": flagged("<|a|>", rstrip=True)}}),
    "additional": (byte_level(), {CONFIG: {"additional_special_tokens": ["<|a|>", "<|new|>", "<|a|>"]}}),
    "extra": (byte_level(), {CONFIG: {"extra_special_tokens": ["<|a|>", flagged("<|b|>", lstrip=True)]}}),
    "extra and additional": (
        byte_level(), {CONFIG: {"extra_special_tokens": ["<|a|>"], "additional_special_tokens": ["<|b|>"]}},
    ),
    "extra by name": (
        byte_level(), {CONFIG: {"extra_special_tokens": {"image_token": "<|a|>"}, "additional_special_tokens": ["<|b|>"]}},
    ),
    "extra empty": (byte_level(), {CONFIG: {"extra_special_tokens": [], "additional_special_tokens": ["<|b|>"]}}),
    "additional, listed as not special": (
        byte_level(added=[{"content": "<|a|>", "special": False}]), {CONFIG: {"additional_special_tokens": ["<|a|>"]}},
    ),
    "the decoder's flags": (
        byte_level(added=["<|a|>", "<|b|>"]),
        {CONFIG: decoder(a={"lstrip": True, "rstrip": True, "special": True}, b={"special": False})},
    ),
    "the decoder makes special": (
        byte_level(added=[{"content": "<|a|>", "special": False}]), {CONFIG: decoder(a={"special": True})},
    ),
    "the decoder normalizes": (
        byte_level(added=["<|a|>"], **SHOUTS), {CONFIG: decoder(a={"normalized": True, "special": False})},
    ),
    "the decoder's defaults": (byte_level(**SHOUTS), {CONFIG: decoder(a={}, b={"special": True})}),
    "the decoder's single words": (
        byte_level(), {CONFIG: {"added_tokens_decoder": {str(SIZE): {"content": "new", "single_word": True}}}},
    ),
    "the decoder and a name": (
        byte_level(), {CONFIG: {"eos_token": "<|b|>", **decoder(b={"special": False, "rstrip": True})}},
    ),
    "the decoder's new token": (byte_level(), {CONFIG: decoder(new={"special": True, "lstrip": True})}),
    "the decoder's far token": (byte_level(), {CONFIG: decoder(far={"special": True})}),
    "add_bos_token, which tokenizer.json decides": (byte_level(added=["<s>"]), {CONFIG: {"bos_token": "<s>", "add_bos_token": True}}),
    "add_bos_token false": (
        byte_level(added=["<s>"], post_processor=bos()), {CONFIG: {"bos_token": "<s>", "add_bos_token": False, "add_eos_token": True}},
    ),
    "add_prefix_space": (byte_level([END, *MARKS]), {CONFIG: {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}),
    "add_prefix_space without the class": (byte_level(), {CONFIG: {"add_prefix_space": True}}),
    "a padding of tokenizer.json": (padded(byte_level(), "<|a|>"), {CONFIG: {"eos_token": "</s>"}}),
    "a padding, and another name": (padded(byte_level(), "<|a|>"), {CONFIG: {"pad_token": None}}),
    # special_tokens_map.json
    "the map wins": (byte_level(), {CONFIG: {"eos_token": "</s>", "pad_token": "<unk>"}, MAP: {"eos_token": "<|b|>"}}),
    "the map says null": (byte_level(), {CONFIG: {"eos_token": "</s>"}, MAP: {"eos_token": None}}),
    "the map's flags": (byte_level(), {MAP: {"eos_token": {"content": "<|b|>", "lstrip": True, "normalized": False}}}),
    "the map beside a decoder": (byte_level(), {CONFIG: {"eos_token": "</s>", **decoder(b={})}, MAP: {"eos_token": "<|a|>"}}),
    "the map's own names": (byte_level(), {CONFIG: {"eot_token": "<|a|>"}, MAP: {"eot_token": "<|b|>", "image_token": "<s>"}}),
    "an object loses to the map": (byte_level(), {CONFIG: {"eot_token": flagged("<|a|>")}, MAP: {"eot_token": "<|b|>"}}),
    "the map's additional": (byte_level(), {MAP: {"additional_special_tokens": ["<|a|>", "<|new|>"]}}),
    "both have additional": (
        byte_level(), {CONFIG: {"additional_special_tokens": ["<|a|>"]}, MAP: {"additional_special_tokens": ["<|b|>"]}},
    ),
    "both have extra": (
        byte_level(),
        {CONFIG: {"extra_special_tokens": ["<|a|>"]}, MAP: {"extra_special_tokens": ["<|a|>", {"content": "<|b|>", "lstrip": True}]}},
    ),
    "the map's extra by name": (
        byte_level(), {CONFIG: {"additional_special_tokens": ["<|b|>"]},
                       MAP: {"extra_special_tokens": {"image_token": "<|a|>"}, "additional_special_tokens": ["<|new|>"]}},
    ),
    # added_tokens.json
    "added": (byte_level(**SHOUTS), {CONFIG: {"eos_token": "</s>"}, ADDED: {"<|new|>": SIZE, "new": SIZE + 1}}),
    "added and named": (byte_level(), {CONFIG: {"eos_token": "<|new|>"}, ADDED: {"<|new|>": SIZE, "<|b|>": 4}}),
    "added and named by an object": (byte_level(**SHOUTS), {CONFIG: {"eos_token": flagged("<|a|>")}, ADDED: {"<|a|>": 3}}),
    "added and named by the map": (byte_level(**SHOUTS), {MAP: {"eos_token": "<|a|>"}, ADDED: {"<|a|>": 3}}),
    "added and extra": (byte_level(**SHOUTS), {CONFIG: {"extra_special_tokens": ["<|a|>"]}, ADDED: {"<|a|>": 3, "<|b|>": 4}}),
    "added, but tokenizer.json has another": (byte_level(added=["<|end|>"]), {ADDED: {"<|new|>": SIZE}}),
    "added, and in tokenizer.json": (byte_level(added=["<|a|>"]), {ADDED: {"<|a|>": 3}}),
    "added beside a decoder": (byte_level(), {CONFIG: decoder(a={"special": True}), ADDED: {"<|new|>": SIZE}}),
    # other kinds
    "pieces": (pieces(added=["<s>"]), {CONFIG: {"eos_token": "<|b|>", "additional_special_tokens": ["<|a|>"]}}),
    "pieces, flags": (pieces(), {CONFIG: decoder(a={"rstrip": True, "special": True}, b={"lstrip": True})}),
}  # fmt: skip
CLASSES: dict[str, tuple[Any, str, Files]] = {
    "qwen2 makes its names special": (
        byte_level(["<|endoftext|>", *MARKS], [{"content": "<|b|>", "special": False, "normalized": False}],
                   normalizer=normalizers.NFC()),
        "qwen2", {CONFIG: {"tokenizer_class": "Qwen2Tokenizer", "additional_special_tokens": ["<|b|>"]}},
    ),
    "qwen2 drops what only tokenizer.json has as special": (
        byte_level(["<|endoftext|>", *MARKS], ["<|a|>", "<|b|>"], normalizer=normalizers.NFC()), "qwen2",
        {CONFIG: {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|b|>", "added_tokens_decoder": {
            "4": {"content": "<|a|>", "special": False}, "5": {"content": "<|b|>", "special": False}}}},
    ),
    "llama's name of bytes": (byte_level(), "llama", {CONFIG: {"tokenizer_class": "LlamaTokenizerFast"}}),
    "llama names without files": (pieces(added=["<s>"]), "llama", {CONFIG: {"tokenizer_class": "LlamaTokenizerFast"}}),
    "no class, whatever the file says": (byte_level(), "phi3", {CONFIG: {"tokenizer_class": "LlamaTokenizer"}}),
    "bert keeps capitals": (words(), "bert", {CONFIG: {"tokenizer_class": "BertTokenizer", "do_lower_case": False}}),
    "bert lowers": (
        words(normalizer=normalizers.BertNormalizer(lowercase=False)), "bert",
        {CONFIG: {"tokenizer_class": "BertTokenizerFast", "do_lower_case": True, "strip_accents": False}},
    ),
    "bert's names": (words(), "bert", {}),
    "an unknown class": (byte_level(), "llama", {CONFIG: {"tokenizer_class": "NobodysTokenizer", "eos_token": "<|b|>"}}),
}  # fmt: skip
CHATS: dict[str, Files] = {
    "none": {CONFIG: {}},
    "text": {CONFIG: {"chat_template": TEMPLATE}},
    "list": {CONFIG: {"chat_template": templates("default", "rag", "tool_use")}},
    "list, a name twice": {CONFIG: {"chat_template": [*templates("default"), {"name": "default", "template": "2"}]}},
    "list without default": {CONFIG: {"chat_template": templates("tool_use", "rag")}},
    "by name": {CONFIG: {"chat_template": {"default": TEMPLATE, "tool_use": "T" + TEMPLATE}}},
    "file": {JINJA: TEMPLATE},
    "file and text": {JINJA: "F" + TEMPLATE, CONFIG: {"chat_template": TEMPLATE}},
    "file and list": {JINJA: "F" + TEMPLATE, CONFIG: {"chat_template": templates("default", "tool_use")}},
    "file and more": {JINJA: TEMPLATE, f"{MORE}/tool_use.jinja": "T" + TEMPLATE, f"{MORE}/rag.jinja": "R"},
    "more and list": {f"{MORE}/tool_use.jinja": "T" + TEMPLATE, CONFIG: {"chat_template": templates("default")}},
    "more alone": {f"{MORE}/rag.jinja": "R", CONFIG: {}},
    "more has a default": {JINJA: TEMPLATE, f"{MORE}/default.jinja": "D" + TEMPLATE},
    "file ends its lines as Windows": {JINJA: TEMPLATE.replace("{% for", "\r\n{% for") + "\r\n"},
    "text ends its lines as Windows": {CONFIG: {"chat_template": "a\r\nb {{ '\r\n' | length }}\r" + TEMPLATE + "\r\n"}},
}


def agree(folder: Path, texts: Sequence[str] = TEXTS) -> Tokenizer:
    """Ours, which told the same as transformers, and so does what a bundle has of it."""
    made, expected = load(folder), of_transformers(folder, texts)
    told = of_ours(made, texts)
    assert told == expected
    bundle = folder / "bundle"
    bundle.mkdir()
    again = load(write(bundle, None, {**made.files(), "config.json": json.loads((folder / "config.json").read_text())}))
    assert of_ours(again, texts) == told
    assert (again.control_token_ids, again.eos_token_ids) == (made.control_token_ids, made.eos_token_ids)
    return made


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name: str, tmp_path: Path) -> None:
    tokenizer, files = TOKENS[name]
    agree(write(tmp_path, tokenizer, files))


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str, tmp_path: Path) -> None:
    tokenizer, model_type, files = CLASSES[name]
    agree(write(tmp_path, tokenizer, files, model_type))


@pytest.mark.parametrize("name", CHATS)
def test_templates(name: str, tmp_path: Path) -> None:
    agree(write(tmp_path, byte_level(added=MARKS), CHATS[name]))


def test_line_ends_of_windows_change_nothing(tmp_path: Path) -> None:
    """In any of the files, as a checkout on Windows leaves them."""
    files = {
        CONFIG: {"eos_token": "<|b|>", "chat_template": TEMPLATE},
        MAP: {"bos_token": "<s>"},
        ADDED: {"<|new|>": SIZE},
    }
    windows = {name: json.dumps(content, indent=1).replace("\n", "\r\n") for name, content in files.items()}
    for folder, content in (("unix", files), ("windows", windows)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, byte_level(), content)
    path = tmp_path / "windows" / "tokenizer.json"
    path.write_bytes(json.dumps(json.loads(path.read_text()), indent=1).replace("\n", "\r\n").encode())
    assert of_ours(agree(tmp_path / "windows")) == of_ours(load(tmp_path / "unix"))


MERGES = "#version: 0.2\nh i\nĠ hi\nx x\n"
VOCAB = {text: index for index, text in enumerate([END, *ALPHABET, "hi", "Ġhi", "xx"])}
GPT2: dict[str, Files] = {
    "plain": {},
    "with its tokens around": {"add_bos_token": True, "add_eos_token": True},
    "with a prefix space": {"add_prefix_space": True, "additional_special_tokens": ["xx"]},
    "other names": {"bos_token": "<|b|>", "add_bos_token": True, "added_tokens_decoder": {"260": flagged("<|b|>")}},
    "as Qwen 2 cuts it": {"tokenizer_class": "Qwen2Tokenizer"},
}


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("name", GPT2)
def test_vocab_and_merges(name: str, ends: str, tmp_path: Path) -> None:
    settings = {"tokenizer_class": "GPT2Tokenizer", **GPT2[name]}
    files = {"vocab.json": json.dumps(VOCAB, indent=1).replace("\n", ends), "merges.txt": MERGES.replace("\n", ends)}
    made = agree(write(tmp_path, None, {**files, CONFIG: settings}))
    pair = AutoTokenizer.from_pretrained(tmp_path)("hi", " hi")["input_ids"]
    assert made.library.encode("hi", " hi").ids == pair


def test_dream_has_the_tokenizer_of_qwen_2(tmp_path: Path) -> None:
    """By the name of a copy of its class, which checkpoints have in code of their own."""
    ids = []
    for kind in ("DreamTokenizer", "Qwen2Tokenizer"):
        (tmp_path / kind).mkdir()
        files = {"vocab.json": json.dumps(VOCAB), "merges.txt": MERGES, CONFIG: {"tokenizer_class": kind}}
        ids.append(load(write(tmp_path / kind, None, files)).encode("hi  hi12'S\n\n xx e\u0301" + END))
    assert ids[0] == ids[1]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"unk_token": "a", "mask_token": "<mask>"}])
def test_vocab_txt(settings: Files, ends: str, tmp_path: Path) -> None:
    lines = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hi", "Hi", "a", "b", "##b", "x", "new", "\u2028"])
    files = {"vocab.txt": lines.replace("\n", ends) + ends, CONFIG: {"tokenizer_class": "BertTokenizer", **settings}}
    made = agree(write(tmp_path, None, files, "bert"))
    assert made.encode("a hi", add_special_tokens=True)[0] == 2


def test_flags_that_change_are_forgotten(tmp_path: Path) -> None:
    """The library, and so transformers, still decodes a token as it was normalized once."""
    tokenizer = byte_level(added=[{"content": "<|A|>", "normalized": True}], **SHOUTS)
    made = load(write(tmp_path, tokenizer, {CONFIG: {"eos_token": "<|A|>", "added_tokens_decoder": {
        str(SIZE): {"content": "<|A|>", "normalized": False}}}}))  # fmt: skip
    assert made.decode(made.encode("<|A|>"), skip_special_tokens=False) == "<|A|>" and made.decode([SIZE]) == ""


def test_a_class_adds_no_tokens_of_its_own(tmp_path: Path) -> None:
    """Transformers gives them ids past the vocabulary, for which no model was trained."""
    made = load(write(tmp_path, pieces(["</s>"]), {CONFIG: {"tokenizer_class": "LlamaTokenizer"}}))
    assert made.special_tokens == {"unk_token": "<unk>", "eos_token": "</s>"} and 0 < made.encode("<s>")[0] < 260


def test_a_template_of_processors_is_read_last(tmp_path: Path) -> None:
    """chat_template.json, which transformers' tokenizers do not read."""
    for files, expected in (({}, "P"), ({CONFIG: {"chat_template": "C"}}, "C"), ({JINJA: "F"}, "F")):
        folder = tmp_path / expected
        folder.mkdir()
        made = load(write(folder, byte_level(), {"chat_template.json": {"chat_template": "P"}, **files}))
        assert made.chat_templates == {"default": expected}


def test_a_token_elsewhere_than_its_list_says_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), {CONFIG: decoder(far={"special": True})})
    with pytest.warns(
        CheckpointWarning, match=rf"'<\|new\|>' has the id {SIZE}, where a list of added tokens says 999"
    ):
        Tokenizer.load(folder, generation_config={}, config={})


def test_special_tokens_that_are_to_be_text_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(added=MARKS), {CONFIG: {"split_special_tokens": True}})
    with pytest.warns(CheckpointWarning, match="split_special_tokens; not honoured"):
        Tokenizer.load(folder, generation_config={}, config={})


BROKEN: dict[str, Files] = {
    "a name": {CONFIG: {"eos_token": 3}},
    "an object": {CONFIG: {"eos_token": {"content": 3}}},
    "a flag": {CONFIG: {"eos_token": flagged("x", lstrip="no")}},  # type: ignore[arg-type]
    "extra": {CONFIG: {"extra_special_tokens": 3}},
    "an extra": {CONFIG: {"additional_special_tokens": [3]}},
    "a decoder": {CONFIG: {"added_tokens_decoder": []}},
    "a decoder's id": {CONFIG: {"added_tokens_decoder": {"-1": {"content": "x"}}}},
    "a decoder's long id": {CONFIG: {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}},
    "a decoder's token": {CONFIG: {"added_tokens_decoder": {"1": "x"}}},
    "a decoder's surrogate": {CONFIG: '{"added_tokens_decoder": {"1": {"content": "\\ud800"}}}'},
    "the map": {MAP: {"eos_token": []}},
    "added": {ADDED: {"x": "1"}},
    "added, below": {ADDED: {"x": -1}},
    "more templates": {f"{MORE}/{index}.jinja": "x" for index in range(33)},
    "a template of processors": {"chat_template.json": {"chat_template": 3}},
    "a growing token": {CONFIG: {"added_tokens_decoder": {"260": {"content": "x" * 1000, "normalized": True}}}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, tmp_path: Path) -> None:
    grows = normalizers.Sequence([normalizers.Replace("x", "x" * 99)] * 3) if "growing" in name else None
    folder = write(tmp_path, byte_level(normalizer=grows), BROKEN[name])
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(folder, generation_config={}, config={})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_calls_that_are_none(tmp_path: Path) -> None:
    """A key without a value is no key for a template; of a list without calls too, unlike in transformers."""
    made = load(write(tmp_path, byte_level(added=MARKS), {CONFIG: {"chat_template": TEMPLATE}}))
    said = {"role": "assistant", "content": "b"}
    prompts = {
        made.chat_template().render([{**said, **more}]) for more in ({}, {"tool_calls": None}, {"tool_calls": []})
    }
    assert len(prompts) == 1 and "CALL" not in prompts.pop()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert "CALL" in made.chat_template().render([{**said, "tool_calls": [call]}])


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_published_models(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    folder = shape.write(tmp_path)
    texts = ["a <|x|> b\n[PAD]c <FILL_ME> [MASK]", *(f"a {token} b{token}\n c" for token in shape.tokens)]
    agree(folder, texts)
