"""Measuring on a board: `ssh` is a script that runs the commands here, or a board that answers what it likes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as T

from mlcpipe.cli import main
from mlcpipe.compiler.link import find_linux_linker
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.tuned.records import read_records
from mlcpipe.tuning import remote, ssh
from mlcpipe.tuning.inputs import Inputs, inputs_of
from tests.conftest import TinyLlama, write_llama
from tir_schedules.cpu.attention import AttentionShape, page_functions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a board has Linux: needs Linux here")
TARGET = load_target("cpu-native")
(VARIANT,) = compiled_variants(TARGET)
HERE = 'exec sh -c "$command"'
# A Raspberry Pi 5's.
CPUINFO = """processor : 0
Features : fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU part : 0xd0b

Model : Raspberry Pi 5 Model B Rev 1.0
"""

MakeSsh = Callable[[str], Path]


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSsh:
    """Makes an `ssh` that does what a script says with $command; all of its arguments are in the file returned."""
    folder, log = tmp_path / "bin", tmp_path / "arguments"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "there"))

    def make(script: str) -> Path:
        folder.mkdir(exist_ok=True)
        (tmp_path / "there").mkdir(exist_ok=True)
        (folder / "ssh").write_text(f'#!/bin/sh\necho "$@" >>"{log}"\nfor command; do :; done\n{script}\n')
        (folder / "ssh").chmod(0o700)
        return log

    return make


def bench(rule: str, func: tirx.PrimFunc, inputs: Inputs) -> remote.Bench:
    return remote.Bench("board", TARGET, VARIANT, rule, func, inputs)


def test_kernels_are_timed_by_a_program_that_leaves_nothing(fake_ssh: MakeSsh, tmp_path: Path) -> None:
    log = fake_ssh(HERE)
    matmul = definitions.matmul(load_scheme("q4f16_1"), load_layout("rows16"), 64, 256, "float32")
    cases = (
        ("cpu.matmul", matmul, inputs_of(matmul, 5), {"gemm_rows": 4}),
        ("cpu.attention", attention := page_functions(AttentionShape(4, 2, 32, "float32"), 0.2)["attend_few"],
         inputs_of(attention, 1, 40), {"attention_rows": 1}),
    )  # fmt: skip
    for rule, func, given, choice in cases:
        pairs = bench(rule, func, given).pairs(choice, 3)
        assert len(pairs) == 3 and all(seconds > 0 for pair in pairs for seconds in pair)
    assert list((tmp_path / "there").iterdir()) == []
    asked = log.read_text()
    assert (
        asked.count("BatchMode=yes") == 2 and asked.count("ForwardAgent=no") == 2 and asked.count("-- board sh -c") == 2
    )


@cache  # TVM's parser takes half a second for each
def kernels() -> Mapping[str, tirx.PrimFunc]:
    @T.prim_func(s_tir=True)
    def copies(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        X = T.match_buffer(x, (300000,), "float32")
        Y = T.match_buffer(y, (300000,), "float32")
        for i in T.serial(300000):
            Y[i] = X[i]

    @T.prim_func(s_tir=True)
    def repeats(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        X = T.match_buffer(x, (300000,), "float32")
        Y = T.match_buffer(y, (300000,), "float32")
        for i in T.serial(300000):
            Y[i] = X[i % 262160]

    @T.prim_func(s_tir=True)
    def forgets(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        T.match_buffer(x, (300000,), "float32")
        Y = T.match_buffer(y, (300000,), "float32")
        Y[0] = T.float32(0)

    @T.prim_func(s_tir=True)
    def is_nan(x: T.handle, y: T.handle):  # type: ignore[no-untyped-def]
        X = T.match_buffer(x, (300000,), "float32")
        Y = T.match_buffer(y, (300000,), "float32")
        for i in T.serial(300000):
            Y[i] = X[i] + T.float32("nan")

    return {"copies": copies, "repeats": repeats, "forgets": forgets, "is_nan": is_nan}


@pytest.mark.parametrize(
    ("candidate", "words"), (("repeats", ""), ("forgets", "outputs differ"), ("is_nan", "outputs differ"))
)
def test_a_candidate_must_give_the_default_s_numbers(
    candidate: str, words: str, fake_ssh: MakeSsh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors longer than what is sent repeat it, so that these are equal: `copies` and `repeats`."""

    def kernel(target: object, rule: str, func: tirx.PrimFunc, knobs: Mapping[str, object]) -> tirx.PrimFunc:
        return kernels()[candidate] if "candidate" in knobs else func

    fake_ssh(HERE)
    monkeypatch.setattr(remote, "scheduled", kernel)
    x = np.random.default_rng(0).standard_normal(300000, np.float32)
    measured = bench("", kernels()["copies"], Inputs((x, np.zeros_like(x)), (1,), cold=False))
    if words:
        with pytest.raises(CompileError, match=words):
            measured.pairs({"candidate": 1}, 2)
    else:
        assert len(measured.pairs({"candidate": 1}, 2)) == 2


