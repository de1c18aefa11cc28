"""What `make quality` adds to `mlcpipe quality`: ratios of pairs, planted outliers, and files for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench import bench_quality, outliers
from bench.make_gguf import make_gguf
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.errors import ConfigError
from mlcpipe.quality.statistics import Scores
from tests.conftest import DEMO

if TYPE_CHECKING:
    from tests.conftest import Bundles


def scores(kld: np.ndarray) -> Scores:
    return Scores(kld, kld, kld, kld, kld)


def test_the_ratio_of_pairs_is_known_better_than_its_parts() -> None:
    random = np.random.default_rng(1)
    base = random.gamma(0.5, 0.1, 4000)
    value, error = bench_quality.ratio(scores(0.5 * base + random.normal(0, 1e-4, 4000)), scores(base))
    assert abs(value - 0.5) < 4 * error < 0.001
    apart, wider = bench_quality.ratio(scores(0.5 * random.permutation(base)), scores(base))
    assert apart == pytest.approx(0.5) and wider > 20 * error


def test_planted_outliers_change_no_function(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the reference is computed by torch")
    transformers = pytest.importorskip("transformers", reason="the reference is a transformers model")
    planted = outliers.plant_outliers(DEMO, tmp_path / "planted")
    both = outliers.plant_outliers(DEMO, tmp_path / "both", factor=100, channels=4)
    before, after = open_checkpoint(DEMO), open_checkpoint(planted)
    for name in (name for name in before.tensors if name.endswith("layernorm.weight")):
        ratios = after.read(name) / before.read(name)
        assert sorted(set(ratios)) == [1, outliers.FACTOR] and (ratios > 1).sum() == len(ratios) // outliers.EVERY
    up = "model.layers.0.mlp.up_proj.weight"
    assert ((open_checkpoint(both).read(up) / before.read(up)).max(axis=1) > 99).sum() == 4
    expected, *found = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.arange(3, 200)[None]
        ).logits
        for folder in (DEMO, planted, both)
    )
    for logits in found:
        np.testing.assert_allclose(logits.detach(), expected.detach(), rtol=0, atol=1e-4)


def test_a_gguf_file_has_the_vocabulary_of_its_checkpoint(demo_bundles: Bundles, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from mlcpipe.runtime.text.tokenizer import Tokenizer

    source, file = demo_bundles.checkpoint, make_gguf(demo_bundles.checkpoint, tmp_path / "demo.gguf", bits=16)
    written = open_checkpoint(file)
    own, other = (
        Tokenizer.load(one.folder, generation_config=one.generation_config, config=one.config)
        for one in (open_checkpoint(source), written)
    )
    text = "What's a GGUF file?\n\n  It has 16 bits, naïve ones – 12345."
    assert own.encode(text, add_special_tokens=False) == other.encode(text, add_special_tokens=False)


def test_a_vocabulary_that_llama_cpp_would_cut_otherwise_is_refused(demo_bundles: Bundles, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = outliers.plant_outliers(demo_bundles.checkpoint, tmp_path / "copy")
    path = folder / "tokenizer.json"
    read = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(read | {"pre_tokenizer": {"type": "Whitespace"}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="byte-level BPE"):
        make_gguf(folder, tmp_path / "demo.gguf", bits=16)
