"""A model that computes NaN or infinity: one line that says where, never an empty or endless answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle import open_params, read_manifest
from mlcpipe.cli import main
from mlcpipe.errors import ComputeError
from tests.conftest import QUICK, scale_tensor, write_llama

if TYPE_CHECKING:
    from tests.conftest import Bundles

PROMPT = list(b"a prompt")
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.7, top_p=1.0, seed=1),
    "best": SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=1),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={3: -5.0}),
}
Damage = Callable[[str, float], Path]


@pytest.fixture
def damaged(copied: Path) -> Damage:
    """A copy of the random model's bundle with all numbers of a weight replaced, and its hash put right."""

    def damage(name: str, value: float) -> Path:
        manifest = read_manifest(copied)
        weights = {key: np.array(array) for key, array in open_params(copied, manifest).items()}
        index = json.loads((copied / "tensor-cache.json").read_text())
        weights[name][...] = value
        for shard in index["records"]:
            path = copied / shard["dataPath"]
            data = bytearray(path.read_bytes())
            for record in shard["records"]:
                raw = weights[record["name"]].tobytes()
                data[record["byteOffset"] : record["byteOffset"] + len(raw)] = raw
            path.write_bytes(data)
            changed = json.loads((copied / "mlcpipe.json").read_text())
            changed["files"][path.name]["sha256"] = hashlib.sha256(data).hexdigest()
            (copied / "mlcpipe.json").write_text(json.dumps(changed))
        return copied

    return damage


def error_of(engine: Engine, sampling: SamplingParams = SETTINGS["greedy"]) -> str:
    with pytest.raises(ComputeError) as raised:
        engine.generate(PROMPT, sampling=sampling, max_tokens=8, ignore_eos=True)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_weight_that_is_no_number_is_named(setting: str, damaged: Damage) -> None:
    engine = Engine(damaged("model.layers.1.mlp.down_proj.weight", np.nan), threads=1)
    for _ in range(2):  # also with what the first call left in the cache
        assert "NaN or infinity in the weight model.layers.1.mlp.down_proj.weight" in error_of(
            engine, SETTINGS[setting]
        )


@pytest.mark.parametrize("value", [np.inf, -np.nan])
def test_a_norm_that_is_no_number_is_named(value: float, damaged: Damage) -> None:
    assert "in the weight model.norm.weight" in error_of(Engine(damaged("model.norm.weight", value), threads=1))


def test_the_command_prints_one_line(
    damaged: Damage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", str(damaged("model.norm.weight", np.nan)), "--prompt", "hi"]) == 2
    out, err = capsys.readouterr()
    assert out.strip() == "" and "the model computed numbers that are not finite" in err


def test_what_overflows_the_last_layer_comes_after_its_keys(damaged: Damage) -> None:
    bundle = damaged("model.layers.1.mlp.down_proj.weight", 3e38)
    words = error_of(Engine(bundle, threads=1))
    assert "in layer 1, the last, after its keys and values" in words


def test_a_layer_shows_in_the_keys_of_the_next(damaged: Damage) -> None:
    words = error_of(Engine(damaged("model.layers.0.mlp.down_proj.weight", 3e38), threads=1))
    assert "in the keys of layer 1; found NaN; the checkpoint" in words


def large_keys(folder: Path, quantization: str, kv_cache_dtype: str) -> Engine:
    """A model whose keys in layer 1 are beyond float16."""
    checkpoint = write_llama(folder / "checkpoint")
    scale_tensor(checkpoint, "model.layers.1.self_attn.k_proj.weight", 1e5)
    options = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    return Engine(mlcpipe.compile(checkpoint, target=QUICK, output=folder / "bundle", **options), threads=1)


@pytest.mark.parametrize("quantization", ["q0f32", "q4f16_1"])
def test_keys_that_overflow_float16(quantization: str, tmp_path: Path) -> None:
    words = error_of(large_keys(tmp_path, quantization, "f16"))
    assert "in the keys of layer 1; found infinity; compile the model with --kv-cache-dtype f32" in words


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "q8"])
def test_the_advice_is_right(kv_cache_dtype: str, tmp_path: Path) -> None:
    engine = large_keys(tmp_path, "q0f32", kv_cache_dtype)
    assert engine.generate(PROMPT, sampling=SETTINGS["greedy"], max_tokens=4, ignore_eos=True).token_ids


@pytest.mark.parametrize("kv_cache_dtype", ["q8", pytest.param("q4", marks=pytest.mark.full)])
def test_a_quantized_cache_keeps_no_number_from_showing(kv_cache_dtype: str, tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    scale_tensor(checkpoint, "model.layers.0.mlp.down_proj.weight", 3e38)
    bundle = mlcpipe.compile(
        checkpoint, target=QUICK, quantization="q0f32", kv_cache_dtype=kv_cache_dtype, output=tmp_path / "bundle"
    )
    assert "in the keys of layer 1; found NaN" in error_of(Engine(bundle, threads=1))


def test_other_calls_still_answer(damaged: Damage, tiny_bundles: Bundles) -> None:
    """`logits` gives what there is, and an engine beside it is not touched."""
    engine = Engine(damaged("model.norm.weight", np.nan), threads=1)
    error_of(engine)
    assert np.isnan(engine.logits(PROMPT)).any()
    assert Engine(tiny_bundles["q0f32"], threads=1).generate(PROMPT, max_tokens=2, ignore_eos=True).token_ids
