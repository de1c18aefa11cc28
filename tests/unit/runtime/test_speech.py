"""Rules about timestamps and pieces of a window against transformers' code; forms of transcripts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from mlcpipe.bundle.model_info import SpeechInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.speech.decoding import Heard, Limits, compression_ratio, rising
from mlcpipe.runtime.speech.formats import FORMATS
from mlcpipe.runtime.speech.languages import language_code
from mlcpipe.runtime.speech.rules import TokenRules
from mlcpipe.runtime.speech.segments import pieces_of
from mlcpipe.runtime.speech.transcriber import Segment, Transcript

END, NO_TIMES, FIRST, VOCAB = 50, 59, 60, 90
STATE = {"name": "s", "kind": "pages", "parts": ({"name": "keys", "dtype": "int8", "shape": (16,), "token_axis": 0},),
         "layers": (0,)}  # fmt: skip
INFO = SpeechInfo.model_validate(
    {"features": "log_mel", "mels": 16, "rows": 15, "languages": {"en": 52}, "start": 51, "end": END, "transcribe": 54,
     "translate": 53, "no_timestamps": NO_TIMES, "timestamps": FIRST, "suppressed": (3, 51, 53, 54),
     "suppressed_first": (7, END), "latest_start": 9, "encoder": (STATE,), "sound": (STATE,)}
)  # fmt: skip


def test_rules_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch", reason="the reference is in torch")
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=9
    )
    times = logits_process.WhisperTimeStampLogitsProcessor(config, begin_index=2)
    never = logits_process.SuppressTokensLogitsProcessor([3, 51, 53, 54])
    never_first = logits_process.SuppressTokensAtBeginLogitsProcessor([7, END], 2)
    rng, rules, kinds = np.random.default_rng(0), TokenRules(INFO, timestamps=True), set()
    for _ in range(400):
        answer: list[int] = []
        for _ in range(int(rng.integers(0, 7))):
            low = max([one for one in answer if one >= FIRST], default=FIRST)
            answer.append(int(rng.integers(low, VOCAB)) if rng.random() < 0.5 else int(rng.integers(0, END)))
        logits = rng.standard_normal(VOCAB).astype(np.float32) * 2
        ids, expected = torch.tensor([[51, 54, *answer]]), torch.tensor(logits)[None]
        for process in (never, never_first, times):
            expected = process(ids, expected)
        rules.apply(logits, answer)
        np.testing.assert_array_equal(logits, expected[0].numpy())
        kinds.add((len(answer) > 0 and answer[-1] >= FIRST, bool(np.isinf(logits[:FIRST]).all())))
    assert len(kinds) == 4  # after text and after times, a time as the only choice and not


@pytest.mark.parametrize(
    ("tokens", "pieces", "step"),
    [
        ([60, 1, 2], [(2.0, 2.3)], 30),
        ([60, 1, 70], [(2.0, 2.2)], 30),
        ([60, 1, 66, 66, 2], [(2.0, 2.12)], 12),
        ([60, 1, 66, 66, 2, 70], [(2.0, 2.12), (2.12, 2.2)], 30),
        ([60, 1, 66, 67, 2, 70, 70], [(2.0, 2.12), (2.14, 2.2)], 20),
        ([1, 2, 3], [(2.0, 2.3)], 30),
        ([], [(2.0, 2.3)], 30),
    ],
)
def test_pieces_follow_the_times(tokens: list[int], pieces: list[tuple[float, float]], step: int) -> None:
    found, frames = pieces_of(tokens, FIRST, 200, 30)
    assert [(one.start, one.end) for one in found] == [pytest.approx(one) for one in pieces]
    assert frames == step
    assert [token for one in found for token in one.tokens] == tokens[: sum(len(one.tokens) for one in found)]


def heard(logprob: float, ratio: float = 1.0, silence: float = 0.0) -> Heard:
    return Heard((), 0.0, logprob, ratio, silence)


def test_answers_that_are_wrong_and_silence() -> None:
    limits = Limits()
    assert limits.is_wrong(heard(-1.1)) and limits.is_wrong(heard(-0.1, 2.5)) and not limits.is_wrong(heard(-0.9, 2.3))
    assert not limits.is_wrong(heard(-1.1, 3.0, 0.7))
    assert limits.is_silence(heard(-1.1, silence=0.7)) and not limits.is_silence(heard(-0.9, silence=0.7))
    assert not limits.is_silence(heard(-1.1, silence=0.5))
    assert not Limits(None, None, None).is_wrong(heard(-9, 9)) and Limits(no_speech=0.1, logprob=None).is_silence(
        heard(0, silence=0.2)
    )
    assert compression_ratio("la " * 100) > 2.4 > compression_ratio("the wind is cold and far")
    assert rising(0) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0) and rising(0.5) == (0.5, 0.7, 0.9) and rising(1) == (1.0,)
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="from 0 to 1"):
            rising(wrong)


def test_languages_have_codes_names_and_locales() -> None:
    given = ("en", "German", "en-US", "castilian", "haitian creole", "pt_BR", "klingon")
    assert [language_code(one) for one in given] == ["en", "de", "en", "es", "ht", "pt", "klingon"]


TEXTS = ((" The sea.", 0.0, 1.5), ("", 1.5, 1.5), (" Wind -->\nfar", 59.9996, 61.25), (" Old", 3599.9, 3661.007))
TRANSCRIPT = Transcript(
    "transcribe", "de", 3661.5, "The sea. Wind far Old",
    tuple(Segment(i, 0, start, end, text, (60, 1, 61), 0.0, -0.5, 1.25, 0.125) for i, (text, start, end) in enumerate(TEXTS)),
)  # fmt: skip


def test_subtitles_and_text() -> None:
    assert FORMATS["txt"](TRANSCRIPT) == "The sea. Wind far Old\n"
    assert FORMATS["srt"](TRANSCRIPT) == (
        "1\n00:00:00,000 --> 00:00:01,500\nThe sea.\n\n"
        "2\n00:01:00,000 --> 00:01:01,250\nWind -> far\n\n"
        "3\n00:59:59,900 --> 01:01:01,007\nOld\n\n"
    )
    assert FORMATS["vtt"](TRANSCRIPT) == (
        "WEBVTT\n\n00:00.000 --> 00:01.500\nThe sea.\n\n01:00.000 --> 01:01.250\nWind -> far\n\n"
        "59:59.900 --> 01:01:01.007\nOld\n\n"
    )


def test_json_is_openais() -> None:
    assert json.loads(FORMATS["json"](TRANSCRIPT)) == {"text": "The sea. Wind far Old"}
    found = json.loads(FORMATS["verbose_json"](TRANSCRIPT))
    assert (found["language"], found["duration"], found["task"]) == ("german", 3661.5, "transcribe")
    assert found["segments"][2] == {
        "id": 2, "seek": 0, "start": 60.0, "end": 61.25, "text": " Wind -->\nfar", "tokens": [60, 1, 61],
        "temperature": 0.0, "avg_logprob": -0.5, "compression_ratio": 1.25, "no_speech_prob": 0.125,
    }  # fmt: skip
