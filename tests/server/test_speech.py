"""`mlcpipe serve` of a model that hears: OpenAI's paths and forms."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

pytest.importorskip("torch", reason="tiny models are made by torch")
pytest.importorskip("transformers", reason="tiny models are transformers models")
pytest.importorskip("av", reason="files are decoded by PyAV, of the extra sound")
pytest.importorskip("python_multipart", reason="forms are read by python-multipart, of the extra sound")

import mlcpipe
from mlcpipe.runtime.speech.formats import as_srt, as_vtt, verbose
from tests.models import hearing
from tests.server.conftest import running_server


class Served(NamedTuple):
    url: str
    file: bytes
    ours: mlcpipe.Transcriber


@pytest.fixture(scope="module")
def served(shared: Path) -> Iterator[Served]:
    bundle = hearing.compiled(shared)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        out.writeframes((hearing.sound(3.9, 3) * 32767).astype("<i2").tobytes())
    with running_server(bundle, "--name", "tiny") as running:
        yield Served(running.url, file.getvalue(), mlcpipe.Transcriber(bundle))


def post(served: Served, path: str = "transcriptions", **fields: Any) -> httpx2.Response:
    files = {"file": ("talk.wav", fields.pop("file", served.file))}
    return httpx2.post(f"{served.url}/v1/audio/{path}", files=files, data=fields, timeout=120)


def test_openais_client_gets_all_forms(served: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    expected = served.ours.transcribe(served.file, mlcpipe.SpeechParams(language="de"))
    asked = {"file": ("talk.wav", served.file), "model": "tiny", "language": "de"}
    assert client.audio.transcriptions.create(**asked).text == expected.text
    made = client.audio.transcriptions.create(
        **asked, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (made.language, made.duration) == ("german", 3.9)
    shown = verbose(expected)["segments"]
    assert [(one.start, one.end, one.text, one.tokens) for one in made.segments] == [
        (one["start"], one["end"], one["text"], one["tokens"]) for one in shown
    ]
    assert client.audio.transcriptions.create(**asked, response_format="srt") == as_srt(expected)
    assert client.audio.transcriptions.create(**asked, response_format="vtt") == as_vtt(expected)
    assert client.audio.transcriptions.create(**asked, response_format="text") == f"{expected.text}\n"
    events = list(client.audio.transcriptions.create(**asked, stream=True))
    assert [one.type for one in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1) and len(events) > 1
    assert "".join(one.delta for one in events[:-1]) == events[-1].text == expected.text
    (listed,) = client.models.list().data
    assert listed.id == "tiny"


def test_translations_detect_the_language(served: Served) -> None:
    expected = served.ours.transcribe(served.file, mlcpipe.SpeechParams(task="translate"))
    made = post(served, "translations", response_format="verbose_json", model="tiny").json()
    assert made.pop("usage") == {"type": "duration", "seconds": 4}
    assert made == json.loads(json.dumps(verbose(expected)))


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"file": b"no sound"}, 400, "the sound cannot be read"),
        ({"file": b"lmgg" + bytes(50)}, 400, "is a model of GGML"),
        ({"language": "tlh"}, 400, "language; expected one that the model knows"),
        ({"temperature": "2"}, 400, "temperature; expected from 0 to 1"),
        ({"temperature": "warm"}, 400, "temperature: expected a number"),
        ({"response_format": "xml"}, 400, "response_format: expected one of json"),
        ({"response_format": "srt", "stream": "true"}, 400, "stream: events have text alone"),
        ({"stream": "maybe"}, 400, "stream: expected true or false"),
        ({"timestamp_granularities[]": "word"}, 400, "words have no times here"),
        ({"timestamp_granularities": "word"}, 400, "words have no times here"),
        ({"seed": "1"}, 400, "seed: not offered here"),
        ({"known_speaker_names[]": "a"}, 400, "known_speaker_names: not offered here"),
        ({"chunking_strategy[type]": "server_vad"}, 400, "chunking_strategy: expected auto"),
        ({"include[]": "logprobs"}, 400, "include: not offered here"),
        ({"model": "other"}, 404, "is not served here"),
    ],
)
def test_refusals(served: Served, fields: dict[str, Any], status: int, message: str) -> None:
    answer = post(served, **fields)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text


def test_bodies_that_are_no_forms_and_other_paths(served: Served) -> None:
    with httpx2.Client(base_url=served.url, timeout=60) as client:
        assert client.post("/v1/audio/transcriptions", json={"file": "x"}).status_code == 415
        empty = client.post("/v1/audio/transcriptions", data={"model": "tiny"}, files={"other": b"x"})
        assert empty.status_code == 400 and "file: expected a file" in empty.text
        for content in (b"--x\r\n", b"", b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n" + bytes(100_000)):
            headers = {"content-type": "multipart/form-data; boundary=x"}
            assert client.post("/v1/audio/transcriptions", content=content, headers=headers).status_code == 400
        headers = {"content-type": "multipart/form-data"}
        assert client.post("/v1/audio/transcriptions", content=b"x", headers=headers).status_code == 400
        refused = client.post("/v1/chat/completions", json={"messages": []})
        assert refused.status_code == 404 and "turns sound into text" in refused.text
        assert json.loads(client.get("/health").text)["status"] == "ok"
        assert "mlcpipe_generation_tokens_total" in client.get("/metrics").text
