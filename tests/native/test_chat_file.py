"""Chats that Python saves and the native runtime continues, and the other way round; files that it refuses."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle import read_manifest
from tests.chat_files import CHAT, DIGEST, HEADER, HEADERS, by_hand, changed, hollow, sealed
from tests.conftest import QUICK, Bundles, TinyLlama, write_llama
from tests.faults import points, struck
from tests.native.engine import CANCELLED, RESOURCE, USAGE, NativeEngine, NativeError, Runtime

pytestmark = pytest.mark.full  # compiles TVM's runtime
DRAWN, GREEDY = SamplingParams(seed=3), SamplingParams(temperature=0.0)


def prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


@pytest.fixture
def native(tiny_bundles: Bundles, runtime: Runtime, copy_of: Callable[[Path], Path]) -> NativeEngine:
    return runtime.open(copy_of(tiny_bundles["q0f32"]), threads=2)


@pytest.fixture
def file(native: NativeEngine, tmp_path: Path) -> Path:
    """A chat of 48 tokens of the random model, three full pages."""
    native.generate(prompt(37, native.vocab_size), DRAWN, max_tokens=12)
    native.save(tmp_path / "tiny.chat", CHAT)
    return tmp_path / "tiny.chat"


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "q8", "q4"])
def test_both_runtimes_write_the_same_and_go_on(
    kv_cache_dtype: str, runtime: Runtime, copy_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(head_dim=32))
    bundle = mlcpipe.compile(
        checkpoint, target=QUICK, quantization="q0f32", kv_cache_dtype=kv_cache_dtype, output=tmp_path / "bundle"
    )
    engine, native = Engine(bundle, threads=2), runtime.open(copy_of(bundle), threads=2)
    engine.generate(prompt(200, 272), max_tokens=1, ignore_eos=True)  # what is left of it is not saved
    tokens = prompt(30, 272, 1)
    for params in (DRAWN, GREEDY):
        found = engine.generate(tokens, sampling=params, max_tokens=9, ignore_eos=True).token_ids
        assert native.generate(tokens, params, max_tokens=9).tokens == found
        engine.save(tmp_path / "python", chat=CHAT)
        native.save(tmp_path / "native", CHAT)
        assert (tmp_path / "python").read_bytes() == (tmp_path / "native").read_bytes()
        tokens += [*found, 7, 8]
        expected = engine.generate(tokens, sampling=params, max_tokens=40, ignore_eos=True)
        native.generate(prompt(90, 272, 2), max_tokens=3)
        assert native.restore(tmp_path / "python") == CHAT
        answer = native.generate(tokens, params, max_tokens=40)
        assert (answer.tokens, answer.cached_tokens) == (expected.token_ids, len(tokens) - 3)
        assert engine.load(tmp_path / "native") == CHAT
        again = engine.generate(tokens, sampling=params, max_tokens=40, ignore_eos=True)
        assert (again.token_ids, again.stats.cached_tokens) == (expected.token_ids, len(tokens) - 3)


def test_a_file_made_by_hand(native: NativeEngine, tiny_bundles: Bundles, tmp_path: Path) -> None:
    made = by_hand(read_manifest(tiny_bundles["q0f32"]))
    (tmp_path / "made").write_bytes(made)
    assert native.restore(tmp_path / "made") == CHAT
    native.save(tmp_path / "saved", CHAT)
    assert (tmp_path / "saved").read_bytes() == made


def refused(native: NativeEngine, path: Path, words: str, data: bytes | None = None, code: int = USAGE) -> None:
    """Restoring is an error of one line, after which the engine continues with what it had."""
    if data is not None:
        path.write_bytes(data)
    native.call("reset")
    tokens = prompt(20, native.vocab_size)
    tokens += native.generate(tokens, max_tokens=5).tokens
    with pytest.raises(NativeError, match=words) as caught:
        native.restore(path)
    assert caught.value.code == code and "\n" not in str(caught.value)
    assert native.generate([*tokens, 1], max_tokens=3).cached_tokens == 24


def test_a_file_that_is_cut_or_longer(file: Path, native: NativeEngine) -> None:
    data = file.read_bytes()
    for length in (0, 7, 8, 191, 192, 255):
        refused(native, file, "not a saved chat.*expected a file that", data[:length])
    for length in (256, 320, 400, 1000, len(data) - DIGEST, len(data) - 1):
        refused(native, file, "damaged.*the length that its header states", data[:length])
    refused(native, file, "damaged.*the length that its header states", data + b"0")
    for place in (194, 330, 1000, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 1
        refused(native, file, "damaged.*expected the content that was written", bytes(damaged))


@pytest.mark.parametrize("name", HEADERS)
def test_a_changed_header(name: str, file: Path, native: NativeEngine) -> None:
    field, value, words = HEADERS[name]
    refused(native, file, words, changed(file.read_bytes(), field, value))


def test_the_length_is_checked_before_the_content(file: Path, native: NativeEngine, tiny_bundles: Bundles) -> None:
    hollow(file, 48 * read_manifest(tiny_bundles["q0f32"]).kv_bytes_per_token)
    began = time.process_time()
    refused(native, file, "bytes of states; found 51539607552")
    assert time.process_time() - began < 10  # to hash it takes a minute


def test_ids_beyond_the_vocabulary(file: Path, native: NativeEngine) -> None:
    for value in (-1, native.vocab_size, 2**31 - 1):
        content = bytearray(file.read_bytes()[:-DIGEST])
        content[HEADER + 80 : HEADER + 84] = value.to_bytes(4, "little", signed=True)
        refused(native, file, f"token ids from 0 to {native.vocab_size - 1}; found {value}", sealed(bytes(content)))


@pytest.mark.parametrize("chat", [[1], "text", {"a": "\ud800"}])
def test_a_chat_that_is_no_object(chat: object, native: NativeEngine, tiny_bundles: Bundles, tmp_path: Path) -> None:
    if not isinstance(chat, dict):
        refused(native, tmp_path / "made", "an object", by_hand(read_manifest(tiny_bundles["q0f32"]), chat=chat))
    with pytest.raises(NativeError, match="an object|the chat"):
        native.save(tmp_path / "new", json.dumps(chat).encode())
    assert not (tmp_path / "new").exists()


def test_a_context_that_is_too_short(
    file: Path, runtime: Runtime, tiny_bundles: Bundles, copy_of: Callable[[Path], Path]
) -> None:
    short = runtime.open(copy_of(tiny_bundles["q0f32"]), context_length=47)
    refused(short, file, "longer than the context.*at most 47 tokens; found 48.*larger context")
    runtime.open(copy_of(tiny_bundles["q0f32"]), context_length=48).restore(file)
    refused(runtime.open(copy_of(tiny_bundles["q4f16_1"])), file, "saved with another model")


def test_a_chat_that_is_not_wanted(file: Path, native: NativeEngine) -> None:
    with pytest.raises(NativeError) as caught:
        native.restore(file, wanted=False)
    assert caught.value.code == CANCELLED


def test_paths_that_are_no_chats(file: Path, native: NativeEngine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        refused(native, path, "cannot read the saved chat.*expected a regular file")
        with pytest.raises(NativeError, match="cannot read the saved chat.*expected a regular file"):
            native.save(path)
    refused(native, tmp_path / "none", "cannot read the saved chat.*No such file")
    with pytest.raises(NativeError, match="cannot be saved.*No such file"):
        native.save(tmp_path / "no" / "folder")
    for content in (b"", b"my thesis"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(NativeError, match="does not overwrite other files"):
            native.save(tmp_path / "other")
        assert (tmp_path / "other").read_bytes() == content


def test_links_and_what_a_killed_writer_left(file: Path, native: NativeEngine, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    (tmp_path / ".tiny.chat.partial-native").write_bytes(bytes(1 << 20))
    native.save(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink() and native.restore(file) == {"a": 1}
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["link", "tiny.chat"]


SAVE = """
import json, resource, sys
from pathlib import Path
from tests.native.engine import NativeError, Runtime
library, bundle, file = map(Path, sys.argv[1:4])
native = Runtime(library).open(bundle, threads=1)
native.generate(list(range(200)), max_tokens=2)
if len(sys.argv) > 4:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
try:
    native.save(file, {"messages": []})
