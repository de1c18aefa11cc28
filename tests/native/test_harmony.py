"""Programs without Python read answers in the harmony format as Python does."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mlcpipe
from mlcpipe.runtime.text.harmony import MARKS, HarmonyText, without_thoughts
from tests.conftest import QUICK
from tests.models import tiny
from tests.native.cxx import RUNTIME, Build
from tests.native.engine import Runtime
from tests.native.tokenizers import SOURCES
from tests.unit.server.tools import write_harmony_tokenizer

WORDS = (
    *MARKS,
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.f",
    " json",
    "<|",
    "<",
    "\n",
    "é",
    "word ",
)
THOUGHTS = ("<think>\n", "<think>", "</think>", "\n\n", " ", "a", "é")


class _Parts:
    """A stream of text of given parts, the last of which it holds back."""

    def __init__(self, parts: list[str]) -> None:
        self._parts: Iterator[str] = iter(parts)

    def push(self, _: int) -> str:
        return next(self._parts)

    def flush(self) -> str:
        return next(self._parts)


@pytest.fixture(scope="module")
def library(native_library: Build) -> ctypes.CDLL:
    return native_library([Path(__file__).with_name("harmony.cc"), RUNTIME / "text" / "harmony.cc", *SOURCES[1:]])


def test_messages_are_shown_as_in_python(library: ctypes.CDLL) -> None:
    draw, with_thoughts = random.Random(5), 0
    for _ in range(4000):
        parts = [*draw.choices(WORDS, k=draw.randrange(30)), draw.choice(("", "word"))]
        if draw.random() < 0.5:
            parts[:0] = ["<|channel|>", draw.choice(("analysis", "final", "commentary")), "<|message|>"]
        stream: Any = _Parts(parts)
        text = HarmonyText(stream)
        expected = [*(text.push(0) for _ in parts[1:]), text.flush()]
        data = [part.encode() for part in parts]
        out = ctypes.create_string_buffer(4096)
        library.harmony_text(b"".join(data), (ctypes.c_int * len(data))(*map(len, data)), len(data), out)
        assert out.value.decode().split("\1")[:-1] == expected, parts
        with_thoughts += "</think>" in "".join(expected)
    assert with_thoughts > 300


def test_thoughts_are_left_out_as_in_python(library: ctypes.CDLL) -> None:
    draw, shorter = random.Random(6), 0
    for _ in range(2000):
        said = "".join(draw.choices(THOUGHTS, k=draw.randrange(12))) + "."
        (kept,) = without_thoughts([{"role": "assistant", "content": said}])
        out = ctypes.create_string_buffer(4096)
        library.harmony_without_thoughts(said.encode(), out)
        assert out.value.decode() == kept["content"], said
        shorter += kept["content"] != said
    assert shorter > 500


@pytest.mark.full
def test_a_chat_with_gpt_oss_is_that_of_python(
    runtime: Runtime, copy_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    """A random model writes marks anywhere; prompts are without the thoughts of answers before."""
    case = tiny.TinyCase("gpt_oss", "default", {"vocab_size": 384})
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    write_harmony_tokenizer(checkpoint)
    bundle = mlcpipe.compile(
        checkpoint, target=QUICK, quantization="q4f16_1", output=tmp_path / "bundle", context_length=512
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"},
        {"role": "user", "content": "<think>\nd"},
    ]
    engine, native = mlcpipe.Engine(bundle), runtime.open(copy_of(bundle))
    assert native.tokenize_chat(messages) == engine.tokenizer.encode_chat(without_thoughts(messages))
    often = dict.fromkeys(engine.tokenizer.control_tokens(("<|start|>", "<|message|>")), 5.0)
    as_written = 0
    for seed in range(20):
        params = mlcpipe.SamplingParams(seed=seed, temperature=2.0, logit_bias=often)
        engine.reset()
        native.call("reset")
        expected = engine.chat(messages, sampling=params, max_tokens=60)
        assert "".join(native.generate(params=params, messages=messages, max_tokens=60).pieces) == expected.text
        as_written += expected.text == engine.tokenizer.decode(expected.token_ids)
    assert as_written < 10, "most answers have headers, which are not shown"
