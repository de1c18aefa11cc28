from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.streaming import MAX_RUN_BYTES, StopMatcher, TextStream
from mlcpipe.runtime.text.tokenizer import Tokenizer

SEED = 20260301
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder, generation_config={}, config={})


def run(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), eos: Sequence[int] = ()) -> list[str]:
    """The texts of every push, then of the flush."""
    stream = TextStream(tokenizer, stop, eos)
    return [*(stream.push(index) for index in ids), stream.flush()]


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first (the longest of those that end together)."""
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return None
    end, length = min(ends)
    return text[: end + length]


@pytest.fixture
def tokenizer(folders: dict[str, Path], family: str) -> Tokenizer:
    return load(folders[family])


def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer, corpus: list[str]) -> None:
    for text in [*corpus, "  two spaces first", " ", "\n", "x"]:
        ids = tokenizer.encode(text)
        pieces = run(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)


def test_random_tokens_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    """Broken UTF-8, special tokens, unknown ids and byte tokens in any order."""
    draw = random.Random(SEED)
    compared = 0
    for _ in range(400):
        ids = [draw.randrange(tokenizer.vocab_size + 5) for _ in range(draw.randrange(30))]
        assert "".join(run(tokenizer, ids)) == tokenizer.decode(ids), ids
        compared += len(ids)
    assert compared > 4000


def test_no_push_shows_half_a_character(folders: dict[str, Path], corpus: list[str]) -> None:
    for name in ("byte-level", "byte-fallback-llama", "byte-fallback-gemma"):
        tokenizer = load(folders[name])
        for text in corpus:
            assert all(REPLACEMENT not in piece for piece in run(tokenizer, tokenizer.encode(text)))


def test_text_is_shown_as_soon_as_it_is_certain(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["byte-level"])
    ids = tokenizer.encode("The quick brown fox jumps")
    pieces = run(tokenizer, ids)
    assert all(pieces[:-1]) and pieces[-1] == ""


def test_byte_runs_in_random_order(folders: dict[str, Path]) -> None:
    """Runs of byte tokens, valid and not, shorter than the length up to which they wait."""
    draw = random.Random(SEED)
    tokenizer = load(folders["byte-fallback-llama"])
    start = tokenizer.encode("ꙮ")[-1] - "ꙮ".encode()[-1]
    word = tokenizer.encode("fox")[-1]
    for _ in range(500):
        ids: list[int] = []
        for _ in range(draw.randrange(6)):
            data = bytearray(draw.choice(["é", "🎉", "ꙮ龘", "\n", "aé𓀀"]).encode() * draw.randrange(1, 4))
            if draw.random() < 0.5:
                data[draw.randrange(len(data))] = draw.randrange(256)
            ids += [start + byte for byte in data] + [word] * draw.randrange(2)
            if draw.random() < 0.2:
                ids.append(3)  # a special token does not end a run
        long = max(len(part) for part in bytes(i - start if i != word else 0 for i in ids if i != 3).split(b"\0"))
        if long < MAX_RUN_BYTES:
            assert "".join(run(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_a_long_run_is_shown_before_it_ends(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["byte-fallback-gemma"])
    start = tokenizer.encode("ꙮ")[-1] - "ꙮ".encode()[-1]
    text = "𓀀ꙮ" * 40
    pieces = run(tokenizer, [start + byte for byte in text.encode()])
    assert "".join(pieces) == text == tokenizer.decode([start + byte for byte in text.encode()])
    assert not any(pieces[: MAX_RUN_BYTES - 1]) and pieces[-1] == ""
    assert sum(map(bool, pieces)) > 60
    # Broken later on: what was shown stays, each byte after it is replaced, as the library does with all of them.
    pieces = run(tokenizer, [start + byte for byte in text.encode() + b"\xff\xc3"])
    assert "".join(pieces) == text + 2 * REPLACEMENT
    # Broken before anything was shown: exactly the library's text.
    ids = [start + byte for byte in b"\xff" + text.encode()]
    assert "".join(run(tokenizer, ids)) == tokenizer.decode(ids)


def test_stop_strings_cut_the_decoded_text(tokenizer: Tokenizer, corpus: list[str]) -> None:
    draw = random.Random(SEED)
    stopped = 0
    for _ in range(300):
        text = draw.choice(corpus) + draw.choice(corpus)
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        if not whole:
            continue  # only unknown words
        stops = []
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(whole))
            stop = whole[at : at + draw.randrange(1, 9)]
            stops.append(stop if draw.random() < 0.6 else stop + "§")
        stream = TextStream(tokenizer, stops)
        shown = ""
        for index in ids:
            shown += stream.push(index)
            assert whole.startswith(shown)
            if stream.stopped is None:
                # Never a character that a stop string could still take back.
                assert not any(shown.endswith(stop) for stop in stops)
        shown += stream.flush()
        expected = first_stop(whole, stops)
        assert shown == (whole if expected is None else expected), (stops, whole)
        assert stream.stopped == (None if expected is None else "stop")
        stopped += expected is not None
    assert 100 < stopped < 300


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["###"], "a##b###c", "a##b"),
        (["aab"], "aaaab", "aa"),
        (["abcd", "bc"], "xabcd", "xa"),
        (["bc", "abc"], "xabc", "x"),
        (["abab", "ba"], "abab", "a"),
        (["he", "she", "hers"], "ushers", "u"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["🎉é"], "🎉🎉éx", "🎉"),
        (["x"], "x", ""),
        (["zz"], "az", "az"),
    ],
)
def test_overlapping_stop_strings_one_character_at_a_time(stops: list[str], text: str, shown: str) -> None:
    for cut in (1, 2, len(text)):
        matcher, out = StopMatcher(stops), ""
        for at in range(0, len(text), cut):
            piece, found = matcher.push(text[at : at + cut])
            out += piece
            if found:
                break
        else:
            out += matcher.flush()
        assert out == shown


def test_only_the_longest_possible_start_of_a_stop_is_held() -> None:
    matcher = StopMatcher(["abcabd"])
    assert matcher.push("xabcab") == ("x", False)
    assert matcher.push("c") == ("abc", False)  # "abc" may begin again
    assert matcher.push("ab") == ("", False)
    assert matcher.push("d") == ("", True)


def test_random_stops_match_a_search_over_the_whole_text() -> None:
    draw = random.Random(SEED)
    for _ in range(2000):
        text = "".join(draw.choice("ab") for _ in range(draw.randrange(25)))
        stops = ["".join(draw.choice("ab") for _ in range(draw.randrange(1, 6))) for _ in range(draw.randrange(1, 4))]
        matcher, out, at = StopMatcher(stops), "", 0
        found = False
        while at < len(text) and not found:
            step = draw.randrange(1, 5)
            piece, found = matcher.push(text[at : at + step])
            out, at = out + piece, at + step
        expected = first_stop(text, stops)
        assert found == (expected is not None)
        assert (out if found else out + matcher.flush()) == (text if expected is None else expected)


def test_an_end_token_stops_and_gives_the_held_text(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["byte-level"])
    end = 2
    stream = TextStream(tokenizer, ["dog. And"], [end])
    shown = "".join(stream.push(index) for index in tokenizer.encode("the lazy dog."))
    assert shown == "the lazy " and stream.stopped is None
    assert stream.push(end) == "dog." and stream.stopped == "stop"
    assert stream.flush() == "" and stream.push(end) == ""


def test_an_end_token_after_half_a_character(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["byte-level"])
    ids = tokenizer.encode("🦖")
    stream = TextStream(tokenizer, eos_ids=[2])
    assert [stream.push(index) for index in ids[:2]] == ["", ""]
    assert stream.push(2) == REPLACEMENT == tokenizer.decode(ids[:2])


def test_text_that_continues_a_prompt_keeps_its_first_space(folders: dict[str, Path]) -> None:
    for name in ("metaspace-always", "byte-fallback-llama"):
        tokenizer = load(folders[name])
        ids = tokenizer.encode("lazy dog")
        for continues, expected in ((False, "lazy dog"), (True, " lazy dog")):
            stream = TextStream(tokenizer, continues=continues)
            assert "".join(stream.push(index) for index in ids) + stream.flush() == expected


@pytest.mark.parametrize("stop", [[""], ["a", ""], [None]])
def test_empty_stop_strings_are_refused(folders: dict[str, Path], stop: list[str]) -> None:
    with pytest.raises(UsageError, match="stop"):
        TextStream(load(folders["byte-level"]), stop)


def test_the_cost_of_a_token_does_not_grow_with_the_text(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["byte-level"])
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog, ") * 400
    stream = TextStream(tokenizer, ["\n\nUser:", "</s>"], [2])

    def seconds(part: list[int]) -> float:
        started = time.thread_time()
        for index in part:
            stream.push(index)
        return time.thread_time() - started

    tenth = len(ids) // 10
    seconds(ids[:tenth])
    times = [seconds(ids[at * tenth : (at + 1) * tenth]) for at in range(10)]
    assert min(times[5:]) < 5 * min(times[:5])
    # some microseconds: little more than the library takes for a token's text alone
    started = time.thread_time()
    for index in ids[:tenth]:
        tokenizer.decode([index])
    assert min(times) < 10 * (time.thread_time() - started)
