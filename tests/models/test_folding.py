"""`--fold-outliers`: no digit of the products changes, outliers fall, and what cannot be folded is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="tiny checkpoints are written by torch")
pytest.importorskip("transformers", reason="tiny checkpoints are written by transformers")

import mlcpipe
from bench.outliers import plant_outliers
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.cli.compile import check_texts
from mlcpipe.compiler.calibration.fold import Folded
from mlcpipe.compiler.calibration.outliers import Folding, folded_tensors
from mlcpipe.compiler.calibration.text import read_calibration
from mlcpipe.compiler.job import stored_weights
from mlcpipe.errors import ConfigError, UsageError
from mlcpipe.quality.measure import OWN_TEXT
from mlcpipe.quantization.recipe import load_recipe
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.progress import SilentProgress
from mlcpipe.targets import load_target
from tests.conftest import DEMO
from tests.models import tiny, tiny_encoders
from tests.models.quantized import write_case

NORMS = {  # and readers whose rows have no factors of their own
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj"),
    "post_attention_layernorm": ("mlp.gate_proj",),
}
CHANNELS, FACTOR = 4, 100


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with large channels in front of every projection."""
    return plant_outliers(DEMO, tmp_path_factory.mktemp("planted") / "demo", factor=FACTOR, channels=CHANNELS)


@cache
def folded(path: Path, text: str | None) -> Folded:
    """Its tensors for q4f16_1 with outliers folded in."""
    folding = Folding(read_calibration(text) if text else None)
    source = open_checkpoint(path)
    weights = stored_weights(source, load_target("cpu"), load_recipe("q4f16_1"))
    tokenizer = None
    if folding.text is not None:
        tokenizer = Tokenizer.load(source.folder, generation_config={}, config=source.config)
    return folded_tensors(folding, weights, source, tokenizer, SilentProgress())


@pytest.mark.parametrize("text", [None, pytest.param("own", marks=pytest.mark.full)])
def test_outliers_fall_and_no_digit_changes(planted: Path, text: str | None) -> None:
    before, after = open_checkpoint(planted), folded(planted, text)
    original = open_checkpoint(DEMO)
    for layer in range(before.config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        for norm, readers in NORMS.items():
            name = f"{stem}.{norm}.weight"
            was, now = before.read(name), after.read(name)
            large = was / original.read(name) > FACTOR / 2
            assert large.sum() == CHANNELS
            factors = was / now
            np.testing.assert_array_equal(np.exp2(np.rint(np.log2(factors))), factors)
            assert np.median(factors[large]) >= 16 * np.median(factors[~large])
            for reader in readers:
                w, now_w = (one.read(f"{stem}.{reader}.weight") for one in (before, after))
                np.testing.assert_array_equal(now_w * now, w * was)


def test_what_the_mlp_gives_keeps_its_digits(planted: Path) -> None:
    before, after = open_checkpoint(planted), folded(planted, None)
    for layer in range(before.config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        norm, up, down = (
            f"{stem}.{name}.weight" for name in ("post_attention_layernorm", "mlp.up_proj", "mlp.down_proj")
        )
        own, other = (
            (one.read(up) * one.read(norm))[:, :8, None].transpose(1, 2, 0) * one.read(down) for one in (before, after)
        )
        np.testing.assert_array_equal(other, own)
        values, output = (f"{stem}.self_attn.{name}.weight" for name in ("v_proj", "o_proj"))
        assert (before.read(values) != after.read(values)).any() and before.read(output).shape == after.read(
            output
        ).shape


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    case = write_case("gptq-8-row", tmp_path)
    with pytest.raises(ConfigError, match="cannot be folded into weights that are quantized already"):
        mlcpipe.convert(case.folder, output=tmp_path / "out", fold_outliers="weights")


def test_what_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters are trained for weights as the checkpoint has them"):
        mlcpipe.compile(DEMO, output=tmp_path / "out", fold_outliers="weights", adapters=True)
    with pytest.raises(UsageError, match="--method awq folds outliers itself"):
        mlcpipe.convert(DEMO, output=tmp_path / "out", quantization="q4f16_1", fold_outliers="own", method="awq")
    with pytest.raises(UsageError, match="calibration text"):
        mlcpipe.convert(DEMO, output=tmp_path / "out", fold_outliers=tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match="no stages with a calibration text"):
        mlcpipe.compile(DEMO, target="cpu", stages=[1, 1], output=tmp_path / "out", fold_outliers="own")
    tiny.write_tiny(tiny.TinyCase("mamba", "default"), tmp_path / "mamba")
    with pytest.raises(ConfigError, match="there is nothing to fold outliers in"):
        mlcpipe.convert(tmp_path / "mamba", output=tmp_path / "out", fold_outliers="weights")
    _, encoder = tiny_encoders.write("bert", tmp_path / "bert")
    with pytest.raises(ConfigError, match="--fold-outliers is for models that write text"):
        mlcpipe.convert(encoder, output=tmp_path / "out", fold_outliers="weights")
    assert not (tmp_path / "out").exists()


def test_the_text_of_folding_is_not_the_one_that_is_measured_on() -> None:
    check_texts(None, None, None, "weights")
    with pytest.raises(UsageError, match="the text of --fold-outliers is one that quality is measured on"):
        check_texts(None, None, None, str(OWN_TEXT))
