"""Two models in one process, and in one program: each answers as it does alone in Python."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.compiler.link import find_cxx, find_zig
from mlcpipe.compiler.native_runtime import RUNTIME_SOURCES, object_files
from mlcpipe.compiler.static_library import own_table
from mlcpipe.host.cpu_features import architecture
from tests.conftest import DEMO, Bundles
from tests.native.conftest import private_cache
from tests.native.engine import BUNDLE, Runtime

pytestmark = pytest.mark.full  # compiles TVM's runtime
GREEDY = SamplingParams(temperature=0.0)
PROMPT = "Hello! What is a compiler?"
TOKENS = 12
SOURCE = Path(__file__).with_name("two_models.c")


def in_python(bundle: Path, prompt: str | list[int], tokens: int) -> list[int]:
    """The greedy answer of Python's engine."""
    return Engine(bundle, threads=1).generate(prompt, sampling=GREEDY, max_tokens=tokens, ignore_eos=True).token_ids


def test_two_bundles_in_one_process(
    demo_bundles: Bundles, tiny_bundles: Bundles, runtime: Runtime, copy_of: Callable[[Path], Path]
) -> None:
    """In turns: each keeps its own pages and functions."""
    bundles = [demo_bundles["q4f16_1"], tiny_bundles["q0f32"]]
    prompt = list(b"two models")
    expected = [in_python(bundle, prompt, 2 * TOKENS) for bundle in bundles]
    engines = [runtime.open(copy_of(bundle), threads=1) for bundle in bundles]
    answers = [engine.generate(prompt, max_tokens=TOKENS).tokens for engine in engines]
    for engine, answer in zip(engines, answers):
        turn = engine.generate(prompt + answer, max_tokens=TOKENS)
        assert turn.cached_tokens == len(prompt + answer) - 1
        answer += turn.tokens
    assert answers == expected
    engines[0].close()
    assert engines[1].generate(prompt, max_tokens=2 * TOKENS).tokens == expected[1]


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_bundle_that_is_replaced(is_open: bool, tiny_bundles: Bundles, runtime: Runtime, tmp_path: Path) -> None:
    """As a process that lives on opens it again: the code is that of the folder now, of the first bundle at last too."""
    folder, engines = tmp_path / "bundle", []
    for quantization in ("q0f32", "q4f16_1", "q0f32"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_bundles[quantization], folder)
        engines.append(runtime.open(folder, threads=1))
        answer = engines[-1].generate(list(b"replaced"), max_tokens=TOKENS).tokens
        assert answer == in_python(tiny_bundles[quantization], list(b"replaced"), TOKENS)
        if not is_open:
            engines.pop().close()
    assert all(engine.generate(list(b"still"), max_tokens=4).tokens for engine in engines)


@pytest.mark.everything  # test_sdk.py has two models in one program too
@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_two_models_in_one_program(
    arch: str, demo_bundles: Bundles, tiny_bundles: Bundles, shared: Path, tmp_path: Path
) -> None:
    """Their functions have the same names; the program names the code of each."""
    if find_zig() is None:
        pytest.skip("static libraries need ziglang")
    runner = [f"qemu-{arch}"] if arch != architecture() else []
    if runner and shutil.which(runner[0]) is None:
        pytest.skip("qemu-user runs programs of other machines")
    target = {"x86_64": "x86_64-linux", "aarch64": "arm64-linux"}[arch]
    sources = {"q4f16_1": DEMO, "q0f32": tiny_bundles.checkpoint}
    bundles = [
        mlcpipe.compile(source, target=target, quantization=name, output=tmp_path / name)
        for name, source in sources.items()
    ]
    codes = [bundle / "lib" / "libmodel.a" for bundle in bundles]
    compiler = find_cxx(f"{arch}-linux-musl")
    objects = [str(path) for path in object_files(compiler, private_cache(shared))]

    def program(name: str, *codes: Path) -> Path:
        tables = [f"-DCODE_{letter}={own_table(code)}" for letter, code in zip("AB", codes)]
        words = ["-static", "-pthread", *tables, f"-I{RUNTIME_SOURCES}", str(SOURCE), *objects, *map(str, codes), "-lm"]
        compiler.run([*words, "-o", str(tmp_path / name)])
        return tmp_path / name

    def run(program: Path, *folders: Path) -> subprocess.CompletedProcess[str]:
        words = [*runner, program, *folders, PROMPT, str(TOKENS)]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)

    def answers(program: Path, *folders: Path) -> list[list[int]]:
        done = run(program, *folders)
        assert done.returncode == 0, done.stderr
        return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]

    both = program("both", *codes)
    if runner:  # other machines round otherwise: what each model answers in a program without the other
        expected = [answers(program(f"only{i}", codes[i], codes[i]), bundles[i], bundles[i])[0] for i in (0, 1)]
    else:
        expected = [in_python(bundle, PROMPT, TOKENS) for bundle in (demo_bundles["q4f16_1"], tiny_bundles["q0f32"])]
    assert answers(both, *bundles) == expected and expected[0] != expected[1]
    exchanged = run(both, *reversed(bundles))
    assert exchanged.returncode == BUNDLE and "manifest and library differ in" in exchanged.stderr
