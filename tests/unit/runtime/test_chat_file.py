"""A saved conversation continues as if it had not been interrupted; a file that is not right changes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.runtime.chat_file import MAX_CHAT_BYTES
from mlcpipe.support import disk as disk_module
from tests.chat_files import CHAT, DIGEST, FIELDS, HEADER, HEADERS, by_hand, changed, hollow, sealed
from tests.conftest import QUICK, Bundles, TinyLlama, write_llama
from tests.unit.runtime.conftest import edit_manifest


def prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def talked(engine: Engine, length: int = 37) -> list[int]:
    """A prompt and its answer, whose last token is not computed yet."""
    engine.reset()
    tokens = prompt(length, engine.vocab_size)
    return tokens + engine.generate(tokens, max_tokens=12, sampling=SamplingParams(seed=1), ignore_eos=True).token_ids


def answers(engine: Engine, tokens: list[int]) -> tuple[list[int], int]:
    """A sampled continuation of `tokens`, and how many of these were in the cache."""
    tokens = tokens + prompt(5, engine.vocab_size, 1)
    done = engine.generate(tokens, max_tokens=40, sampling=SamplingParams(seed=2), ignore_eos=True)
    assert done.stats is not None
    return done.token_ids, done.stats.cached_tokens


def goes_on(engine: Engine, other: Engine, path: Path, length: int = 37) -> None:
    """What one engine saves the other continues, with the same tokens as without."""
    tokens = talked(engine, length)
    engine.save(path, chat=CHAT)
    expected = answers(engine, tokens)
    assert expected[1] == len(tokens) - 1
    other.reset()
    assert other.load(path) == CHAT
    assert answers(other, tokens) == expected


@pytest.fixture
def file(tiny: Engine, tmp_path: Path) -> Path:
    """A chat of 48 tokens of the random model, three full pages."""
    talked(tiny)
    tiny.save(tmp_path / "tiny.chat", chat=CHAT)
    return tmp_path / "tiny.chat"


@pytest.mark.parametrize("length", [36, 37, 38, 300])
def test_the_next_turn_computes_what_is_new(length: int, demo: Engine, demo_bundles: Bundles, tmp_path: Path) -> None:
    """In another engine, whose context is shorter; the ends of pages on both sides."""
    other = Engine(demo_bundles["q4f16_1"], context_length=400, threads=1)
    goes_on(demo, other, tmp_path / "demo.chat", length)


@pytest.mark.full
@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "q8"])
def test_every_dtype_of_the_cache(kv_cache_dtype: str, tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(head_dim=32))
    bundle = mlcpipe.compile(
        checkpoint, target=QUICK, quantization="q0f32", kv_cache_dtype=kv_cache_dtype, output=tmp_path / "bundle"
    )
    engine = Engine(bundle, threads=2)
    goes_on(engine, Engine(bundle, threads=1), tmp_path / "chat")
    tokens = talked(engine, 24)  # 35 are computed: the third page has 3
    engine.save(tmp_path / "used")
    talked(engine, 90)
    assert engine.load(tmp_path / "used") is None
    other = Engine(bundle, threads=2)
    other.generate(tokens[:24], max_tokens=12, sampling=SamplingParams(seed=1), ignore_eos=True)
    other.save(tmp_path / "fresh")
    engine.save(tmp_path / "again")
    assert (tmp_path / "used").read_bytes() == (tmp_path / "fresh").read_bytes() == (tmp_path / "again").read_bytes()


def test_what_other_chats_left_is_not_saved(tiny: Engine, tmp_path: Path) -> None:
    """Places of the last page that have no token are 0, whatever was in them: of 21 tokens 11 of 16."""
    files = []
    for length in (200, 20):
        talked(tiny, length)
        talked(tiny, 10)
        tiny.save(tmp_path / str(length))
        files.append((tmp_path / str(length)).read_bytes())
    assert files[0] == files[1]
    size = tiny.manifest.states[-1].unit_bytes
    last = files[0][-DIGEST - size : -DIGEST]
    assert last.count(0) / size == pytest.approx(11 / 16, abs=0.02)


def test_a_file_made_by_hand(tiny: Engine, tmp_path: Path) -> None:
    """Version 2 stays readable: a file by the docstring's words loads, and is what saving it again writes."""
    made = by_hand(tiny.manifest)
    (tmp_path / "made").write_bytes(made)
    assert tiny.load(tmp_path / "made") == CHAT
    assert tiny.model.tokens == list(range(100, 132)) and tiny.model.prompt_tokens == 30
    tiny.save(tmp_path / "saved", chat=CHAT)
    assert (tmp_path / "saved").read_bytes() == made


