"""Answers in the harmony format as text for people: thoughts are told apart, and are not said again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.runtime.text.harmony import MARKS, HarmonyText, without_thoughts
from mlcpipe.runtime.text.streaming import TextStream
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.unit.server.tools import write_harmony_tokenizer

THINKS, NEXT = "<|channel|>analysis<|message|>So – 2?<|end|>", "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Two, né.<|return|>"
CASES = [
    (f"{THINKS}{NEXT}{FINAL}", "<think>\nSo – 2?\n</think>\n\nTwo, né."),
    (THINKS + THINKS, "<think>\nSo – 2?So – 2?\n</think>"),
    (THINKS.removesuffix("<|end|>"), "<think>\nSo – 2?\n</think>"),
    (f"<|channel|>commentary<|message|>Look.<|end|>{NEXT}{FINAL}", "Look.\n\nTwo, né."),
    (FINAL, "Two, né."),
    ("Two.", "Two."),
    ("<|channel|>", ""),
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_harmony_tokenizer(tmp_path)
    return Tokenizer.load(tmp_path, generation_config={}, config={})


@pytest.mark.parametrize(("answer", "expected"), CASES, ids=range(len(CASES)))
def test_thoughts_are_in_tags(answer: str, expected: str, tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, (), tokenizer.eos_token_ids, shown=tokenizer.control_tokens(MARKS))
    text = HarmonyText(stream)
    assert "".join([*map(text.push, tokenizer.encode(answer)), text.flush()]) == expected
    assert (text.stopped == "stop") is answer.endswith("<|return|>")


def test_only_the_last_mark_of_an_answer_ends_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {tokenizer.library.token_to_id("<|return|>")}


@pytest.mark.parametrize(
    ("said", "kept"),
    [("<think>\na\n</think>\n\nb", "b"), ("<think>\na", ""), ("b\n\n<think>\na\n</think>", "b\n\n"), ("b", "b")],
)
def test_thoughts_of_answers_before_are_left_out(said: str, kept: str) -> None:
    assert without_thoughts([{"role": "assistant", "content": said}]) == [{"role": "assistant", "content": kept}]


def test_words_of_users_are_as_they_are() -> None:
    messages = [{"role": "user", "content": "<think>\na\n</think>\n\nb"}, {"role": "assistant", "content": "c"}]
    assert without_thoughts(messages) == messages
