"""What config.json says of blocks that are denoised, and what is refused; nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from mlcpipe.bundle.model_info import DiffusionInfo, WholeAnswerInfo
from mlcpipe.errors import ConfigError
from mlcpipe.models import build_model
from tests.models.small_configs import SIZES

BASE = {**SIZES, "vocab_size": 160_000}


LLADA = {"block_type": "llama", "rope": True, "layer_norm_type": "rms", "activation_type": "silu"}


def info(**fields: Any) -> Any:
    return build_model({**BASE, **fields}).facts.diffusion


def test_settings_are_the_file_s_or_those_of_the_authors_program() -> None:
    assert info(model_type="sdar") == DiffusionInfo(mask=151669, block=4, steps=4, threshold=0.85)
    stated = {"block_size": 16, "mask_token_id": 7, "denoising_steps": 8, "confidence_threshold": 0.9}
    edits = info(model_type="sdar", editing_threshold=0.5, max_post_steps=8)
    assert (edits.editing_threshold, edits.max_post_steps) == (0.5, 8)
    assert info(model_type="sdar", **stated) == DiffusionInfo(mask=7, block=16, steps=8, threshold=0.9)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
    assert info(model_type="sdar_moe", **experts) == DiffusionInfo(mask=151669, block=4, steps=4, threshold=0.85)
    assert info(model_type="llada2_moe", **experts) == DiffusionInfo(mask=156895, block=32, steps=32, threshold=0.95)


def test_whole_answers_have_the_orders_of_their_program() -> None:
    llada = info(model_type="llada", **LLADA, weight_tying=False)
    assert llada == WholeAnswerInfo(mask=126336, orders=("low_confidence", "random"), shifted=False)
    model = build_model({**BASE, "model_type": "dream", "max_position_embeddings": 131072, "eps": 0.01})
    orders = ("entropy", "origin", "maskgit_plus", "topk_margin")
    assert model.facts.diffusion == WholeAnswerInfo(mask=151666, orders=orders, shifted=True, eps=0.01)
    assert model.facts.context_length == 2048


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"block_size": 12}, "block_size .*a divisor of 64"),
        ({"block_size": 128}, "block_size"),
        ({"denoising_steps": 5}, "denoising_steps"),
        ({"threshold": 1.5}, "threshold"),
        ({"editing_threshold": -0.1}, "editing_threshold"),
        ({"max_post_steps": 65}, "max_post_steps"),
        ({"mask_token_id": 160_000}, "mask_token_id"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "frequencies of RoPE"),
        (
            {"model_type": "dream", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0},
            "no window",
        ),
        ({"model_type": "llada", **LLADA, "layer_norm_type": "default"}, "layer_norm_type"),
        ({"model_type": "llada", **LLADA, "rope": False}, "rope"),
        ({"model_type": "llada", **LLADA, "embedding_size": 160_128}, "embedding_size"),
        ({"model_type": "diffusion_gemma"}, "a pass to read"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_no_kernel_has_is_refused_by_name(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        info(**{"model_type": "sdar", **fields})
