"""Pictures over all chat APIs: answers are those of `Engine.chat`; addresses and damage are refused in words."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow")
pytest.importorskip("torch", reason="transformers makes the model")
openai = pytest.importorskip("openai", reason="the client is OpenAI's")

from PIL import Image

import mlcpipe
from tests.conftest import QUICK
from tests.models import sight, sight_videos
from tests.server.conftest import running_server

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight")
    sight.write(folder / "checkpoint")
    return mlcpipe.compile(folder / "checkpoint", target=QUICK, quantization="q0f32", output=folder / "bundle")


def url(image: Any) -> dict[str, Any]:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return {"url": f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"}


def asked(kind: str, one: Any, other: Any) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "and"}
    return [{"role": "user", "content": [{"type": kind, kind: one}, text, {"type": kind, kind: other}]}]


def ollama_sees_too(address: str, model: str, images: list[Any]) -> None:
    """The same pictures, before the text as Ollama has them."""
    ollama = pytest.importorskip("ollama")
    data = [url(image)["url"].partition(",")[2] for image in images]
    with ollama.Client(host=address) as client:
        options = {"temperature": 0, "num_predict": 6}
        chat = client.chat(model, [{"role": "user", "content": "and", "images": data}], options=options)
        text = client.generate(model, "and", images=data, options=options)
        other = client.chat(model, [{"role": "user", "content": "and", "images": data[::-1]}], options=options)
        assert chat.message.content == text.response and chat.prompt_eval_count == text.prompt_eval_count > 10
        assert other.message.content != chat.message.content
        assert "vision" in client.show(model).capabilities
        with pytest.raises(ollama.ResponseError, match="in no known format"):
            client.chat(model, [{"role": "user", "content": "and", "images": ["AAAA"]}])


def responses_see_too(client: Any, model: str, images: list[Any], text: str) -> None:
    """In a message, whole and as a stream, in a stored conversation, and in the result of a tool."""
    given = [{"type": "input_image", "image_url": url(image)["url"]} for image in images]
    content = [given[0], {"type": "input_text", "text": "and"}, given[1]]
    asked: Any = {"model": model, "temperature": 0, "max_output_tokens": 6}
    whole = client.responses.create(input=[{"role": "user", "content": content}], **asked)
    assert whole.output_text == text
    with client.responses.stream(input=[{"role": "user", "content": content}], **asked) as stream:
        assert "".join(one.delta for one in stream if one.type == "response.output_text.delta") == text
    tokens = client.responses.input_tokens.count(model=model, input=[{"role": "user", "content": content}])
    assert tokens.input_tokens == whole.usage.input_tokens
    more = client.responses.create(input="more", previous_response_id=whole.id, **asked)
    said = [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    assert (
        more.output_text
        == client.responses.create(input=[{"role": "user", "content": content}, *said], **asked).output_text
    )
    returned = {"type": "function_call_output", "call_id": "c", "output": content[:2]}
    after = {"type": "message", "role": "user", "content": [*content[1:]]}
    call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
    found = client.responses.create(input=[call, returned, after], **asked)
    assert found.usage.input_tokens > tokens.input_tokens
    with pytest.raises(openai.BadRequestError, match="files are not stored here"):
        client.responses.create(input=[{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], **asked)


def anthropic_sees_too(address: str, model: str, images: list[Any], text: str, tokens: int) -> None:
    """In a message, whole and as a stream, and in the result of a tool."""
    anthropic = pytest.importorskip("anthropic")
    first, last = (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url(image)["url"][22:]}}
        for image in images
    )
    messages: Any = [{"role": "user", "content": [first, {"type": "text", "text": "and"}, last]}]
    asked: Any = {"model": model, "max_tokens": 6}
    exact = {"temperature": 0}
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        whole = client.messages.create(messages=messages, extra_body=exact, **asked)
        assert whole.content[0].text == text
        assert client.messages.count_tokens(model=model, messages=messages).input_tokens == tokens
        with client.messages.stream(messages=messages, extra_body=exact, **asked) as stream:
            assert "".join(stream.text_stream) == text
        call = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [first]}
        history: Any = [
            {"role": "user", "content": "see"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "and"}, last]},
        ]  # fmt: skip
        counted = client.messages.count_tokens(model=model, messages=history).input_tokens
        history[2]["content"][0] = {**result, "content": "no picture"}
        assert counted > client.messages.count_tokens(model=model, messages=history).input_tokens
        wrong: Any = {"type": "image", "source": {"type": "url", "url": "https://127.0.0.1/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="--allow-remote-images alone"):
            client.messages.create(messages=[{"role": "user", "content": [wrong]}], **asked)


def videos_are_seen_too(client: Any, engine: mlcpipe.Engine, options: dict[str, Any]) -> None:
    """A file in vLLM's form, and frames of it."""
    data = sight_videos.file_of(sight_videos.frames(9, 32, 48), fps=4)
    shown = [io.BytesIO(), io.BytesIO()]
    for out, frame in zip(shown, sight_videos.frames(2, 40, 60)):
        Image.fromarray(frame).save(out, "JPEG")
    frames = [out.getvalue() for out in shown]
    for given, mime, parts in ((data, "mp4", [data]), (frames, "jpeg", frames)):
        text = ",".join(base64.b64encode(part).decode() for part in parts)
        video = {"type": "video_url", "video_url": {"url": f"data:video/{mime};base64,{text}"}}
        asking = {"type": "text", "text": "and"}
        messages: Any = [{"role": "user", "content": [video, asking]}]
        found = client.chat.completions.create(messages=messages, **options)
        own = [{"role": "user", "content": [{"type": "video", "video": given}, asking]}]
        expected = engine.chat(own, temperature=0, max_tokens=6)
        assert found.choices[0].message.content == expected.text
        assert found.usage.prompt_tokens == expected.stats.prompt_tokens
    for wrong, words in (
        ("data:video/mp4;base64,AAAA", "content.*video_url cannot be read"),
        ("https://127.0.0.1/a.mp4", "--allow-remote-images alone"),
        ("data:video/jpeg;base64,AAAA", "in no known format"),
    ):
        messages = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": wrong}}]}]
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(messages=messages, **options)


