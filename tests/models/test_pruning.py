"""Pruned checkpoints: what may go goes, the rest computes the same in transformers and in the engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.errors import UsageError
from mlcpipe.pruning.prune import FAMILIES, Pruned, prune
from mlcpipe.pruning.recipe import Recipe, read_recipe
from mlcpipe.quality.measure import QualityOptions, measure
from mlcpipe.support.defaults import DISTILL_RECIPE
from mlcpipe.support.files import text_hash
from mlcpipe.support.progress import SilentProgress
from tests.conftest import QUICK
from tests.models import tiny

pytestmark = pytest.mark.full
BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}}
KEEP = {"heads": 1, "width": 64, "layers": 2}
IDS = tiny.prompt_tokens(tiny.TinyCase("llama", "default"), 40)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of the tiny tokenizer, of which some are frequent, as a file."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    numbers = np.random.default_rng(3).zipf(1.3, 6000) % 114 + 3
    path.write_text(" ".join(f"w{number}" for number in numbers), encoding="utf-8")
    return path


def model_of(folder: Path) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits_of(folder: Path) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model_of(folder)(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    return found


def written(family: str, folder: Path, change: Any = lambda layer, i: None) -> Path:
    """A tiny checkpoint; `change` may edit each layer of the model before it is saved."""
    case = tiny.TinyCase(family, "default", BIASED.get(family, {}))
    tiny.write_tiny(case, folder, seed=1)
    model = model_of(folder)
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            change(layer, i)
    model.save_pretrained(folder)
    return folder


def with_spare_head(layer: Any, i: int) -> None:
    """The second KV head, with its query heads, is 0, or the same as the first."""
    attention, d = layer.self_attn, 16
    for projection, rows in ((attention.q_proj, 2 * d), (attention.k_proj, d), (attention.v_proj, d)):
        for part in filter(lambda one: one is not None, (projection.weight, projection.bias)):
            part[rows:] = part[:rows] if i else 0


def with_spare_columns(layer: Any, i: int) -> None:
    """Of the MLP's columns 20 are 0 and 12 there twice."""
    for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
        for part in filter(lambda one: one is not None, (projection.weight, projection.bias)):
            part[10:30], part[60:72] = 0, part[40:52]


def with_spare_layer(layer: Any, i: int) -> None:
    """The layer in the middle adds nothing."""
    if i == 1:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for part in filter(lambda one: one is not None, (projection.weight, projection.bias)):
                part[:] = 0


SPARE = {"heads": with_spare_head, "width": with_spare_columns, "layers": with_spare_layer}
FEW = [("llama", "heads"), ("llama", "layers")]
CASES = [
    pytest.param(family, method, marks=[] if (family, method) in FEW else pytest.mark.everything)
    for family in FAMILIES
    for method in SPARE
]


@pytest.mark.parametrize(("family", "method"), CASES)
def test_what_is_spare_goes_and_nothing_is_lost(family: str, method: str, text: Path, tmp_path: Path) -> None:
    folder = written(family, tmp_path / "original", SPARE[method])
    made = prune(folder, method=method, output=tmp_path / "pruned", keep=KEEP[method], calibration=text)
    np.testing.assert_allclose(logits_of(made.output), logits_of(folder), rtol=0, atol=1e-4)
    assert made.after.parameters < made.before.parameters and made.after.read_bytes < made.before.read_bytes
    assert made.kept == KEEP[method] < made.count