def test_an_engine_without_tokens(tiny: Engine, tmp_path: Path) -> None:
    tiny.reset()
    tiny.save(tmp_path / "empty")
    tokens = talked(tiny)
    assert tiny.load(tmp_path / "empty") is None
    assert answers(tiny, tokens)[1] == 0


def test_the_size_is_known_before(file: Path, tiny: Engine) -> None:
    text = len(json.dumps(CHAT, ensure_ascii=False).encode())
    begin = -(-(HEADER + 4 * 48 + text) // 64) * 64
    assert file.stat().st_size == begin + 48 * tiny.manifest.kv_bytes_per_token + DIGEST


# ---- files that are refused


def refused(engine: Engine, path: Path, words: str, data: bytes | None = None) -> None:
    """Loading a file is an error of one line, after which the engine continues with what it had."""
    if data is not None:
        path.write_bytes(data)
    tokens = talked(engine, 20)
    expected = answers(engine, tokens)
    talked(engine, 20)
    with pytest.raises(UsageError, match=words) as caught:
        engine.load(path)
    assert "\n" not in str(caught.value)
    assert answers(engine, tokens) == expected and expected[1] == len(tokens) - 1


def test_a_file_that_is_cut_or_longer(file: Path, tiny: Engine) -> None:
    data = file.read_bytes()
    page = len(data) - DIGEST - 3 * tiny.manifest.states[-1].unit_bytes
    for length in (0, 7, 8, 191, 192, 255):
        refused(tiny, file, "not a saved chat.*expected a file that /save or Engine.save wrote", data[:length])
    for length in (256, 320, 400, page, page - 1, len(data) - DIGEST, len(data) - 1):
        refused(tiny, file, "damaged.*the length that its header states", data[:length])
    refused(tiny, file, "damaged.*the length that its header states", data + b"0")


def test_a_bit_that_flips(file: Path, tiny: Engine) -> None:
    data = file.read_bytes()
    for place in (194, 330, 1000, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 1
        refused(tiny, file, "damaged.*expected the content that was written", bytes(damaged))


@pytest.mark.parametrize("name", HEADERS)
def test_a_changed_header(name: str, file: Path, tiny: Engine) -> None:
    field, value, words = HEADERS[name]
    refused(tiny, file, words, changed(file.read_bytes(), field, value))


def test_another_number_of_bytes_of_states_and_all_of_them(file: Path, tiny: Engine) -> None:
    nbytes = 48 * tiny.manifest.kv_bytes_per_token
    data = changed(file.read_bytes(), "state_bytes", nbytes + 100)[:-DIGEST]
    refused(tiny, file, f"expected {nbytes} bytes of states; found {nbytes + 100}", sealed(data + bytes(100)))


def test_the_length_is_checked_before_the_content(file: Path, tiny: Engine) -> None:
    """To map so much takes the address space; to hash it takes a minute, in which Ctrl-C waits."""
    hollow(file, 48 * tiny.manifest.kv_bytes_per_token)
    began = time.process_time()
    refused(tiny, file, "bytes of states; found 51539607552")
    assert time.process_time() - began < 10


def test_ids_beyond_the_vocabulary(file: Path, tiny: Engine) -> None:
    for value in (-1, tiny.vocab_size, 2**31 - 1):
        content = bytearray(file.read_bytes()[:-DIGEST])
        struct.pack_into("<i", content, HEADER + 4 * 20, value)
        refused(tiny, file, f"token ids from 0 to {tiny.vocab_size - 1}; found", sealed(bytes(content)))


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_a_chat_that_is_no_json(text: bytes, file: Path, tiny: Engine) -> None:
    data = file.read_bytes()
    begin = HEADER + 4 * 48 + len(text)
    content = (
        data[: HEADER + 4 * 48]
        + text
        + bytes(-begin % 64)
        + data[-DIGEST - 48 * tiny.manifest.kv_bytes_per_token : -DIGEST]
    )
    damaged = bytearray(content)
    struct.pack_into("<Q", damaged, FIELDS["chat_bytes"][0], len(text))
    refused(tiny, file, "JSON|UTF-8|duplicate", sealed(bytes(damaged)))


def test_more_tokens_than_the_context(file: Path, tiny_bundles: Bundles) -> None:
    short = Engine(tiny_bundles["q0f32"], context_length=47, threads=1)
    with pytest.raises(UsageError, match="longer than the context.*at most 47 tokens; found 48.*larger context"):
        short.load(file)
    Engine(tiny_bundles["q0f32"], context_length=48, threads=1).load(file)


def test_another_quantization_and_another_checkpoint(
    file: Path, tiny_bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="saved with another model"):
        Engine(tiny_bundles["q4f16_1"], threads=1).load(file)
    bundle = Path(shutil.copytree(tiny_bundles["q0f32"], tmp_path / "bundle"))
    edit_manifest(bundle, lambda manifest: manifest.update(checkpoint_hash="0" * 64))
    with pytest.raises(UsageError, match="saved with another model"):
        Engine(bundle, threads=1).load(file)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path), lambda path: None])
