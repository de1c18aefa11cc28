"""The 70 templates of llama.cpp render in C++ what they render in Python, 50 conversations each in all combinations."""

from __future__ import annotations

import ctypes

import pytest

from mlcpipe.runtime.text.chat_template import ChatTemplate
from tests.native.conversations import TOKENS, compare, compare_marked, conversations
from tests.native.cxx import Build
from tests.native.templates import NOW, NativeTemplate, build
from tests.unit.text import real_templates

pytestmark = pytest.mark.full
COUNTS = [15, pytest.param(50, marks=pytest.mark.everything)]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return real_templates.sources()


@pytest.fixture(scope="module")
def library(native_library: Build) -> ctypes.CDLL:
    return build(native_library)


@pytest.mark.parametrize("count", COUNTS)
def test_texts_and_refusals_are_those_of_python(library: ctypes.CDLL, sources: dict[str, str], count: int) -> None:
    assert len(sources) == real_templates.COUNT
    total = {"rendered": 0, "refused": 0, "failed": 0}
    for seed, (name, source) in enumerate(sources.items()):
        native = NativeTemplate(library, source, **TOKENS)
        counts, wrong = compare(native, ChatTemplate(source, **TOKENS, now=lambda: NOW), seed, count)
        assert not wrong, f"{name}, {len(wrong)} differ, the first: {wrong[0]}"
        total = {key: known + counts[key] for key, known in total.items()}
    assert total["rendered"] > real_templates.COUNT * count // 2
    assert min(total.values()) > real_templates.COUNT * count // 100


@pytest.mark.parametrize("count", [15, pytest.param(20, marks=pytest.mark.everything)])
def test_contents_are_marked_as_in_python(library: ctypes.CDLL, sources: dict[str, str], count: int) -> None:
    for seed, source in enumerate(sources.values()):
        compare_marked(library, source, conversations(seed, count))
