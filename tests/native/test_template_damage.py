"""Hostile templates end in an error in C++ too, and damaged programs are refused or render: never a crash or a hang."""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import platformdirs
import pytest

from mlcpipe.compiler.text.template_program import template_program
from mlcpipe.errors import TemplateError
from tests.native.cxx import FUZZED, ROOT, SANITIZED, Build, Cxx, find_clang
from tests.native.fuzzing import FUZZ_S
from tests.native.templates import SOURCES, NativeTemplate, build
from tests.once import Once
from tests.unit.text import attacks

TEMPLATES = {path.stem: path.read_text("utf-8") for path in (Path(attacks.__file__).parent / "templates").iterdir()}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "Hi <|im_end|>"},
    {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]},
    {"role": "tool", "content": "é"},
]
CONTROL = ["<|im_end|>", "<s>"]
MAX_SECONDS = 10.0  # of processor time: of a second, on a machine that is not slowed down
MAX_MIB = 400
CHANGES = 1000
SECTIONS = 11
QUICK = [
    *attacks.DUNDERS,
    *attacks.STATEMENTS,
    *attacks.LOOPS[:8],
    *attacks.SIZES[:40],
    *attacks.SHARED,
    *attacks.HASHES,
]


@pytest.fixture(scope="module")
def library(native_library: Build) -> ctypes.CDLL:
    return build(native_library)


def attack(library: ctypes.CDLL, source: str) -> None:
    try:
        native = NativeTemplate(library, source)
    except TemplateError:
        return
    started = time.thread_time()
    kind, line = native.render(attacks.MESSAGES)
    assert kind == "TemplateError" and line.startswith("the chat template ") and len(line) < 700, line[:700]
    assert time.thread_time() - started < MAX_SECONDS


def test_attacks_end_in_an_error(library: ctypes.CDLL) -> None:
    for source in QUICK:
        attack(library, source)


@pytest.mark.everything
def test_all_attacks_end_in_an_error(library: ctypes.CDLL) -> None:
    for source in attacks.attacks():
        attack(library, source)


MEMORY = """
import ctypes, resource, sys
from tests.native.templates import NativeTemplate
from tests.unit.text import attacks
library = ctypes.CDLL(sys.argv[1])
templates = [NativeTemplate(library, source) for source in attacks.SIZES[:-1] if "strftime" not in source]
templates[0].render(attacks.MESSAGES)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for template in templates:
    template.render(attacks.MESSAGES)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // (2**20 if sys.platform == "darwin" else 1024))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="resource is not available on Windows")
def test_attacks_take_little_memory(library: ctypes.CDLL) -> None:
    """Peak over the attacks on size, in a fresh process, in MiB above a harmless rendering."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", MEMORY, library._name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=paths, cwd=ROOT)
    assert int(done.stdout) < MAX_MIB


@pytest.mark.parametrize("source", attacks.HARMLESS)
def test_what_looks_like_an_attack_and_is_none(library: ctypes.CDLL, source: str) -> None:
    assert NativeTemplate(library, source).render(attacks.MESSAGES) == (None, attacks.HARMLESS[source])


@pytest.mark.parametrize(
    ("source", "content", "limit"),
    [
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "", "steps"),
        ("{{ messages[0].content * 7 }}", "é" * 500_000, "characters"),
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "", "nested"),
        ("{{ messages[0].content | list | length }}", "x" * 150_000, ""),
        ("{{ (messages[0].content * 4) | length }}", "é" * 500_000, ""),
    ],
)
def test_limits_grow_with_the_messages(library: ctypes.CDLL, source: str, content: str, limit: str) -> None:
    kind, line = NativeTemplate(library, source).render([{"role": "user", "content": content}])
    assert (kind == "TemplateError" and limit in line) if limit else kind is None, line[:300]


def outcome(library: ctypes.CDLL, file: bytes) -> str:
    return " ".join(word for word in NativeTemplate(library, file).render(MESSAGES)[1].split(";")[:2] if word) or "text"


def test_cut_files_are_refused(library: ctypes.CDLL) -> None:
    file = template_program(TEMPLATES["features"], control=CONTROL)
    for length in [*range(300), *range(300, len(file), 251)]:
        assert outcome(library, file[:length]).startswith("a damaged file of tables in mlc_chat")


def test_changed_numbers_are_refused_or_render(library: ctypes.CDLL) -> None:
    draw, refused, rendered = random.Random(5), 0, 0
    for source in TEMPLATES.values():
        file = template_program(source, control=CONTROL)
        sections = [struct.unpack_from("<QQ", file, 16 + 16 * index) for index in range(SECTIONS)]
        for begin, length in sections:
            for _ in range(30 if length else 0):
                damaged, at = bytearray(file), begin + draw.randrange(length) // 4 * 4
                damaged[at : at + 4] = struct.pack(
                    "<I", draw.choice((0, 1, 7, draw.randrange(300), 1 << 31, (1 << 32) - 1))
                )
                kind, line = NativeTemplate(library, bytes(damaged[: len(file)])).render(MESSAGES)
                assert kind in (None, "TemplateError")
                refused += line.startswith("a damaged ")
                rendered += kind is None
    assert min(refused, rendered) > 100, (refused, rendered)


def test_references_to_later_nodes_are_refused(library: ctypes.CDLL) -> None:
    """A node that is its own child would never end."""
    file = bytearray(template_program("{{ not x }}"))
    operands = struct.unpack_from("<Q", file, 16 + 16)[0]
    count = struct.unpack_from("<Q", file, 16 + 16 + 8)[0] // 4
    for index in range(count):
        damaged = bytearray(file)
        struct.pack_into("<I", damaged, operands + 4 * index, 1000)
        assert outcome(library, bytes(damaged)).startswith("a damaged ") or index == 0


def inputs(folder: Path) -> list[str]:
    """Files for template_fuzz.cc."""
    for name, source in TEMPLATES.items():
        program = template_program(source, control=CONTROL)
        folder.joinpath(name).write_bytes(struct.pack("<I", len(program)) + program + json.dumps(MESSAGES).encode())
    return [str(path) for path in folder.iterdir()]


FUZZER = [Path(__file__).with_name("template_fuzz.cc"), *SOURCES[1:]]


@pytest.mark.full
def test_changed_files_break_nothing_under_sanitizers(cxx: Cxx, tmp_path: Path) -> None:
    changes = cxx.program(FUZZER, "-DMLCPIPE_MAIN", *SANITIZED)
    (tmp_path / "inputs").mkdir()
    command = [str(changes), str(CHANGES), "1", *inputs(tmp_path / "inputs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.everything
def test_libfuzzer_finds_nothing(once: Once, tmp_path: Path) -> None:
    """What it found worth keeping stays in the cache for the next time."""
    fuzz = find_clang(once).program(FUZZER, *FUZZED)
    corpus = platformdirs.user_cache_path("mlcpipe") / "tests" / "fuzz-template"
    corpus.mkdir(parents=True, exist_ok=True)
    inputs(corpus)
    command = [
        str(fuzz),
        str(corpus),
        f"-max_total_time={FUZZ_S}",
        "-timeout=20",
        "-max_len=200000",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
