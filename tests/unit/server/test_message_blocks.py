"""Blocks of Anthropic's messages: what a chat template gets of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.server.errors import ApiError
from mlcpipe.server.message_blocks import messages_of
from mlcpipe.server.prompts import plain_messages
from mlcpipe.server.response_items import messages_of as messages_of_items
from tests.unit.server.fake_engine import FakeEngine, answers

TEXT = {"type": "text", "text": "Read this."}
PLAIN = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "One."},
    "title": "T",
    "context": "C",
}
PARTS = {
    "type": "document",
    "source": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
}
HIT = {
    "type": "search_result",
    "source": "https://a",
    "title": "A",
    "content": [{"type": "text", "text": "found"}],
    "citations": {"enabled": False},
}


def test_documents_and_results_of_a_search_are_texts() -> None:
    (message,) = messages_of({"role": "user", "content": [PLAIN, PARTS, HIT, TEXT]}, "messages[0]")
    assert message == {"role": "user", "content": "T\nC\nOne.\na\nb\nA\nhttps://a\nfound\nRead this."}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [HIT, PLAIN]}
    (message,) = messages_of({"role": "user", "content": [result]}, "messages[0]")
    assert message == {"role": "tool", "tool_call_id": "t", "content": "A\nhttps://a\nfound\nT\nC\nOne."}


def test_tools_that_another_server_ran_are_calls_with_results() -> None:
    pages = [{"type": "web_search_result", "title": "P", "url": "https://p", "encrypted_content": "x"}]
    said = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "Looking."},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": pages},
        {"type": "text", "text": "Found.", "citations": [{"type": "web_search_result_location", "url": "https://p"}]},
    ]
    call = {"id": "s1", "type": "function", "function": {"name": "web_search", "arguments": {"query": "q"}}}
    assert messages_of({"role": "assistant", "content": said}, "messages[1]") == [
        {"role": "assistant", "content": "Looking.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "s1", "content": "P https://p"},
        {"role": "assistant", "content": "Found."},
    ]
    failed = {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": {"type": "e", "error_code": "max_uses_exceeded"},
    }
    assert messages_of({"role": "assistant", "content": [said[2], failed]}, "m")[1]["content"] == "max_uses_exceeded"


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "a"}}, "base64"),
        ({"type": "document", "source": {"type": "url", "url": "http://a"}}, "url"),
        ({"type": "document", "source": {"type": "text", "data": 5}}, "source"),
        ({"type": "document"}, "source"),
        ({**PLAIN, "citations": {"enabled": True}}, "citations"),
        ({**HIT, "citations": {"enabled": True}}, "citations"),
        ({"type": "image", "source": {}}, "image"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "file"),
        ({"type": "image"}, "image"),
        ("text", "str"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_text_is_refused_by_name(block: Any, word: str) -> None:
    for content in ([block], [{"type": "tool_result", "content": [block]}]):
        with pytest.raises(ApiError, match=r"messages\[0\]\.content\[0\]") as refused:
            messages_of({"role": "user", "content": content}, "messages[0]")
        assert word in str(refused.value)


def test_thoughts_of_a_stream_are_signed() -> None:
    engine = FakeEngine("<think>Hm.</think>Yes.")
    engine.tokenizer.chat_templates["default"] += "{# </think> #}"
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": True}
    (answer,) = answers(engine, ("/v1/messages", body))
    deltas = [line for line in answer.text.splitlines() if '"content_block_delta"' in line]
    kinds = [kind for line in deltas for kind in ("thinking_delta", "signature_delta", "text_delta") if kind in line]
    assert [kind for kind, before in zip(kinds, ["", *kinds]) if kind != before] == [
        "thinking_delta", "signature_delta", "text_delta",
    ]  # fmt: skip


def test_codex_gets_the_context_of_models() -> None:
    plain, told = answers(FakeEngine(), ("/v1/models", None), ("/v1/models?client_version=0.171.0", None))
    (model,) = told.json()["models"]
    assert (model["slug"], model["context_window"]) == ("demo", FakeEngine.context_length)
    assert "models" not in plain.json() and plain.json()["data"] == told.json()["data"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": None}}


def test_pictures_stay_among_the_texts_and_those_of_tools_come_after_all_results() -> None:
    remote = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    results = [
        {"type": "tool_result", "tool_use_id": "s", "content": [IMAGE, TEXT]},
        {"type": "tool_result", "tool_use_id": "t", "content": "done"},
    ]
    blocks = [*results, TEXT, remote, PLAIN]
    found = messages_of({"role": "user", "content": blocks}, "messages[0]")
    read, document = ({"type": "text", "text": text} for text in ("Read this.", "T\nC\nOne."))
    there = {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": None}}
    assert found == [
        {"role": "tool", "tool_call_id": "s", "content": [PART, read]},
        {"role": "tool", "tool_call_id": "t", "content": "done"},
        {"role": "user", "content": [read, there, document]},
    ]
    place = "messages[0].content[0].content[0].source"
    picture = {"type": "image", "image": b"\0\0\0", "where": place}
    for rest in ([], [{"role": "assistant", "content": "ok"}], [{"role": "user", "content": "and?"}]):
        plain = plain_messages([*found[:2], *rest])
        assert [one["content"] for one in plain[:2]] == ["Read this.", "done"]
        said = [{"type": "text", "text": "and?"}] if rest and rest[0]["role"] == "user" else []
        assert plain[2] == {"role": "user", "content": [picture, *said]}
        assert plain[3:] == (rest if rest and not said else [])


def test_responses_have_pictures_in_messages_and_outputs_of_tools() -> None:
    given = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    text = {"type": "input_text", "text": "a"}
    found = messages_of_items([{"role": "user", "content": [given, text]},
                  {"type": "function_call_output", "call_id": "c", "output": [text, given]}])  # fmt: skip
    part = {"type": "image_url", "image_url": {"url": given["image_url"], "detail": "auto"}}
    assert [one["content"] for one in found] == [[part, text], [text, part]]
    with pytest.raises(ApiError, match=r"input\[0\]\.content\[0\].*files are not stored here"):
        messages_of_items([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}])


def test_videos_are_parts_as_vllm_has_them() -> None:
    """A file, or frames that commas separate; other addresses are refused."""

    def read(url: Any) -> Any:
        return plain_messages([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}])

    where = "messages[0].content[0].video_url"
    for url, data in (
        ("data:video/mp4;base64,AAAA", b"\0\0\0"),
        ("data:video/jpeg;base64,AAAA,AAAB", [b"\0\0\0", b"\0\0\1"]),
        (b"fetched", b"fetched"),
    ):
        assert read(url)[0]["content"] == [{"type": "video", "video": data, "where": where}]
    for url in ("data:image/png;base64,AAAA", "file:///etc/passwd", "data:video/mp4;base64,!", "https://a/b.mp4", 3):
        words = "base64" if url == "data:video/mp4;base64,!" else "data:video"
        with pytest.raises(ApiError, match=rf"messages\[0\].content\[0\].video_url: expected {words}"):
            read(url)


def test_a_model_that_sees_nothing_says_so_whatever_its_template_takes() -> None:
    body = {"messages": [{"role": "user", "content": [PART]}]}
    (refused,) = answers(FakeEngine(), ("/v1/chat/completions", body))
    assert refused.status_code == 400 and "the model sees no pictures" in refused.json()["error"]["message"]