except NativeError as error:
    print(error.code, error)
"""


def test_a_limit_of_file_sizes(file: Path, runtime: Runtime, tiny_bundles: Bundles) -> None:
    before = file.read_bytes()
    words = [sys.executable, "-c", SAVE, runtime.library._name, str(tiny_bundles["q0f32"]), str(file), "10000"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"{RESOURCE} not enough space on the disk in "), done.stdout + done.stderr
    assert file.read_bytes() == before


def test_a_writer_that_is_killed_and_a_full_disk(
    file: Path, native: NativeEngine, runtime: Runtime, tiny_bundles: Bundles, tmp_path: Path
) -> None:
    """At each of its calls that change the folder: the file is the old one or the new one, and can be written again."""
    command = [sys.executable, "-c", SAVE, runtime.library._name, str(tiny_bundles["q0f32"]), str(file)]
    places = [point for point in points(command, file.parent, tmp_path / "log") if file.name in point.text]
    after = file.read_bytes()
    assert {"openat", "write", "fsync", "rename"} <= {point.call for point in places}
    native.save(file, CHAT)
    before = file.read_bytes()
    for point in places:
        assert struck(command, point, "signal=KILL").returncode == -9
        assert file.read_bytes() in (before, after), point.text
        if point.call in ("write", "openat", "fsync"):
            file.unlink()
            native.save(file, CHAT)
            done = struck(command, point, "error=ENOSPC")
            assert done.stdout.startswith(f"{RESOURCE} the disk is full"), (point.text, done.stdout, done.stderr)
            assert file.read_bytes() == before
            assert [path.name for path in file.parent.iterdir() if "partial" in path.name] == []


def test_saving_while_it_answers(file: Path, native: NativeEngine) -> None:
    """From the callback and from another thread: refused, and the answer continues."""
    codes: list[int] = []

    def call(function: Callable[[Path], object]) -> None:
        try:
            function(file)
        except NativeError as error:
            codes.append(error.code)

    def on_token(token: int) -> int:
        for function in (native.save, native.restore):
            call(function)
            thread = threading.Thread(target=call, args=(function,))
            thread.start()
            thread.join()
        return 0

    tokens = prompt(20, native.vocab_size)
    expected = native.generate(tokens, DRAWN, max_tokens=4).tokens
    assert native.generate(tokens, DRAWN, max_tokens=4, on_token=on_token).tokens == expected
    assert codes == [USAGE] * 16


def test_a_closed_engine(file: Path, native: NativeEngine) -> None:
    native.close()
    for function in (native.save, native.restore):
        with pytest.raises(NativeError, match="no such engine"):
            function(file)
