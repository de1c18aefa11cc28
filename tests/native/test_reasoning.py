"""The native server tells reasoning from answers as Python's does."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

from mlcpipe.runtime.text.reasoning import ReasoningSplitter
from tests.native.cxx import Build

WORDS = ("<think>", "</think>", "<think", "</thi", "<", ">", "</", " ", "\n\n", "\t", "a", "word", "é", "think>")


def test_reasoning_is_split_as_in_python(native_library: Build) -> None:
    library = native_library([Path(__file__).with_name("reasoning.cc")])
    draw, reasoned, answered = random.Random(11), 0, 0
    for number in range(3000):
        begun = number % 2 == 1
        words = draw.choices(WORDS, k=draw.randrange(12))
        pieces = ["<think>", *words] if number % 3 == 0 and not begun else words
        splitter = ReasoningSplitter(open=begun)
        expected = [*map(splitter.push, pieces), splitter.finish()]
        data = [piece.encode() for piece in pieces]
        lengths = (ctypes.c_int * len(data))(*map(len, data))
        out = ctypes.create_string_buffer(4096)
        library.reasoning_split(int(begun), b"".join(data), lengths, len(data), out)
        found = [tuple(part.split("\1")) for part in out.value.decode().split("\2")[:-1]]
        assert found == expected, (begun, pieces)
        reasoned += any(reasoning for reasoning, _ in expected)
        answered += any(text for _, text in expected)
    assert min(reasoned, answered) > 800, (reasoned, answered)
