"""Hostile tokenizers are refused when they are read; those of published models pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.errors import TokenizerError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.text.tokenizer_limits import MAX_GROWTH, check_pattern, growth

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": LLAMA3,
    "qwen2": LLAMA3.replace("{1,3}", ""),
    "qwen3.5": LLAMA3.replace(r"\p{L}+", r"[\p{L}\p{M}]+"),
    "o200k": O200K.replace(r"&&[^\p{Han}]", ""),
    "kimi": r"[\p{Han}]+|" + O200K,
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek han": "[一-龥぀-ゟ゠-ヿ]+",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "falcon": "[0-9][0-9][0-9]",
    "t5": " {2,}",
    "exaone-moe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    "chameleon": "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "youtu": r"\d{1,3}(?=(?:\d{3})*\b)",
    "superbpe": r"(?=(\d{3})+(?!\d))",
    "bailing": r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
}
EXPONENTIAL = [
    "(?:a|a){22}[^ax]",
    "(?:a|a)*b",
    "(a+)+$",
    "(a*)*b",
    "(?:a?){30}a{30}",
    "a?" * 30 + "a" * 30,
    "(?:a|a)" * 22 + "[^ax]",
    "(?:a|aa)+b",
    "(?=(a+)+b)",
    r"(a)\1+",
    r"(?<x>a|\g<x>b)",
    r"\d{1,3}+x",
    "a++*",
    "[]a]+",
    "[[]a]((b+)+c",
    r"\[(a+)+\]",
    "(?x:a)",
    "(?#a",
    "(a",
    "a*" * 9 + "b",
]
TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}
LONG = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 99}
COSTLY: dict[str, dict[str, Any]] = {
    "replacements": {"normalizer": {"type": "Sequence", "normalizers": [TENFOLD] * 8}},
    "nested": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [TENFOLD]}] * 8}},
    "anywhere": {"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 999}},
    "prefixes": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 99}] * 2}},
    "bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 30}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": [TENFOLD] * 8}},
    "copies": {"post_processor": {"type": "Sequence", "processors": [TEMPLATE] * 30}},
    "tokens": {"post_processor": {**LONG, "special_tokens": {"x": {"ids": [1] * 99}}}},
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAEFB" + "QUFB" * 999}},
}


def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, generation_config={}, config={})


def changed(folders: dict[str, Path], tmp_path: Path, **changes: Any) -> Path:
    shutil.copytree(folders["byte-level"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return tmp_path


@pytest.mark.parametrize("name", PUBLISHED)
def test_patterns_of_published_tokenizers_pass(name: str) -> None:
    check_pattern(PUBLISHED[name])


@pytest.mark.parametrize("pattern", EXPONENTIAL, ids=lambda pattern: pattern[:30])
def test_patterns_that_may_take_exponential_time_are_refused(pattern: str) -> None:
    with pytest.raises(TokenizerError, match="regular expression"):
        check_pattern(pattern)


@pytest.mark.parametrize("name", COSTLY)
def test_what_makes_a_text_much_longer_is_refused(name: str) -> None:
    with pytest.raises(TokenizerError):
        growth(COSTLY[name])


def test_growth_of_published_tokenizers() -> None:
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
    assert growth({"normalizer": llama, "decoder": {**space, "content": "x"}}) == 12
    assert growth({"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "ByteLevel"}}) == 6
    assert growth({}) == 1 < MAX_GROWTH


@pytest.mark.parametrize(
    "changes",
    [
        COSTLY["replacements"],
        COSTLY["decoder"],
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": EXPONENTIAL[0]},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
    ids=["normalizer", "decoder", "pattern"],
)
def test_a_hostile_tokenizer_is_refused_when_it_is_read(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(TokenizerError):
        load(changed(folders, tmp_path, **changes))


def test_a_file_with_two_normalizers_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """The library takes the first and Python's reader the last; it normalizes added tokens while it reads."""
    folder = changed(folders, tmp_path, normalizer=None)
    file = folder / "tokenizer.json"
    text = file.read_text().replace('"normalizer": null', f'"normalizer": {json.dumps(TENFOLD)}, "normalizer": null')
    assert text != file.read_text() and '"normalized": true' in text
    file.write_text(text)
    with pytest.raises(TokenizerError):
        load(folder)


def test_a_text_that_would_become_too_long_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlcpipe.runtime.text.tokenizer.MAX_NORMALIZED_BYTES", 1 << 10)
    tokenizer = load(changed(folders, tmp_path, normalizer=TENFOLD))
    assert tokenizer.encode("a" * 51)
    with pytest.raises(TokenizerError, match="too long"):
        tokenizer.encode("a" * 52)


# Polynomial and thus allowed, but with a long text it takes minutes.
SLOW = {"type": "Split", "pattern": {"Regex": "a*a*a*[^a]"}, "behavior": "Isolated", "invert": False}
INTERRUPTED = """
import os, pathlib, signal, sys, threading
from mlcpipe.runtime.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(pathlib.Path(sys.argv[1]), generation_config={}, config={})
signal.signal(signal.SIGALRM, signal.default_int_handler)

def workers():
    assert len(tokenizer.encode("ab")) and len(tokenizer.encode("ba"))
    return sum(one.name == "tokenizer" for one in threading.enumerate())

print(workers())
if not (child := os.fork()):
    os._exit(10 + workers())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    tokenizer.encode("a" * 1000)
except KeyboardInterrupt:
    print("interrupted")
print(workers())  # one has the long text
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX, not of Windows")
def test_ctrl_c_ends_a_long_encoding(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders, tmp_path, pre_tokenizer=SLOW)
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", INTERRUPTED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=paths, timeout=20)
    assert (done.stdout.split(), done.returncode) == (["1", "11", "interrupted", "2"], 0), done.stderr


def test_a_panic_of_the_library_is_an_error(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oniguruma gives up after ten million steps at one place, and the library panics."""
    monkeypatch.setattr("mlcpipe.runtime.text.tokenizer_limits.check_pattern", lambda pattern: None)
    pattern = {**SLOW, "pattern": {"Regex": "(a+)+$"}}
    tokenizer = load(changed(folders, tmp_path, pre_tokenizer=pattern))
    with pytest.raises(TokenizerError, match="cannot encode"):
        tokenizer.encode("a" * 60 + "b")
