"""ALiBi in the dimensions of heads: its slopes, and caches that hold positions exactly or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import mlcpipe
from mlcpipe.compiler.export import prepare_model
from mlcpipe.errors import TargetError
from mlcpipe.nn.alibi import slopes_of
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from tests.conftest import EXACT
from tests.models import small_configs, tiny


@pytest.mark.parametrize("heads", [1, 6, 8, 20, 71, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    np.testing.assert_allclose(slopes_of(heads), _get_alibi_slopes(heads, torch.device("cpu")).numpy(), rtol=1e-5)
    of_mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0].numpy()
    np.testing.assert_allclose(slopes_of(heads), of_mpt, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_caches_of_codes_are_refused(dtype: str) -> None:
    with pytest.raises(TargetError, match="KV cache dtype.*expected float32, float16"):
        prepare_model(small_configs.config("bloom"), load_target("cpu"), load_scheme("q4f16_1"), dtype)
    model = prepare_model(small_configs.config("bloom"), load_target("cpu"), load_scheme("q4f16_1"))
    assert model.kv_dtype == "float16"


@pytest.mark.full
def test_a_cache_of_float16_holds_positions(tmp_path: Path) -> None:
    case = tiny.TinyCase("bloom", "default")
    (tmp_path / "exact.toml").write_text(EXACT)
    bundle = mlcpipe.compile(
        tiny.write_tiny(case, tmp_path / "checkpoint"), target=str(tmp_path / "exact.toml"), quantization="q0f32",
        kv_cache_dtype="f16", output=tmp_path / "bundle", context_length=case.context_length,
    )  # fmt: skip
    tokens = tiny.prompt_tokens(case, 120)
    expected = tiny.reference_logits(case, tokens)
    np.testing.assert_allclose(mlcpipe.Engine(bundle).logits(tokens), expected, rtol=0, atol=5e-3)