@pytest.mark.parametrize("method", ["heads", pytest.param("width", marks=pytest.mark.everything)])
def test_the_engine_computes_what_transformers_does(method: str, text: Path, tmp_path: Path) -> None:
    folder = written("qwen3", tmp_path / "original")
    made = prune(folder, method=method, output=tmp_path / "pruned", keep=KEEP[method], calibration=text)
    bundle = mlcpipe.compile(made.output, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    expected = logits_of(made.output)
    assert np.abs(expected - logits_of(folder)).max() > 0.01
    np.testing.assert_allclose(mlcpipe.Engine(bundle).logits(IDS), expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def sparse(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    """A llama in 2:4, in bfloat16."""
    folder = tmp_path_factory.mktemp("sparse")
    tiny.write_tiny(tiny.TinyCase("llama", "default"), folder / "original", "bfloat16", seed=1)
    return prune(folder / "original", method="sparsegpt", output=folder / "pruned", calibration=text)


def test_matrices_of_layers_are_in_2_4_and_no_others(sparse: Pruned) -> None:
    original, pruned = open_checkpoint(sparse.original), open_checkpoint(sparse.output)
    assert pruned.tensors.keys() == original.tensors.keys() and sparse.after == sparse.before
    for name, info in pruned.tensors.items():
        values = pruned.read(name)
        assert info.dtype == "bfloat16"
        if ".layers." in name and values.ndim == 2:
            assert ((values == 0).reshape(len(values), -1, 4).sum(axis=2) == 2).all(), name
        else:
            np.testing.assert_array_equal(values, original.read(name))
    for path in sparse.original.iterdir():
        assert (sparse.output / path.name).is_file()


def test_quality_is_not_measured_on_a_text_that_pruned_the_bundle_or_its_reference(
    sparse: Pruned, text: Path, tmp_path: Path
) -> None:
    """Whatever compiled it, and whichever of the two was pruned."""
    folders = {"pruned": sparse.output, "original": sparse.original}
    pruned, original = (
        mlcpipe.compile(folder, target=QUICK, quantization="q0f32", output=tmp_path / name)
        for name, folder in folders.items()
    )
    for bundle, reference, whose in ((pruned, original, "bundle"), (original, pruned, "reference")):
        with pytest.raises(UsageError, match=f"the {whose}'s weights were fitted to this text .*{text.name}"):
            measure(QualityOptions(bundle, reference, text), SilentProgress())


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "apps" / "distill" / "distill.py"
    spec = importlib.util.spec_from_file_location("distill_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_distillation_wins_back_and_zeros_stay(sparse: Pruned, script: ModuleType, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf-8") + " w7", encoding="utf-8")
    recipe = read_recipe(sparse.output)
    assert recipe == Recipe(str(sparse.original.resolve()), "sparsegpt", "2:4")
    short = Recipe(
        recipe.teacher, recipe.method, recipe.pattern, str(other), window=32, rows=4, steps=20, peak_rate=3e-3
    )
    result = script.distill(sparse.output, short, tmp_path / "distilled", SilentProgress())
    assert result.after < 0.85 * result.before
    pruned, distilled = open_checkpoint(sparse.output), open_checkpoint(tmp_path / "distilled")
    for name in pruned.tensors:
        if ".layers." in name and len(pruned.info(name).shape) == 2:
            assert (distilled.read(name)[pruned.read(name) == 0] == 0).all(), name
            assert not np.array_equal(distilled.read(name), pruned.read(name))
    files = [sorted(path.name for path in folder.iterdir()) for folder in (sparse.output, tmp_path / "distilled")]
    assert files[0] == files[1] and DISTILL_RECIPE in files[0]
    assert np.isfinite(logits_of(tmp_path / "distilled")).all()
    fitted_to = tuple(text_hash(path.read_text(encoding="utf-8")) for path in (text, other))
    assert (pruned.fitted_to, distilled.fitted_to) == (fitted_to[:1], fitted_to)


@pytest.mark.everything
def test_layers_keep_their_windows(text: Path, tmp_path: Path) -> None:
    case = tiny.TinyCase("qwen2", "windowed", {"use_sliding_window": True, "max_window_layers": 1})
    tiny.write_tiny(case, tmp_path / "original", seed=1)
    made = prune(tmp_path / "original", method="layers", output=tmp_path / "pruned", keep=2, calibration=text)
    config = json.loads((made.output / "config.json").read_text(encoding="utf-8"))
    windows = json.loads((made.original / "config.json").read_text(encoding="utf-8"))["layer_types"]
    assert len(config["layer_types"]) == 2 and "sliding_attention" in config["layer_types"]
    assert set(map(str, windows)) == {"full_attention", "sliding_attention"}
