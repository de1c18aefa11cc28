"""What config.json says of blocks that are denoised, and what is refused; nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from mlcpipe.bundle.model_info import DiffusionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.models import build_model
from tests.models.small_configs import SIZES

BASE = {**SIZES, "vocab_size": 160_000}


def info(**fields: Any) -> DiffusionInfo | None:
    return build_model({**BASE, **fields}).facts.diffusion


def test_settings_are_the_file_s_or_those_of_the_authors_program() -> None:
    assert info(model_type="sdar") == DiffusionInfo(mask=151669, block=4, steps=4, threshold=0.85)
    stated = {"block_size": 16, "mask_token_id": 7, "denoising_steps": 8, "confidence_threshold": 0.9}
    edits = info(model_type="sdar", editing_threshold=0.5, max_post_steps=8)
    assert edits is not None and (edits.editing_threshold, edits.max_post_steps) == (0.5, 8)
    assert info(model_type="sdar", **stated) == DiffusionInfo(mask=7, block=16, steps=8, threshold=0.9)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
    assert info(model_type="sdar_moe", **experts) == DiffusionInfo(mask=151669, block=4, steps=4, threshold=0.85)
    assert info(model_type="llada2_moe", **experts) == DiffusionInfo(mask=156895, block=32, steps=32, threshold=0.95)


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
        ({"model_type": "Dream"}, "whole answer"),
        ({"model_type": "diffusion_gemma"}, "whole answer"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_no_kernel_has_is_refused_by_name(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        info(**{"model_type": "sdar", **fields})
