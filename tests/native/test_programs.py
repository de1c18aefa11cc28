"""The native runtime as a program: one that loads bundles, and static ones with the model inside, for other machines."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.cli import main
from mlcpipe.cli.chat.session import Session
from mlcpipe.cli.chat.settings import Settings
from mlcpipe.cli.terminal import sanitize
from mlcpipe.compiler.link import find_zig
from mlcpipe.host.cpu_features import architecture
from tests.conftest import DEMO, Bundles
from tests.native.conftest import private_cache

pytestmark = pytest.mark.full  # compiles TVM's runtime
CPUS = {"aarch64": ("cortex-a53", "neoverse-n1", "max"), "riscv64": ("rv64", "rv64,v=true"), "x86_64": ("qemu64",)}
TARGETS = {"aarch64": "arm64-linux", "riscv64": "riscv64-linux", "x86_64": "x86_64-linux"}
PROMPT = "Hello! What is a compiler?"


def run(*command: object, text: str = "") -> subprocess.CompletedProcess[str]:
    words = list(map(str, command))
    return subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=600)


def expected(demo: Engine) -> tuple[str, list[int]]:
    """The greedy answer of Python's engine."""
    demo.reset()
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": PROMPT}]
    found = demo.chat(messages, sampling=SamplingParams(temperature=0.0), max_tokens=48)
    return found.text, found.token_ids


def answer(*program: object) -> tuple[str, list[int]]:
    words = ("-p", PROMPT, "--system", "Be short.", "--greedy", "--max-tokens", 48, "--threads", 2, "--json")
    done = run(*program, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["text"], found["token_ids"]


def test_a_program_loads_a_bundle(program: Path, demo_bundles: Bundles, demo: Engine) -> None:
    bundle = demo_bundles["q4f16_1"]
    assert answer(program, "-m", bundle) == expected(demo)
    piped = run(program, "-m", bundle, "--greedy", "--system=Be short.", "--max-tokens=48", text=PROMPT + "\n")
    assert piped.stdout == expected(demo)[0] + "\n"
    assert "it fits" in run(program, "doctor", "-m", bundle).stdout
    assert json.loads(run(program, "doctor", "-m", bundle, "--json").stdout)["fits"]
    rates = run(program, "bench", "-m", bundle, "--prompt-tokens", 20, "--max-tokens", 8, "--json").stdout.splitlines()
    assert len(rates) == 2 and all(json.loads(line)["decode_tok_s"] > 0 for line in rates)
    drawn = (program, "-m", bundle, "-p", "Hi", "--raw", "--temperature", 2.0, "--max-tokens", 20, "--seed")
    seeded = [run(*drawn, seed).stdout for seed in (7, 7, 8)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert "usage: " in run(program, "--help").stdout


def test_what_steers_a_terminal_is_not_printed(program: Path, tiny_bundles: Bundles) -> None:
    """As in Python's command line: of answers, whose tokens are bytes here, and of what errors name."""
    words = (program, "-m", tiny_bundles["q0f32"], "-p", "Hi", "--raw", "--temperature", 3, "--seed", 6)
    said = json.loads(run(*words, "--max-tokens", 200, "--json").stdout)["text"]
    assert "\x1b" in said and run(*words, "--max-tokens", 200).stdout == sanitize(said) + "\n"
    edges = (
        1,
        9,
        11,
        31,
        127,
        160,
        1564,
        8206,
        8208,
        8232,
        8234,
        8239,
        8294,
        8298,
        65279,
        65529,
        65532,
        917504,
        917632,
    )
    every = "".join(chr(code + step) for code in edges for step in (-1, 0) if code + step)
    assert run(program, "--threads", every).stderr == f"error: --threads; expected a number; found {sanitize(every)}\n"


def test_a_chat_in_the_terminal(program: Path, demo_bundles: Bundles, tmp_path: Path) -> None:
    """Turns, an answer that Ctrl-C ends, and the ways out."""
    pexpect = pytest.importorskip("pexpect")
    options = ["-m", str(demo_bundles["q4f16_1"]), "--threads", "1", "--raw", "--max-tokens", "1500"]
    chat = pexpect.spawn(str(program), options, encoding="utf-8", timeout=60)
    chat.expect("Ctrl-D the program\r\n> ")
    for _ in range(3):  # one that comes behind an answer gets a hint
        chat.sendline("A compiler")
        chat.expect("A compiler\r\n.")
        chat.sendintr()
        chat.expect("\n> ")
    chat.sendline(f"/save {tmp_path}/a chat")
    chat.expect("saved\r\n> ")
    chat.sendline("/reset")
    chat.expect("/reset\r\n> ")
    chat.sendline(f"/load {tmp_path}/a chat")
    chat.expect("loaded\r\n> ")
    chat.sendline(f"/load {tmp_path}/none")
    chat.expect("error: cannot read the saved chat .*\r\n> ")
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
    chat = pexpect.spawn(str(program), options, encoding="utf-8", timeout=60)
    chat.expect("\n> ")
    chat.sendintr()
    chat.expect("Ctrl-C again, or Ctrl-D, ends the program\r\n> ")
    chat.sendintr()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 130


def test_a_chat_goes_on_in_a_file(program: Path, demo_bundles: Bundles, demo: Engine, tmp_path: Path) -> None:
    """With the program and with Python, whoever saved it; no part is computed again."""
    file, greedy = tmp_path / "chat", SamplingParams(temperature=0.0)
    common = (
        program,
        "-m",
        demo_bundles["q4f16_1"],
        "--greedy",
        "--max-tokens",
        24,
        "--threads",
        2,
        "--json",
        "--session",
    )
    first = json.loads(run(*common, file, "-p", PROMPT, "--system", "Be short.").stdout)
    messages = demo.load(file)["messages"]
    assert [message["content"] for message in messages] == ["Be short.", PROMPT, first["text"]]
    messages.append({"role": "user", "content": "And a linker?"})
    expected = demo.chat(messages, sampling=greedy, max_tokens=24)
    assert expected.stats.cached_tokens > first["prompt_tokens"]
    demo.save(tmp_path / "python", chat={"messages": messages[:-1]})
    for path in (file, tmp_path / "python"):
        second = json.loads(run(*common, path, "-p", "And a linker?").stdout)
        assert second["token_ids"] == expected.token_ids
    session = Session(demo, Settings())
    assert session.load(file) == 5 and session.messages[-1]["content"] == expected.text
    assert json.loads(run(*common, file, "-p", "Hi", "--system", "Be long.").stdout)["text"]
    assert demo.load(file)["messages"][0]["content"] == "Be long."
    demo.save(tmp_path / "other", chat={"messages": [{"role": "user"}]})
    refused = {
        tmp_path / "other": "has no messages",
        tmp_path: "regular file",
        tmp_path / "no" / "chat": "cannot be saved",
    }
    for path, words in refused.items():
        done = run(*common, path, "-p", "Hi")
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["bench", "-m", "/"], "mlcpipe.json has changed"),
        (["-p", "x"], "no model in the file"),
        (["-p", "x", "-m", "none"], "no bundle in none"),
        (["--threads", "x"], "--threads; expected a number; found x"),
        (["--seed=-1"], "--seed; expected a number; found -1"),
        (["--seed"], "--seed; expected a value; found none"),
        (["other"], "no such option or command; found other"),
        (["-m", "BUNDLE", "-p", "x", "--sequences", "2"], "--sequences and --kv-tokens have no effect"),
        (["doctor", "-m", "BUNDLE", "--kv-tokens", "4096"], "--kv-tokens has no effect"),
        (["serve", "-m", "BUNDLE", "--sequences", "9"], "--sequences; expected 1 to 8; found 9"),
        (["serve", "-m", "BUNDLE", "--draft", "x"], "draft; expected off, or lookup with several sequences"),
        (["serve", "-m", "BUNDLE", "--context", "512", "--kv-tokens", "511"], "kv_tokens; expected 512 to 2048"),
        (["-m", "BUNDLE"], "no prompt; expected -p TEXT"),
        (["-m", "BUNDLE", "-p", "x", "--context", "100000"], "context length; expected 1 to"),
        (["-m", "BUNDLE", "-p", "x" * 20_000], "the context is full"),
        (["-m", "BUNDLE", "-p", "x", "--temperature", "1000"], "temperature"),
    ],
)
def test_mistakes_are_one_line(options: list[str], words: str, program: Path, demo_bundles: Bundles) -> None:
    done = run(program, *(str(demo_bundles["q4f16_1"]) if word == "BUNDLE" else word for word in options))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr


