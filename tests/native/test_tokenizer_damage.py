"""A damaged tokenizer.bin is refused or encodes; it never crashes or hangs."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from mlcpipe.compiler.text.tokenizer_program import tokenizer_program
from mlcpipe.errors import TokenizerError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.native.cxx import FUZZED, SANITIZED, Build, Cxx, find_clang
from tests.native.fuzzing import FUZZ_S
from tests.native.pipelines import PIPELINES, save
from tests.native.tokenizers import SOURCES, NativeTokenizer
from tests.once import Once

TEXT = "Hello  I'LL <s>ž\u0301x<a b> 123 日本語\n\n\t<|eot_id|>  end" * 3
HEADER = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    made = []
    for name in ("llama2", "qwen2"):
        folder = save(PIPELINES[name](), tmp_path_factory.mktemp(name))
        made.append(tokenizer_program(Tokenizer.load(folder, generation_config={}, config={})))
    return made


def outcome(build: Build, file: bytes) -> str:
    """ "ids", or the words of the refusal before any number."""
    try:
        NativeTokenizer(build, file).encode(TEXT, True)
    except TokenizerError as error:
        return str(error)
    return "ids"


def sections(file: bytes) -> list[tuple[int, int]]:
    count = int.from_bytes(file[12:16], "little")
    numbers = [int.from_bytes(file[HEADER + 8 * i :][:8], "little") for i in range(2 * count)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_cut_files_are_refused(native_library: Build, files: list[bytes]) -> None:
    for file in files:
        for length in [*range(0, 1000, 37), *range(1000, len(file), len(file) // 50)]:
            assert outcome(native_library, file[:length]).startswith("a damaged file of tables in mlctoken; expected ")


def test_changed_numbers_are_refused_or_encode(native_library: Build, files: list[bytes]) -> None:
    """Each section gets its share of the changes, small ones more than large ones."""
    draw, outcomes = random.Random(5), []
    for file in files:
        for begin, length in sections(file):
            for _ in range(25 if length else 0):
                damaged = bytearray(file)
                at = begin + draw.randrange(length)
                damaged[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
                outcomes.append(outcome(native_library, bytes(damaged)))
    assert "ids" in outcomes and len(set(outcomes)) > 12, sorted(set(outcomes))


PROGRAM = [Path(__file__).with_name("tokenizer_fuzz.cc"), *SOURCES[1:]]


@pytest.mark.full
def test_sanitizers_find_nothing_in_thousands_of_damaged_files(files: list[bytes], cxx: Cxx, tmp_path: Path) -> None:
    damage = cxx.program(PROGRAM, *SANITIZED)
    for number, file in enumerate(files):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(file)
        done = subprocess.run(
            [damage, path, "3000", str(number)], capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert 100 < int(done.stdout) < 2900, done.stdout


@pytest.mark.everything
def test_libfuzzer_finds_nothing(files: list[bytes], once: Once, tmp_path: Path) -> None:
    fuzz = find_clang(once).program(PROGRAM, *FUZZED, "-DMLCPIPE_FUZZ")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, file in enumerate(files):
        (corpus / str(number)).write_bytes(file)
    limits = [
        f"-max_total_time={FUZZ_S}",
        "-timeout=60",
        "-rss_limit_mb=4096",
        "-max_len=200000",
        "-print_final_stats=1",
    ]
    done = subprocess.run([fuzz, *limits, corpus], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