def test_what_is_no_file(make: Callable[[Path], Any], tiny: Engine, tmp_path: Path) -> None:
    make(tmp_path / "thing")
    refused(tiny, tmp_path / "thing", "(cannot read|missing) saved chat")


# ---- saving


def test_other_files_are_not_overwritten(file: Path, tiny: Engine, tmp_path: Path) -> None:
    for content in (b"", b"my thesis", b"mlcchat\x02"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(UsageError, match="does not overwrite other files"):
            tiny.save(tmp_path / "other")
        assert (tmp_path / "other").read_bytes() == content
    tiny.save(file)  # one that was saved may be replaced
    with pytest.raises(UsageError, match="cannot read saved chat.*a folder"):
        tiny.save(tmp_path)
    for path in (tmp_path / "no" / "folder", Path("a\0b")):
        with pytest.raises(UsageError, match="cannot be saved"):
            tiny.save(path)


@pytest.mark.parametrize("chat", [{"a": {1}}, {"a": float("nan")}, {"a": "\ud800"}, {"a": "b" * MAX_CHAT_BYTES}])
def test_a_chat_that_cannot_be_written(chat: dict[str, Any], tiny: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the chat to save"):
        tiny.save(tmp_path / "chat", chat=chat)
    assert not list(tmp_path.iterdir())


def test_a_full_disk(file: Path, tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says so, and one that fills up meanwhile: the old file stays."""
    before = file.read_bytes()
    usage = shutil.disk_usage(file)
    monkeypatch.setattr(disk_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError, match="not enough space on the disk"):
        tiny.save(file)
    monkeypatch.undo()
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: real(Path("/dev/full") if mode == "wb" else path, mode))
    with pytest.raises(ResourceError, match="the disk is full"):
        tiny.save(file)
    assert [path.name for path in file.parent.iterdir()] == [file.name] and file.read_bytes() == before


def test_another_thread_that_computes(file: Path, tiny: Engine) -> None:
    """Who saves or loads meanwhile gets a turn between two steps, and changes nothing of the answer."""
    tokens = prompt(30, tiny.vocab_size)
    expected = tiny.generate(tokens, max_tokens=40, sampling=SamplingParams(seed=4), ignore_eos=True).token_ids
    found: list[int] = []

    def answer() -> None:
        found.extend(tiny.generate(tokens, max_tokens=40, sampling=SamplingParams(seed=4), ignore_eos=True).token_ids)

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(10):
        tiny.load(file)
        tiny.save(file)
    thread.join()
    assert found == expected


def test_between_the_chunks_of_an_answer(tiny: Engine, tmp_path: Path) -> None:
    """Saving changes nothing; after loading, the answer continues as if it had not been disturbed."""
    tokens = prompt(30, tiny.vocab_size)
    params = SamplingParams(seed=4)
    expected = tiny.generate(tokens, max_tokens=20, sampling=params, ignore_eos=True).token_ids
    found = []
    for chunk in tiny.generate(tokens, max_tokens=20, sampling=params, ignore_eos=True, stream=True):
        found += chunk.token_ids
        if len(found) == 5:
            tiny.save(tmp_path / "chat")
        if len(found) == 9:
            tiny.load(tmp_path / "chat")
    assert found == expected
