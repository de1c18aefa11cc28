"""A tiny Whisper against transformers: rows, logits, and what it writes of sounds of several windows."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference is computed by torch")
pytest.importorskip("transformers", reason="the reference is a transformers model")

import torch

import mlcpipe
from mlcpipe import SpeechParams, Transcriber
from mlcpipe.cli import main
from mlcpipe.errors import TargetError, UsageError
from mlcpipe.runtime.speech.decoding import Limits
from mlcpipe.runtime.speech.formats import FORMATS
from mlcpipe.runtime.speech.hearing import Stopped
from tests.models import hearing

TOLERANCE = 1e-4
NEVER_WRONG = Limits(None, None, None)
GREEDY = SpeechParams(language="de", temperatures=(0.0,), carry_on=False, limits=NEVER_WRONG)


class Tiny(NamedTuple):
    """The model in both."""

    bundle: Path
    ours: Transcriber
    theirs: Any


@pytest.fixture(scope="module")
def tiny(shared: Path) -> Tiny:
    bundle = hearing.compiled(shared)
    return Tiny(bundle, Transcriber(bundle), hearing.model())


def features(samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    made = hearing.extractor()(
        samples, sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest",
        return_attention_mask=True,
    )  # fmt: skip
    return made["input_features"], made["attention_mask"]


@torch.no_grad()
def test_rows_and_logits_of_each_step(tiny: Tiny) -> None:
    ours, theirs, info = tiny.ours.hearing, tiny.theirs, tiny.ours.info
    found, _ = features(hearing.sound(2.0))
    rows = ours.listen(found[0].numpy().T)
    expected = theirs.model.encoder(found).last_hidden_state[0].numpy()
    np.testing.assert_allclose(rows, expected, atol=TOLERANCE)
    ids = [info.start, info.languages["de"], info.transcribe, info.timestamps + 3, *range(40, 62), info.timestamps + 40]
    logits = theirs(input_features=found, decoder_input_ids=torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(ours.begin(ids, range(8)), logits[:8], atol=TOLERANCE)
    np.testing.assert_allclose(ours.begin(ids[:4], [3]), logits[3:4], atol=TOLERANCE)
    ours.begin_others(ids[:4], 1, 3)
    for place in range(4, len(ids)):
        both = ours.decode([2, 0], [ids[place], ids[place]], place)
        np.testing.assert_allclose(both, np.repeat(logits[place : place + 1], 2, 0), atol=TOLERANCE)


@pytest.mark.parametrize(("seconds", "seed"), [(1.7, 0), (5.3, 1), (5.3, 2), (3.9, 3)])
@torch.no_grad()
def test_windows_are_those_of_transformers(tiny: Tiny, seconds: float, seed: int) -> None:
    """To the last segment of a window transformers adds the time after it, which the published program does not."""
    samples = hearing.sound(seconds, seed)
    found, mask = features(samples)
    expected = tiny.theirs.generate(
        found, attention_mask=mask, return_timestamps=True, return_segments=True, language="de", task="transcribe",
        max_new_tokens=32,
    )["segments"][0]  # fmt: skip
    heard = [found for _, segments, _ in tiny.ours.heard(samples, GREEDY) for found in segments]
    assert len(heard) == len(expected) > seconds / 2 - 1
    for ours, theirs in zip(heard, expected):
        tokens = theirs["tokens"].tolist()
        if len(tokens) > 2 and min(tokens[-2:]) >= tiny.ours.info.timestamps:
            tokens.pop()
        wordless = ours.end == ours.start or not ours.text.strip()
        assert list(ours.tokens) == ([] if wordless else tokens)
        assert (ours.start, ours.end) == pytest.approx((float(theirs["start"]), float(theirs["end"])))


@torch.no_grad()
def test_the_language_is_the_one_of_transformers(tiny: Tiny) -> None:
    names = {tiny.ours.info.languages[code]: code for code in hearing.LANGUAGES}
    for seed in range(6):
        samples = hearing.sound(2.0, seed)
        expected = int(tiny.theirs.detect_language(features(samples)[0])[0])
        assert tiny.ours.detect_language(samples) == names[expected]


def test_text_of_earlier_windows_is_carried_on(tiny: Tiny) -> None:
    """The second window's prompt has the tokens of the first one, and a cold answer's only."""
    prompts: list[list[int]] = []
    begin = tiny.ours.hearing.begin
    samples = hearing.sound(3.9, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.ours.hearing, "begin", lambda ids, rows: prompts.append(list(ids)) or begin(ids, rows))
        parts = [segments for _, segments, _ in tiny.ours.heard(
            samples, SpeechParams(language="en", temperatures=(0.0,), limits=NEVER_WRONG, prompt="a sea"))]  # fmt: skip
    info, first = tiny.ours.info, [token for one in parts[0] for token in one.tokens]
    own = tiny.ours.tokenizer.encode(" a sea")
    task = [info.start, info.languages["en"], info.transcribe]
    assert prompts[0] == [info.previous, *own, *task]
    assert prompts[1] == [info.previous, *[*own, *first][-31:], *task]


def test_a_window_ends_where_nobody_waits(tiny: Tiny) -> None:
    samples, calls = hearing.sound(3.9, 3), 0

    def stopped() -> bool:
        nonlocal calls
        calls += 1
        return calls > 5

    with pytest.raises(Stopped):
        list(tiny.ours.heard(samples, GREEDY, stopped=stopped))
    assert calls == 6
    assert len(list(tiny.ours.heard(samples, GREEDY))) > 1


def test_an_answer_that_looks_wrong_is_drawn_again(tiny: Tiny) -> None:
    samples = hearing.sound(1.7)
    improbable = SpeechParams(language="de", temperatures=(0.0, 0.4, 0.8), limits=Limits(None, 0.0, None), best_of=3)
    first = tiny.ours.transcribe(samples, improbable)
    assert {one.temperature for one in first.segments} == {0.8}
    assert tiny.ours.transcribe(samples, improbable) == first
    repeats = SpeechParams(language="de", temperatures=(0.0, 1.0), limits=Limits(1e-9, None, None), best_of=1)
    drawn = {tuple(tiny.ours.transcribe(samples, SpeechParams(**vars(repeats) | {"seed": seed})).segments)
             for seed in range(3)}  # fmt: skip
    assert len(drawn) > 1
    silent = SpeechParams(language="de", limits=Limits(None, None, -1.0))
    assert tiny.ours.transcribe(samples, silent).segments == ()


def test_commands(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("av", reason="files are decoded by PyAV, of the extra sound")
    samples = hearing.sound(3.9, 3)
    with wave.open(str(tmp_path / "sea.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    expected = tiny.ours.transcribe(tmp_path / "sea.wav", SpeechParams(language="de"))
    arguments = ["transcribe", str(tmp_path / "sea.wav"), "--model", str(tiny.bundle), "--language", "German"]
    for form, write in FORMATS.items():
        assert main([*arguments, "--format", form]) == 0
        assert capsys.readouterr().out == write(expected)
    assert main([*arguments, "--task", "translate", "--format", "verbose_json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "translate"
    assert main(["inspect", str(tiny.bundle)]) == 0
    assert "windows of 2 s, 16 bands; 3 languages" in capsys.readouterr().out
    (tmp_path / "ggml-base.bin").write_bytes(b"lmgg" + bytes(100))
    for wrong, message in (
        (["transcribe", str(tmp_path / "none.wav"), "--model", str(tiny.bundle)], "no file of sound"),
        ([*arguments, "--language", "tlh"], "one that the model knows, such as en, zh, de"),
        ([*arguments, "--temperature", "3"], "temperature; expected from 0 to 1"),
        (["transcribe", str(tmp_path / "ggml-base.bin"), "--model", str(tiny.bundle)], "is a model of GGML"),
        (["transcribe", str(tmp_path / "sea.wav"), "--model", str(tmp_path / "ggml-base.bin")], "whisper.cpp"),
        (["bench", str(tiny.bundle)], "turns sound into text"),
        (["embed", str(tiny.bundle), "a"], "turns sound into text"),
        (["serve", str(tiny.bundle), "--port", "0", "--sequences", "2"], "--sequences has no effect"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_other_targets_and_other_uses_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint = tiny.bundle.parent / "checkpoint"
    with pytest.raises(TargetError, match="no speech"):
        mlcpipe.compile(checkpoint, target="webgpu", output=tmp_path / "web")
    with pytest.raises(UsageError, match="turns sound into text"):
        mlcpipe.Engine(tiny.bundle)
    with pytest.raises(UsageError, match="embeds no texts"):
        mlcpipe.Embedder(tiny.bundle)
