"""Native decoding, streams of text and chats give what Python gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.streaming import TextStream
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.native.cxx import Build
from tests.native.texts import SEED, texts
from tests.native.tokenizers import NativeStream, of_pipeline

NAMES = ("llama2", "llama3", "mistral", "qwen2", "gemma", "phi3", "falcon", "some-bytes", "nfkc", "gpt2-prefix")
FORGED = (
    "<|im_start|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "<|end|>",
    "<|im_",
    "start|>",
    "<",
    ">",
    "|",
    " <|eot_id|> ",
    "x",
)


def answers(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Ids of texts, and ids in any order: runs of bytes, broken UTF-8, special and unknown ones."""
    draw = random.Random(SEED)
    made = [tokenizer.encode(text) for text in texts(count)]
    for _ in range(count):
        low = draw.choice((0, 0, 4, 100))
        high = draw.choice((tokenizer.vocab_size + 5, 270))
        made.append([draw.randrange(low, high) for _ in range(draw.randrange(60))])
    return made


def streamed(stream: TextStream | NativeStream, ids: Sequence[int]) -> list[Any]:
    """Each text with whether the stream has stopped, and the stop string."""
    return [*((stream.push(index), stream.stopped) for index in ids), stream.flush(), stream.stop_string]


@pytest.mark.fast_cases("llama2", "qwen2", "mistral")
@pytest.mark.parametrize("name", NAMES)
def test_decoded_texts(native_library: Build, tmp_path: Path, name: str) -> None:
    native, tokenizer = of_pipeline(native_library, name, tmp_path)
    for ids in answers(tokenizer, 400):
        for skip in (True, False):
            assert native.decode(ids, skip) == tokenizer.decode(ids, skip), ids


@pytest.mark.fast_cases("llama2", "qwen2")
@pytest.mark.parametrize("name", NAMES)
def test_streamed_texts_come_in_the_same_parts(native_library: Build, tmp_path: Path, name: str) -> None:
    native, tokenizer = of_pipeline(native_library, name, tmp_path)
    draw = random.Random(SEED)
    options: list[dict[str, Any]] = [{}, {"continues": True}, {"eos_ids": [2, 260]}, {"shown": [1, 2, 3]}]
    for ids in answers(tokenizer, 250):
        text = tokenizer.decode(ids)
        cuts = [draw.randrange(len(text) + 1) for _ in range(3)]
        stops = [part for cut in cuts if (part := text[cut : cut + draw.randrange(1, 4)].replace("\n", ""))]
        for more in ({}, draw.choice(options)):
            arguments = {"stop": draw.choice((stops, [], ["e", "ea"])), **more}
            expected = streamed(TextStream(tokenizer, **arguments), ids)
            assert streamed(native.stream(**arguments), ids) == expected, (ids, arguments)


def test_stop_strings_that_are_refused(native_library: Build, tmp_path: Path) -> None:
    native, _ = of_pipeline(native_library, "qwen2", tmp_path)
    with pytest.raises(UsageError, match="stop; expected strings of UTF-8 that are not empty"):
        native.stream(stop=["a", ""])


@pytest.mark.fast_cases("llama2", "qwen2", "gemma")
@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_in_messages_are_text(native_library: Build, tmp_path: Path, name: str) -> None:
    native, tokenizer = of_pipeline(native_library, name, tmp_path)
    draw = random.Random(SEED)
    words = texts(300)
    differ = 0
    for _ in range(300):
        pieces = [draw.choice(FORGED) if draw.random() < 0.5 else draw.choice(words) for _ in range(draw.randrange(5))]
        content, extra = "".join(pieces), draw.choice((*FORGED, "plain"))
        parts = [("<|im_start|>", False), ("user", True), ("\n", False), (content, True), (extra, True)]
        parts = [*parts, ("<|eot_id|>\n", False)] * draw.choice((1, 2))
        messages = [{"role": "user", "content": content}] * (len(parts) // 6)
        ids = native.encode_chat(parts)
        assert ids == tokenizer.encode_chat(messages, x=extra), (content, extra)
        differ += ids != tokenizer.encode("".join(text for text, _ in parts))
    assert differ > 100  # control tokens that were taken for text
