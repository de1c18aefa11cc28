"""The chat in a pseudo terminal: what a user types and sees."""

from __future__ import annotations

import base64
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mlcpipe
from tests.conftest import CHAT_TEMPLATE, QUICK, TinyLlama, write_llama

pexpect = pytest.importorskip("pexpect")
if sys.platform == "win32":
    pytest.skip("pexpect needs a pseudo terminal", allow_module_level=True)

HERE = Path(__file__).parent
CTRL_C, CTRL_D = "\x03", "\x04"
TIMEOUT = 60
BEGUN = r"\x1b\[0m\r\x1b\[K"  # the first text of an answer takes the dots away
LAST = "αβγδεζηθι"


@contextmanager
def terminal(arguments: list[str], env: dict[str, str]) -> Iterator[Any]:
    """A program in a terminal of 24 lines and 80 columns, ended whatever happens."""
    # Ctrl-C empties the terminal's queue, wherever a character of several bytes was.
    text = {"encoding": "utf-8", "codec_errors": "replace"}
    child = pexpect.spawn(sys.executable, arguments, env=env, timeout=TIMEOUT, dimensions=(24, 80), **text)
    child.delaybeforesend = 0.1
    try:
        yield child
    finally:
        child.close(force=True)


@contextmanager
def fake_chat(env: dict[str, str], folder: Path) -> Iterator[Any]:
    """The chat with the scripted engine."""
    path = f"{env['PYTHONPATH']}:{HERE}"
    with terminal([str(HERE / "fake_chat.py"), str(folder / "history")], env | {"PYTHONPATH": path}) as child:
        child.expect(">>>")
        yield child


def end(child: Any) -> int:
    """Wait for the end; the exit code."""
    child.expect(pexpect.EOF)
    child.wait()
    return int(child.exitstatus)


def test_ctrl_c_stops_the_answer_and_not_the_program(cli_environment: dict[str, str], tmp_path: Path) -> None:
    with fake_chat(cli_environment, tmp_path) as child:
        child.send("one\r")
        child.expect("First")
        child.expect("decode")
        child.expect(">>>")
        child.send("two\r")
        child.expect("endless endless")
        child.send(CTRL_C)
        child.expect("stopped")
        assert "^C" not in child.before and "Traceback" not in child.before
        child.expect(">>>")
        child.send("three\r")
        child.expect("Second")
        child.expect("python")
        child.expect("decode")
        # the model's own sequences, as they were sent by it, are not in the stream
        assert "\x1b[2J" not in child.before and "\x1b]0" not in child.before
        child.expect(">>>")
        child.send("/copy\r")
        answer = base64.b64encode(b"[2JSecond ]0;titleanswer.\n```python\nprint(1)\n```").decode()
        child.expect_exact(f"\x1b]52;c;{answer}\x07")
        child.expect(">>>")
        child.send("/exit\r")
        assert end(child) == 0


def test_tab_completes(cli_environment: dict[str, str], tmp_path: Path) -> None:
    with fake_chat(cli_environment, tmp_path) as child:
        child.send("/ex\t")
        child.expect("it")
        child.send("\r")
        assert end(child) == 0


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_plain_terminals_get_plain_text(
    cli_environment: dict[str, str], tmp_path: Path, variable: dict[str, str]
) -> None:
    with fake_chat(cli_environment | variable, tmp_path) as child:
        child.send("one\r")
        child.expect(r"# Title\r\nFirst \*\*answer\*\*\.")
        child.expect(">>>")
        child.send("/exit\r")
        assert end(child) == 0


def test_a_resized_terminal(cli_environment: dict[str, str], tmp_path: Path) -> None:
    with fake_chat(cli_environment, tmp_path) as child:
        child.send("one\r")
        child.expect("decode")
        child.expect(">>>")
        child.send("two\r")
        child.expect("endless endless")
        child.setwinsize(10, 40)
        child.expect(r"(\n[^\n]{1,40}\r){4}")
        assert "endless" in child.after
        child.kill(signal.SIGINT)
        child.expect("stopped")