GOOD = '{"apart": [[0, 1]], "pairs": [[1e-3, 2e-3], [1e-3, 1]]}'


@pytest.mark.parametrize(
    "answer",
    (
        "", "hello", "null", "1e-3", "{}", GOOD[:-1], GOOD + " x", GOOD.replace("1e-3", "NaN"), GOOD.replace("1e-3", "-1"),
        GOOD.replace("1e-3", "Infinity"), GOOD.replace("1e-3", "1e999"), GOOD.replace("1e-3", "0"),
        GOOD.replace("1e-3", '"1"'), GOOD.replace("1e-3", "1" * 400), GOOD.replace("1e-3", "true"),
        GOOD.replace("[1e-3, 1]", "[1e-3, 1, 1]"), GOOD.replace("[1e-3, 1]", "[1, 1], [1, 1]"),
        GOOD.replace("[0, 1]", ""), GOOD.replace("[0, 1]", "[0, 1], [0, 1]"), GOOD.replace("[0,", "[-1,"),
        GOOD.replace("{", '{"more": 1, ', 1), "[" * 500_000, '{"pairs": ' * 1000, "\x1b[2J\0" * 1000,
    ),
)  # fmt: skip
def test_other_answers_are_refused_in_a_line(answer: str) -> None:
    assert remote.parse(GOOD, "board", 1, 2).pairs == [(1e-3, 2e-3), (1e-3, 1.0)]
    with pytest.raises(TargetError, match=r"the board answers (no|other) times in board; ") as caught:
        remote.parse(answer, "board", 1, 2)
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("script", "words"),
    (
        ("exec yes", "answer is too long"),
        ("exec yes >&2", "answer is too long"),
        ("exec cat /dev/zero", "answer is too long"),
        ("exec sleep 100", "at most 2 s"),
        ("exec sleep 100 >&- 2>&-", "at most 2 s"),
        ("echo no such program; exit 127", "exit status 127: no such program"),
        ("kill -SEGV $$", "exit status"),
        ("echo Permission denied >&2; exit 255", "Permission denied; `ssh board` must work without a question"),
    ),
)
def test_a_board_that_fails_or_never_ends_is_told(script: str, words: str, fake_ssh: MakeSsh) -> None:
    fake_ssh(script)
    began = time.monotonic()  # the sleeps of 100 s are not waited for
    with pytest.raises(TargetError) as caught:
        ssh.run("board", "true", 2.0)
    assert words in str(caught.value) and time.monotonic() - began < 100