@pytest.mark.everything  # compiles TVM's runtime for another C library; test_sdk.py runs static libraries
@pytest.mark.parametrize("arch", CPUS)
def test_a_static_program_for_a_board(
    arch: str, demo: Engine, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model in its file, on CPUs of every level of instructions: the answer of this machine."""
    if find_zig() is None or shutil.which(f"qemu-{arch}") is None:
        pytest.skip("programs for other machines need ziglang and qemu-user")
    monkeypatch.setenv("MLCPIPE_CACHE", str(private_cache(shared)))
    bundle = mlcpipe.compile(DEMO, target=TARGETS[arch], quantization="q4f16_1", output=tmp_path / "bundle")
    assert main(["package", str(bundle), "--app", "cli", "-o", str(tmp_path / "chat")]) == 0
    variant = ("--variant", "baseline") if arch == "x86_64" else ()  # qemu shows this machine's features of x86-64
    for cpu in CPUS[arch]:
        assert answer(f"qemu-{arch}", "-cpu", cpu, tmp_path / "chat", *variant) == expected(demo), cpu
    httpx2 = pytest.importorskip("httpx2")
    from tests.server.conftest import running_server

    emulator = () if arch == architecture() else (f"qemu-{arch}",)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": PROMPT}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 48}
    with running_server("--threads", 2, program=(*emulator, tmp_path / "chat")) as server:
        found = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
        assert found["choices"][0]["message"]["content"] == expected(demo)[0]
        assert server.end() == 0
    licenses = run(*emulator, tmp_path / "chat", "--licenses").stdout
    assert all(word in licenses for word in ("apache-tvm", "musl", "libc++", "Apache License", "UNICODE, INC."))
    assert main(["package", str(bundle), "--app", "cli", "--no-weights", "-o", str(tmp_path / "small")]) == 0
    assert (tmp_path / "small").stat().st_size < 4 << 20
    assert answer(*emulator, tmp_path / "small") == expected(demo)
    (tmp_path / "small.mlcp").unlink()
    lonely = run(*emulator, tmp_path / "small", "-p", "x")
    assert lonely.returncode == 2 and "no model in the file" in lonely.stderr


def test_a_bundle_without_a_static_library(
    demo_bundles: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["package", str(demo_bundles["q4f16_1"]), "--app", "cli", "-o", str(tmp_path / "chat")]) == 2
    assert "no static library" in (said := capsys.readouterr().err) and "--target arm64-linux" in said
    assert main(["package", str(demo_bundles["q4f16_1"]), "--no-weights", "-o", str(tmp_path / "chat")]) == 2
    assert "--no-weights has no effect" in capsys.readouterr().err