def test_answers_are_those_of_the_engine(bundle: Path) -> None:
    images = [sight.noise(40, 96, 5), sight.noise(96, 60, 6)]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    engine = mlcpipe.Engine(bundle)
    expected = engine.chat(asked("image", *images), **options)
    with running_server(bundle) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        options["model"] = client.models.list().data[0].id
        messages: Any = asked("image_url", *map(url, images))
        found = client.chat.completions.create(messages=messages, **options)
        assert found.choices[0].message.content == expected.text
        assert found.usage.prompt_tokens == expected.stats.prompt_tokens
        ollama_sees_too(server.url, options["model"], images)
        responses_see_too(client, options["model"], images, expected.text)
        anthropic_sees_too(server.url, options["model"], images, expected.text, found.usage.prompt_tokens)
        counts = dict(re.findall(r"^mlcpipe_(\w+)_total (\S+)$", httpx2.get(f"{server.url}/metrics").text, re.M))
        assert float(counts["picture_tiles"]) == 3 + 5 and float(counts["picture_rows"]) == 8 * 9
        assert float(counts["mm_cache_queries"]) - float(counts["mm_cache_hits"]) == 8
        assert float(counts["mm_cache_hits"]) > 0 < float(counts["picture_seconds"])
        assert float(counts["pictures"]) > 20
        for wrong, words in (
            ({"url": "https://127.0.0.1/a.png"}, "--allow-remote-images alone"),
            ({"url": "file:///etc/passwd"}, "expected data:image"),
            ({"url": "data:image/png;base64,!"}, "expected base64"),
            ({"url": "data:image/png;base64,AAAA"}, "in no known format"),
            ({**url(images[0]), "detail": "low"}, "expected auto or high"),
        ):
            messages = asked("image_url", url(images[0]), wrong)
            with pytest.raises(openai.BadRequestError, match=words):
                client.chat.completions.create(messages=messages, **options)
        videos_are_seen_too(client, engine, options)


def test_urls_are_fetched_with_the_flag_but_none_of_this_network(bundle: Path) -> None:
    with running_server(bundle, "--allow-remote-images") as server:
        for address, words in (
            (f"{server.url}/icon.svg", "no public address"),
            (f"http://localhost:{server.url.rpartition(':')[2]}/", "no public address"),
            ("http://2130706433/", "no public address"),
            ("http://no.such.host.invalid/", "no public address"),
            ("file:///etc/passwd", "expected data:image"),
        ):
            body = {"messages": asked("image_url", {"url": address}, {"url": address})}
            refused = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"], address
