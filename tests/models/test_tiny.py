"""The tiny checkpoints and their references, checked against transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

from tests.models import tiny
from tests.models.variants import VARIANTS

CASES = [case for model_type in VARIANTS for case in tiny.family_cases(model_type)]
COMMITTED = [case for cases in tiny.tiny_checkpoints().values() for case in cases if case.id in tiny.SEEDS]
SOME = ("llama-dynamic", "gemma3_text-default", "qwen3_moe-default", "gpt_oss-default", "olmo2-default")


@pytest.fixture(params=CASES, ids=lambda case: case.id)
def case(request: pytest.FixtureRequest) -> tiny.TinyCase:
    """Every case of every family in the table, whether mlcpipe has the family or not."""
    parameter: tiny.TinyCase = request.param
    return parameter


@pytest.mark.fast_cases("llama-default", "gemma2-default")
@pytest.mark.full_cases(*SOME)
def test_saved_checkpoint_is_the_reference_model(case: tiny.TinyCase, tmp_path: Path) -> None:
    tokens = tiny.prompt_tokens(case, 40)
    tiny.write_tiny(case, tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    with torch.no_grad():
        reloaded = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert not any(report.values()), report
    np.testing.assert_array_equal(reloaded, tiny.reference_logits(case, tokens))


@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.id)
@pytest.mark.fast_cases("llama-default")
@pytest.mark.full_cases(*SOME)
def test_committed_seeds_are_found_again(case: tiny.TinyCase) -> None:
    assert tiny.SEEDS[case.id] == {"of": tiny.digest(case), "seed": tiny.search_seed(case)}, (
        "python -m tests.models.tiny"
    )


@pytest.mark.fast_cases("llama-default", "gemma2-default", "phi3-longrope")
@pytest.mark.full_cases(*SOME)
def test_steps_equal_one_pass_unless_rope_depends_on_the_length(case: tiny.TinyCase) -> None:
    tokens = tiny.prompt_tokens(case, 40)
    one_pass = tiny.reference_logits(case, tokens)
    steps = tiny.reference_stepwise(case, tokens, 12)
    assert steps.shape == (29, one_pass.shape[1])
    # Last positions, past every threshold of the cases.
    difference = np.abs(one_pass[11:] - steps).max()
    assert difference > 0.1 if case.length_dependent else difference < 5e-5


@pytest.mark.full
def test_longrope_steps_equal_a_pass_over_each_prefix() -> None:
    (case,) = [case for case in CASES if case.id == "phi3-longrope"]
    tokens = tiny.prompt_tokens(case, 40)
    steps = tiny.reference_stepwise(case, tokens, 12)
    passes = [tiny.reference_logits(case, tokens[:count])[-1] for count in range(12, 41)]
    np.testing.assert_allclose(steps, np.stack(passes), atol=5e-5)


def test_an_unknown_family_gets_a_default_case() -> None:
    # granite has no entry in the table; it stands for a family that is added later.
    assert "granite" not in VARIANTS
    (case,) = tiny.family_cases("granite")
    tokens = tiny.prompt_tokens(case, 12)
    assert tiny.reference_logits(case, tokens).shape == (12, 160)
    assert len(tiny.reference_greedy(case, tokens, 4)) == 4


def test_hub_style_config_has_the_old_names(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.id == "llama-dynamic"]
    config = json.loads((tiny.write_tiny(case, tmp_path) / "config.json").read_text())
    assert config["rope_scaling"] == {"type": "dynamic", "factor": 4.0}
    assert config["rope_theta"] == 10000.0
    assert config["torch_dtype"] == "float32"
    assert "rope_parameters" not in config


def test_dtype_of_the_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="reads the written file")
    (case,) = [case for case in CASES if case.id == "llama-default"]
    folder = tiny.write_tiny(case, tmp_path, dtype="bfloat16", seed=3)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16