@pytest.mark.parametrize(
    ("options", "script", "words"),
    (
        (("--ssh", "-oProxyCommand=id"), "exit 1", "a host as `ssh` takes it"),
        (("--ssh", "a b"), "exit 1", "a host as `ssh` takes it"),
        (("--ssh", "board"), "exec cat /dev/zero", "answer is too long"),
        (("--ssh", "board"), "echo; echo sparc", "expected Linux on x86_64 or aarch64 or riscv64; found 'sparc'"),
        (("--ssh", "board"), "", "expected Linux on x86_64 or aarch64 or riscv64; found ''"),
        (("--ssh", "board"), "head -c 200000 /dev/zero", "expected Linux on x86_64 or aarch64 or riscv64; found '"),
        (("--ssh", "board"), "exit 3", "the board failed in board; found exit status 3"),
        (("--ssh", "board", "--target", "vulkan"), "echo; echo x86_64", "run `mlcpipe tune` on its machine"),
        (("--ssh", "board", "--target", "pi.toml"), "echo; echo x86_64", "expected Linux on x86_64"),
        (("--ssh", "board", "--target", "pi.toml"), "echo; echo aarch64", "older than the target"),
    ),
)  # fmt: skip
def test_what_cannot_be_is_told_first(
    options: tuple[str, ...], script: str, words: str, fake_ssh: MakeSsh, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("pi.toml").write_text('base = "cpu"\n[tvm]\nmtriple = "aarch64-unknown-linux-gnu"\nmcpu = "cortex-a76"\n')
    fake_ssh(script)
    assert main(["tune", str(tmp_path), *options]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1 and len(told) < 700


def test_a_board_says_what_it_is(fake_ssh: MakeSsh, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"{CPUINFO}aarch64\n")
    fake_ssh(f'cat "{tmp_path}/cpuinfo"')
    board = ssh.look_at("pi@[::1]")
    assert (board.host, board.arch, board.cpu) == ("pi@[::1]", "aarch64", "Raspberry Pi 5 Model B Rev 1.0")
    assert {"asimddp", "asimdhp", "atomics"} < board.features and "i8mm" not in board.features


def tuned(model: Path, records: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    options = ["--kernels", "gemv", "--trials", "2", "--budget", "1s", "--records", str(records), "--json"]
    assert main(["tune", str(model), "--ssh", "pi@board", *options]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.full
def test_a_model_is_tuned_on_another_machine(
    fake_ssh: MakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))
    fake_ssh(HERE)
    found = tuned(write_llama(tmp_path / "model", TinyLlama(layers=1)), tmp_path / "records.json", capsys)
    kernel = found["kernels"][0]  # type: ignore[index]
    assert found["read_bandwidth_gb_s"] is None and kernel["default_us"] > 0 and kernel["best_ratio"] > 0, kernel
    kept = [kernel["record"] for kernel in found["kernels"] if kernel["record"]]  # type: ignore[attr-defined]
    assert len(read_records(tmp_path / "records.json")) == len(kept)
    assert list((tmp_path / "there").glob("tmp.*")) == []


@pytest.mark.full
def test_an_arm_board_is_tuned_without_a_target_file(
    fake_ssh: MakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("qemu-aarch64") is None or find_linux_linker("aarch64") is None:
        pytest.skip("needs qemu-aarch64 and a C compiler for aarch64")
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cpuinfo").write_text(f"{CPUINFO}aarch64\n")
    emulated = """sed "s|&& \\"\\$d/p\\"|\\&\\& qemu-aarch64 -cpu neoverse-n1 \\"\\$d/p\\"|" """
    script = (
        f'case "$command" in *cpuinfo*) cat "{tmp_path}/cpuinfo";; *) sh -c "$(echo "$command" | {emulated})";; esac'
    )
    fake_ssh(script)
    found = tuned(write_llama(tmp_path / "model", TinyLlama(layers=1)), tmp_path / "records.json", capsys)
    assert (found["device"], found["variant"]) == ("Raspberry Pi 5 Model B Rev 1.0", "dotprod")
    kernel = found["kernels"][0]  # type: ignore[index]
    assert kernel["default_us"] > 0 and kernel["best_ratio"] > 0, kernel
