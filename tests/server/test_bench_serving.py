"""The benchmark of servers, with a real one: `bench/bench_serving.py`."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from bench import bench_serving
from bench.bench_serving import lengths, level_of
from bench.serving_client import Answer, _read, _response
from mlcpipe.errors import MlcpipeError
from tests.server.conftest import Running


def test_every_load_is_measured(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--url", server.url, "--concurrency", "1,3", "--rate", "40", "--requests", "6", "--prompt-tokens", "40-60",
        "--answer-tokens", "48", "--shared-prefix-tokens", "32", "--long-prompt", "300", "--plot", str(tmp_path / "plot.svg"),
    ]  # fmt: skip
    assert bench_serving.main([*arguments, "--json"]) == 0
    levels = json.loads(capsys.readouterr().out)
    assert [level["load"] for level in levels] == ["1 clients", "3 clients", "40 requests/s"]
    for level in levels:
        assert (level["requests"], level["failed"], level["answer_tokens"]) == (6, {}, 288)
        assert 0.75 * 40 < level["prompt_tokens"] / 6 < 1.25 * 60, "prompts are about as long as asked"
        assert 0 < level["first"][0] <= level["whole"][0] and level["between"][0] <= level["between"][2]
        assert level["beside"] or level["load"] == "1 clients"
        assert 0 < level["client_s"] < 10
    drawing = xml.etree.ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert len(drawing.findall(".//{*}circle")) == 3 * 3 * 2


def test_servers_take_turns_with_free_text_and_json(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["yes", "no"]}))
    other = server.url.replace("127.0.0.1", "localhost")
    arguments = ["--url", server.url, "--url", other, "--concurrency", "2", "--requests", "2", "--schema", str(schema)]
    assert bench_serving.main([*arguments, "--answer-tokens", "20", "--json"]) == 0
    levels = json.loads(capsys.readouterr().out)
    assert [(f"http://{one['server']}", one["load"]) for one in levels] == [
        (url, load) for load in ("2 clients", "2 clients, schema") for url in (server.url, other)
    ]
    free, _, schema_, _ = (one["answer_tokens"] for one in levels)
    assert free == 40 and 0 < schema_ < 40


def test_failures_are_counted_and_shown(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", server.url, "--concurrency", "2", "--requests", "2", "--prompt-tokens", "90000"]
    assert bench_serving.main(arguments) == 1
    shown = capsys.readouterr()
    assert "0.0 tokens/s, 2 failed" in shown.err and "status 400" in shown.err
    assert "p99" in shown.out


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(MlcpipeError) as caught:
        bench_serving.main(["--url", "http://127.0.0.1:9", "--requests", "1"])
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_without_an_address_it_starts_our_server(demo_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model",
        str(demo_bundle),
        "--serve=--threads 2",
        "--concurrency",
        "2",
        "--requests",
        "2",
        "--api",
        "completions",
    ]
    assert bench_serving.main([*arguments, "--prompt-tokens", "~40", "--answer-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["answer_tokens"] == 8


def test_the_arithmetic_of_a_level() -> None:
    answers = [Answer(0.0, 4.0, [1.0, 2.0, 4.0], 7, 3), Answer(0.0, 2.0, [2.0], 7, 1), Answer(0.0, 9.0, error="no")]
    level = level_of("a", "2 clients", answers, 8.0, 0.1, Answer(1.5, 3.5, [3.0], 90, 1))
    assert (level.failed, level.requests_per_s, level.tokens_per_s) == ({"no": 1}, 0.25, 0.5)
    assert level.first is not None and level.first[0] == 1.5
    assert level.between is not None and level.between[0] == 1.5 and level.beside == level.between
    assert level.per_token == [1.5] * 3


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_response_is_read_however_it_is_cut(cut: int) -> None:
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\na\nb\nc\r\n3;x\r\nd\ne\r\n0\r\n\r\n"
    parts = [(float(at), whole[at : at + cut]) for at in range(0, len(whole), cut)]
    status, lines = _response(parts)
    assert (status, [line for _, line in lines]) == (200, [b"a", b"b", b"cd", b"e"])
    assert [when for when, _ in lines] == sorted(when for when, _ in lines)
    with pytest.raises(EOFError):
        _response([(0.0, whole[:-8])])


def test_tokens_without_text_are_an_answer() -> None:
    head, end = b"HTTP/1.1 200 OK\r\n\r\n", b"data: [DONE]\n"
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n'
    answer = _read(Answer(0.0, 5.0), [(1.0, head), (2.0, usage + end)])
    assert (answer.error, answer.tokens, answer.prompt, answer.pieces) == ("", 2, 3, [5.0])
    assert _read(Answer(0.0, 5.0), [(1.0, head + end)]).error


def test_lengths() -> None:
    source = random.Random(1)
    assert {lengths("3-5")(source) for _ in range(99)} == {3, 4, 5}
    assert lengths("7")(source) == 7
    assert 80 < sum(lengths("~100")(source) for _ in range(999)) / 999 < 120
    for wrong in ("", "0", "5-3", "x", "-4", "~0"):
        with pytest.raises(ValueError):
            lengths(wrong)