@pytest.mark.full
def test_ctrl_c_stops_an_answer_of_the_real_engine(cli_environment: dict[str, str], tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "endless", TinyLlama(positions=50_000, config={"eos_token_id": None}))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    with terminal(["-m", "mlcpipe", "chat", str(bundle), "--temperature", "0"], cli_environment) as child:
        for question in ("one", "two"):  # the engine answers again after it was stopped
            child.expect(">>>")
            child.send(f"{question}\r")
            child.expect(BEGUN)
            child.send(CTRL_C)
            child.expect("stopped")
            assert "Traceback" not in child.before
        child.expect(">>>")
        child.send(CTRL_D)
        assert end(child) == 0


@pytest.mark.full
def test_the_real_model(cli_environment: dict[str, str], tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with terminal(["-m", "mlcpipe", "chat", "--seed", "1", "--max-tokens", "24"], cli_environment) as child:
        child.expect("the demo model.*>>>")
        child.send("Hello, who are you?\r")
        child.expect("decode")
        child.expect(">>>")
        child.send("/regen\r")
        child.expect("decode")
        child.expect(">>>")
        child.send(f"/save {saved}\r")
        child.expect("saved 2 messages")
        child.expect(">>>")
        child.send("/reset\r")
        child.expect("starts over")
        child.expect(">>>")
        child.send(f"/load {saved}\r")
        child.expect("loaded 2 messages")
        child.expect(">>>")
        child.send("And what else?\r")
        child.expect("decode")
        child.expect(">>>")
        child.send(f"/save {saved}\r")
        child.expect("saved 4 messages")
        child.send("/exit\r")
        assert end(child) == 0
    messages = json.loads(saved.read_text(encoding="utf-8"))["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert all(message["content"].strip() for message in messages)


@pytest.fixture(scope="module")
def slow_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads for seconds and answers without end."""
    folder = tmp_path_factory.mktemp("slow")
    sizes = TinyLlama(hidden_size=512, intermediate_size=1536, layers=6, heads=8, kv_heads=8, head_dim=64, positions=16384,
                      config={"eos_token_id": None})  # fmt: skip
    checkpoint = write_llama(folder / "checkpoint", sizes)
    (checkpoint / "tokenizer_config.json").write_text("{}")  # no token ends an answer
    return mlcpipe.compile(checkpoint, target=QUICK, quantization="q4f32_1", output=folder / "bundle")


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.mark.full
def test_ctrl_c_stops_the_real_model(cli_environment: dict[str, str], slow_bundle: Path) -> None:
    """Between Enter and the first token, whenever it comes, and later; the chat continues and nothing is replayed."""
    arguments = ["-m", "mlcpipe", "chat", str(slow_bundle), "--raw", "--temperature", "0"]
    with terminal(arguments, cli_environment) as child:
        child.expect(">>>")
        child.delaybeforesend = None
        for turn, delay_s in enumerate((0, 0, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4)):
            child.send(paste(str(turn) + 3000 * "x" + LAST[turn]))  # another first token: nothing of it is in the cache
            child.expect(LAST[turn])
            keys = CTRL_C * (1 + turn % 2)  # twice at once loses nothing either
            child.send("\r" + keys if delay_s == 0 else "\r")
            if delay_s:
                time.sleep(delay_s)
                child.send(keys)
            child.expect("stopped")
            assert not re.search("Traceback|decode|again", child.before)
            child.expect(">>>")
        child.send("y\r")
        child.expect(r"\.\.\.")
        assert "again" not in child.before  # of the keys before
        child.expect(BEGUN)
        child.send(CTRL_C)
        child.expect("stopped")
        child.expect(">>>")
        child.send("/set max_tokens=5\r")
        child.expect(">>>")
        child.send("z\r")
        child.expect("decode 5 tokens")
        child.expect(">>>")
        child.send(CTRL_D)
        assert end(child) == 0
