"""Pictures over OpenAI's API: answers are those of `Engine.chat`; addresses and damage are refused in words."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow")
pytest.importorskip("torch", reason="transformers makes the model")
openai = pytest.importorskip("openai", reason="the client is OpenAI's")

from PIL import Image

import mlcpipe
from tests.conftest import QUICK
from tests.models import sight
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


def test_answers_are_those_of_the_engine(bundle: Path) -> None:
    images = [sight.noise(40, 96, 5), sight.noise(96, 60, 6)]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    expected = mlcpipe.Engine(bundle).chat(asked("image", *images), **options)
    with running_server(bundle) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        options["model"] = client.models.list().data[0].id
        messages: Any = asked("image_url", *map(url, images))
        found = client.chat.completions.create(messages=messages, **options)
        assert found.choices[0].message.content == expected.text
        assert found.usage.prompt_tokens == expected.stats.prompt_tokens
        ollama_sees_too(server.url, options["model"], images)
        for wrong, words in (
            ({"url": "https://127.0.0.1/a.png"}, "pictures elsewhere are not fetched"),
            ({"url": "file:///etc/passwd"}, "pictures elsewhere are not fetched"),
            ({"url": "data:image/png;base64,!"}, "expected base64"),
            ({"url": "data:image/png;base64,AAAA"}, "in no known format"),
            ({**url(images[0]), "detail": "low"}, "expected auto or high"),
        ):
            messages = asked("image_url", url(images[0]), wrong)
            with pytest.raises(openai.BadRequestError, match=words):
                client.chat.completions.create(messages=messages, **options)
