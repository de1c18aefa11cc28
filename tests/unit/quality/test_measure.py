"""Measurements of the random model's bundles: the figures from saved logits, what is written, what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mlcpipe import Engine
from mlcpipe.bundle import read_manifest, write_manifest
from mlcpipe.bundle.origin import SIGNATURE, accept, origin_of
from mlcpipe.errors import ComputeError, ResourceError, UsageError
from mlcpipe.host.memory import FreeMemory
from mlcpipe.quality import measure as module
from mlcpipe.quality.measure import OWN_TEXT, QualityOptions, measure, record
from mlcpipe.quality.reference import prepare_reference
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.defaults import QUALITY_TOKENS
from mlcpipe.support.progress import SilentProgress

if TYPE_CHECKING:
    from tests.conftest import Bundles

SILENT = SilentProgress()
TEXT = "".join(f"{i} times {i} is {i * i}. " for i in range(100))  # of bytes, each a token
WINDOW = 64


@pytest.fixture
def plan(tiny_bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QualityOptions:
    """Three windows in prefill, two in decode, and calls for 10 rows of logits."""
    monkeypatch.setattr(module, "WINDOW", WINDOW)
    monkeypatch.setattr(LoadedModel, "max_logit_rows", 10)
    (tmp_path / "text.txt").write_text(TEXT)
    bundle = Path(shutil.copytree(tiny_bundles["q4f16_1"], tmp_path / "bundle"))
    return QualityOptions(
        bundle, tiny_bundles["q0f32"], tmp_path / "text.txt", tokens=210, decode_tokens=130, threads=1
    )


def divergences(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    p, q = (np.exp(rows.astype(np.longdouble)) for rows in (reference, logits))
    p, q = (e / e.sum(axis=1, keepdims=True) for e in (p, q))
    return (p * np.log(p / q)).sum(axis=1)


def test_figures_are_those_of_saved_logits(plan: QualityOptions) -> None:
    report = measure(plan, SILENT)
    own, exact = (Engine(path, threads=1, context_length=WINDOW) for path in (plan.bundle, plan.reference))
    tokens = own.tokenizer.encode(TEXT)
    windows = [tokens[begin : begin + WINDOW] for begin in (0, 64, 128)]
    half = WINDOW // 2
    expected = [exact.logits(window)[half:-1] for window in windows]
    prefill = np.concatenate([divergences(own.logits(w)[half:-1], e) for w, e in zip(windows, expected)])
    stepwise = [own.logits_stepwise(w[:-1], prefill_tokens=half)[1:] for w in windows[:2]]
    decode = np.concatenate([divergences(rows, e) for rows, e in zip(stepwise, expected)])
    for found, values in ((report.quality.prefill, prefill), (report.quality.decode, decode)):
        assert found.tokens == len(values) == 31 * (3 if values is prefill else 2)
        assert found.kld == pytest.approx(float(values.mean()), rel=1e-5) and found.kld > 1e-5
        assert found.kld_max == pytest.approx(float(values.max()), rel=1e-4)
    following = np.concatenate([w[half + 1 :] for w in windows])
    rows = np.concatenate([own.logits(w)[half:-1] for w in windows]).astype(np.float64)
    nll = np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(rows)), following]
    assert report.quality.prefill.ppl == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    assert 4.5 <= report.quality.bits_per_weight < 6  # groups of 32 do not divide this model's rows
    assert report.quality.window == WINDOW and report.decode_tok_s > 0
    assert report.notes == ("192 tokens in windows of 64, the first 32 of each as context; decode: the first 128",)


def test_the_reference_is_not_rounded(plan: QualityOptions) -> None:
    """Against itself a model differs by the order of sums alone, also where it decodes."""
    found = measure(replace(plan, bundle=plan.reference), SILENT).quality
    assert abs(found.prefill.kld) < 1e-12 and abs(found.decode.kld) < 1e-8
    assert found.prefill.top1 == found.decode.top1 == 1


def test_the_result_goes_into_the_manifest(plan: QualityOptions) -> None:
    quality = measure(plan, SILENT).quality
    accept(plan.bundle)
    assert record(plan.bundle, read_manifest(plan.bundle), quality) is None
    assert read_manifest(plan.bundle).quality == quality and origin_of(plan.bundle).accepted
    Engine(plan.bundle, threads=1).prefill([1])
    manifest = read_manifest(plan.bundle)
    write_manifest(plan.bundle, manifest.model_copy(update={"name": "from elsewhere"}))
    assert "changed" in str(record(plan.bundle, manifest, quality))  # another one has its place
    record(plan.bundle, read_manifest(plan.bundle), quality)
    assert not origin_of(plan.bundle).accepted  # a measurement accepts nothing
    (plan.bundle / SIGNATURE).write_text("a signature of the manifest as it is")
    before = (plan.bundle / "mlcpipe.json").read_bytes()
    assert "signed" in str(record(plan.bundle, read_manifest(plan.bundle), quality))
    assert (plan.bundle / "mlcpipe.json").read_bytes() == before


def test_a_short_text_is_measured_and_said(plan: QualityOptions) -> None:
    plan.text.write_text("one two")
    report = measure(plan, SILENT)
    assert report.quality.prefill.tokens == 3 and report.quality.window == 7
    assert report.notes[0] == "the text has 7 tokens, fewer than the 210 of --tokens"


def test_a_long_text_is_encoded_as_far_as_it_is_used(plan: QualityOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = measure(plan, SILENT)
    plan.text.write_text(TEXT * 1000)
    encode, lengths = Tokenizer.encode, []

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    for characters, most in ((16, 16 * 210), (1, 2 * 210)):  # a token is a byte: 210 characters are one token too few
        monkeypatch.setattr(module, "_CHARACTERS", characters)
        found = measure(plan, SILENT)
        assert found.notes == expected.notes and found.quality.prefill == expected.quality.prefill
        assert max(lengths) == most and lengths.pop() == most
        lengths.clear()


def test_fewer_tokens_than_a_window_needs(plan: QualityOptions) -> None:
    with pytest.raises(UsageError, match="--tokens; expected at least 3 tokens; found 2"):
        measure(replace(plan, tokens=2), SILENT)


@pytest.mark.parametrize("text", ["", "a", "ab"])
def test_a_text_without_a_position_to_score(plan: QualityOptions, text: str) -> None:
    plan.text.write_text(text)
    with pytest.raises(UsageError, match=f"the text is too short; expected at least 3 tokens; found {len(text)}"):
        measure(plan, SILENT)


def test_texts_that_cannot_be_read(plan: QualityOptions) -> None:
    plan.text.write_bytes(b"good \xff bad")
    with pytest.raises(UsageError, match="the text is not UTF-8 .*; found a bad byte at offset 5"):
        measure(plan, SILENT)
    with pytest.raises(UsageError, match="missing text"):
        measure(replace(plan, text=plan.text.with_name("no.txt")), SILENT)


def test_another_vocabulary(plan: QualityOptions, demo_bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="another vocabulary; expected 304 tokens; found 3072"):
        measure(replace(plan, reference=demo_bundles["q0f32"]), SILENT)
    # As many tokens, and other ones.
    path = plan.bundle / "tokenizer.json"
    path.write_bytes(
        path.read_bytes()
        .replace(b'"content":"<end>"', b'"content":"times"')
        .replace(b'"content": "<end>"', b'"content": "times"')
    )
    from mlcpipe.bundle.integrity import file_info

    manifest = read_manifest(plan.bundle)
    files = {**manifest.files, "tokenizer.json": file_info(path)}
    write_manifest(plan.bundle, manifest.model_copy(update={"files": files}))
    with pytest.raises(UsageError, match="another vocabulary; expected the bundle's tokens of the text"):
        measure(plan, SILENT)


def test_memory_is_computed_first(plan: QualityOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_memory", lambda: FreeMemory(1 << 20))
    with pytest.raises(
        ResourceError, match="not enough memory for bundle and reference together; .* in q0f32; found 1.00 MiB"
    ):
        measure(plan, SILENT)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite(plan: QualityOptions, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    parts = LoadedModel.logit_parts

    def damaged(self: LoadedModel, *arguments: object) -> object:
        for rows in parts(self, *arguments):  # type: ignore[arg-type]
            rows = rows.copy()
            if self.bundle.manifest.quantization == "q4f16_1":
                rows[0, 5] = value
            yield rows

    monkeypatch.setattr(LoadedModel, "logit_parts", damaged)
    with pytest.raises(ComputeError, match="the bundle computed logits that are not finite"):
        measure(plan, SILENT)


def test_a_reference_that_is_rounded_or_absent(tiny_bundles: Bundles, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the reference is rounded itself .*; expected q0f32 or q0f16; found q4f16_1"):
        prepare_reference(tiny_bundles["q4f16_1"], 0, SILENT)
    assert prepare_reference(tiny_bundles["q0f32"], 0, SILENT) == tiny_bundles["q0f32"]
    from mlcpipe.errors import MlcpipeError

    with pytest.raises(MlcpipeError, match="no-model"):
        prepare_reference(tmp_path / "no-model", 0, SILENT)


def test_the_text_that_ships_is_long_enough() -> None:
    """For tokenizers with 128,000 tokens, which put 4.4 characters of such prose into one."""
    assert len(OWN_TEXT.read_text(encoding="utf-8")) > 4.4 * QUALITY_TOKENS
