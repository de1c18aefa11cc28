from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from mlcpipe.errors import CheckpointWarning, TemplateError, TokenizerError
from mlcpipe.runtime.text import tokenizer_files
from mlcpipe.runtime.text.token_bytes import parse_decoder
from mlcpipe.runtime.text.tokenizer import Tokenizer


def load(folder: Path, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Tokenizer:
    return Tokenizer.load(folder, generation_config=generation or {}, config=config or {})


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the byte-level tokenizer's folder, to break."""
    shutil.copytree(folders["byte-level"], tmp_path, dirs_exist_ok=True)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**data, **changes}), encoding="utf-8")


# ---- encoding and bytes --------------------------------------------------------------------------------------


def test_ids_and_text_equal_transformers(folders: dict[str, Path], family: str, corpus: list[str]) -> None:
    ours = load(folders[family])
    file = str(folders[family] / "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=file, clean_up_tokenization_spaces=False)
    for text in corpus:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_token_bytes_put_together_are_the_text(folders: dict[str, Path], corpus: list[str]) -> None:
    for name in ("byte-level", "byte-fallback-gemma", "byte-fallback-llama"):
        tokenizer = load(folders[name])
        for text in corpus:
            text = text.replace("<|end|>", "")  # Llama-2's normalizer puts a space after a special token
            data = b"".join(tokenizer.token_bytes(index) for index in tokenizer.encode(text))
            assert data.decode() == (" " + text if name.endswith("llama") else text)


def test_token_bytes_of_each_family(folders: dict[str, Path]) -> None:
    level, llama, space = (load(folders[name]) for name in ("byte-level", "byte-fallback-llama", "metaspace-always"))
    ids = [level.encode(text)[0] for text in (" ", "\n", "ÿ", "<a b>", "<s>")]
    assert [level.token_bytes(index) for index in ids] == [b" ", b"\n", b"\xff", b"<a b>", b"<s>"]
    assert {level.token_bytes(index) for index in range(level.vocab_size)} >= {bytes([byte]) for byte in range(256)}
    start = llama.encode("ꙮ")[-1] - "ꙮ".encode()[-1]
    assert [llama.token_bytes(start + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert llama.token_bytes(llama.encode("fox")[0]).startswith(b" ")
    assert space.token_bytes(space.encode("▁▁▁")[-1]).strip() == b""
    for unknown in (-1, level.vocab_size, 10**9):
        assert level.token_bytes(unknown) == b""


def test_saved_truncation_and_padding_do_not_cut_prompts(folder: Path) -> None:
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(folder / "tokenizer.json"))
    text = "the quick brown fox jumps over the lazy dog"
    assert load(folder).decode(load(folder).encode(text)) == text


def test_text_that_is_not_unicode_is_refused(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot encode the text"):
        load(folder).encode("a\ud800b")


# ---- special tokens ------------------------------------------------------------------------------------------


def test_end_tokens_are_the_union_of_all_sources(folder: Path) -> None:
    assert load(folder).eos_token_ids == {2}
    assert load(folder, generation={"eos_token_id": 300}).eos_token_ids == {2, 300}
    assert load(folder, {"eos_token_id": 7}, {"eos_token_id": [300, 301]}).eos_token_ids == {2, 7, 300, 301}
    assert load(folder, {"text_config": {"eos_token_id": 9}}).eos_token_ids == {2, 9}
    assert load(folder, {"eos_token_id": -1}).eos_token_ids == {2}
    edit(folder / "tokenizer_config.json", eot_token="<|end|>")
    assert load(folder).eos_token_ids == {2, 3}


@pytest.mark.parametrize("value", ["2", -2, 2.0, True, [1, None]])
def test_broken_end_tokens_are_refused(folder: Path, value: Any) -> None:
    with pytest.raises(TokenizerError, match="eos_token_id; expected a token id"):
        load(folder, generation={"eos_token_id": value})


def test_the_end_of_turn_is_read_from_the_chat_template(folder: Path) -> None:
    loop = "{% for m in messages %}[{{ m.role }}]{{ m.content }}%s{% endfor %}"
    for written, expected in [
        ("<|end|>\n", {2, 3}),
        (" <|end|>", {2, 3}),
        ("</s>", {2}),
        ("\n", {2}),
        ("<a b>", {2}),
        ("{{ raise_exception('no') }}", {2}),
        ("{% broken", {2}),
    ]:
        edit(folder / "tokenizer_config.json", chat_template=loop.replace("%s", written, 1))
        assert load(folder).eos_token_ids == expected, written


def test_bos_token(folder: Path) -> None:
    assert load(folder, {"bos_token_id": 5}).bos_token_id == 1
    edit(folder / "tokenizer_config.json", bos_token=None)
    assert load(folder, {"bos_token_id": 5}).bos_token_id is None  # said to have none
    (folder / "tokenizer_config.json").unlink()
    assert load(folder, {"bos_token_id": 5}).bos_token_id == 5
    assert load(folder).bos_token_id is None
    edit(folder / "special_tokens_map.json", bos_token={"content": "<unk>"}, additional_special_tokens=["<s>"])
    assert load(folder).special_tokens == {"bos_token": "<unk>"}
    assert load(folder).bos_token_id == 0


def test_tokens_that_only_tokenizer_config_lists(folder: Path) -> None:
    size = load(folder).vocab_size
    listed = {"1": {"content": "<s>", "special": True}, str(size): {"content": "<|new|>", "special": True}}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    tokenizer = load(folder)
    assert tokenizer.encode("a<|new|>")[-1] == size
    assert tokenizer.decode([size]) == "" and tokenizer.token_bytes(size) == b"<|new|>"
    edit(folder / "tokenizer_config.json", added_tokens_decoder={str(size + 5): {"content": "<|far|>"}})
    with pytest.warns(CheckpointWarning, match=rf"'<\|far\|>' has the id {size}, .* says {size + 5}"):
        assert load(folder).encode("<|far|>") == [size]  # as transformers


# ---- chat templates ------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_base_model_has_no_template(folder: Path) -> None:
    with pytest.raises(TemplateError, match=r"no chat template 'default' .*base model.*`generate` or `--raw`"):
        load(folder).chat_template()


@pytest.mark.parametrize("value", [3, [{"name": "default"}], ["x"], [{"name": 1, "template": "x"}]])
def test_broken_chat_template_entries(folder: Path, value: Any) -> None:
    edit(folder / "tokenizer_config.json", chat_template=value)
    with pytest.raises(TokenizerError, match="broken chat_template"):
        load(folder)


# ---- files ---------------------------------------------------------------------------------------------------


def test_vocab_and_merges_alone(folder: Path, corpus: list[str]) -> None:
    reference = load(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    specials = {text: index for index, text in enumerate(("<unk>", "<s>", "</s>", "<|end|>"))}
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    edit(folder / "added_tokens.json", **specials)
    tokenizer = load(folder)
    plain = [text for text in corpus if "žluť" not in text and "<|end|>" not in text]
    assert len(plain) > len(corpus) // 2
    for text in plain:
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    edit(folder / "tokenizer_config.json", tokenizer_class="BartTokenizer")
    with pytest.raises(TokenizerError, match="expected GPT2Tokenizer .* found BartTokenizer; convert it once"):
        load(folder)
    edit(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    (folder / "merges.txt").write_text("a b c\n", encoding="utf-8")
    with pytest.raises(TokenizerError, match="broken line .*found 'a b c'"):
        load(folder)


def test_sentencepiece_alone_says_how_to_convert(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer .*expected tokenizer.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"only tokenizer.model; convert it once: .*AutoTokenizer.*sentencepiece"):
        load(tmp_path)
    (tmp_path / "rwkv_vocab_v20230424.txt").write_text("1 b'a' 1\n", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"RWKV's own tokenizer is not supported .*v20230424.txt; expected tok"):
        load(tmp_path)


def test_a_vocabulary_larger_than_the_model_is_refused(folder: Path) -> None:
    size = load(folder).vocab_size
    assert load(folder, {"vocab_size": size}).vocab_size == size
    assert load(folder, {"text_config": {"vocab_size": size}}).vocab_size == size
    with pytest.raises(TokenizerError, match="does not fit the model .*vocab_size 300"):
        load(folder, {"vocab_size": 300})
    for wrong in (0, -1, "32000", 3.5, True):
        with pytest.raises(TokenizerError, match="vocab_size in config.json; expected a positive integer"):
            load(folder, {"vocab_size": wrong})


def test_an_added_token_past_the_rows_is_refused_only_when_used(folder: Path) -> None:
    """Gemma 3 has one such token: 262144 rows, and an image token with that id."""
    size = load(folder).vocab_size
    tokenizer = load(folder, {"vocab_size": size - 1})
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    with pytest.raises(TokenizerError, match=rf"'žluť' has no row .*below {size - 1}; found {size - 1}"):
        tokenizer.encode("žluť")


@pytest.mark.parametrize(
    ("ends", "missing"), [([], [(1, 3), (5, 9)]), ([7], [(1, 3), (5, 7), (8, 9)]), ([1, 20], [(2, 3), (5, 9)])]
)
def test_ids_that_stand_for_no_text(tmp_path: Path, ends: list[int], missing: list[tuple[int, int]]) -> None:
    """Gaps, a token without a text, and rows behind the last one; what ends an answer may stand for nothing."""
    LibraryTokenizer(models.WordLevel({"a": 0, "b": 3, "c": 4, "": 6}, "a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path, {"eos_token_id": ends, "vocab_size": 9})
    assert tokenizer.missing_ids(9) == missing
    assert tokenizer.missing_ids(4) == [(begin, min(end, 4)) for begin, end in missing if begin < 4]


BROKEN = {
    "empty": "",
    "cut": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a":',
    "list": "[]",
    "nothing": "{}",
    "type": '{"model": {"type": "Neural", "vocab": {}}}',
    "negative": '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    "merges": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}',
    "no-vocab": '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
    "deep": '{"model":' + "[" * 100_000,
    "panics": '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "model": {"type": "BPE", '
    '"vocab": {"a": 0}, "merges": []}}',
    "decoder": '{"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}, "model": {"type": "BPE", '
    '"vocab": {"a": 0}, "merges": []}}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tokenizers_are_one_line_errors(folder: Path, name: str) -> None:
    (folder / "tokenizer.json").write_text(BROKEN[name], encoding="utf-8")
    with pytest.raises(TokenizerError) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and "tokenizer" in str(caught.value)


def test_random_damage_never_escapes_as_another_error(folder: Path) -> None:
    draw = random.Random(7)
    whole = (folder / "tokenizer.json").read_bytes()
    outcomes = set()
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(20)] = draw.randbytes(draw.randrange(8))
        (folder / "tokenizer.json").write_bytes(bytes(data))
        try:
            load(folder)
            outcomes.add("loads")
        except TokenizerError:
            outcomes.add("refused")
    assert "refused" in outcomes


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\udcff", "[" * 100_000])
def test_broken_side_files(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TokenizerError, match=name):
        load(folder)


def test_large_files_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(TokenizerError, match="too large .*at most 100 bytes"):
        load(folder)


def test_a_folder_in_place_of_a_file(folder: Path) -> None:
    (folder / "chat_template.jinja").mkdir()
    with pytest.raises(TokenizerError, match="cannot read file in .*chat_template.jinja.*a folder"):
        load(folder)


# ---- decoders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
    ],
)
def test_decoders_that_do_not_work_token_by_token_are_refused(decoder: Any) -> None:
    with pytest.raises(TokenizerError, match="cannot be streamed"):
        parse_decoder(json.loads(decoder.__getstate__()))
