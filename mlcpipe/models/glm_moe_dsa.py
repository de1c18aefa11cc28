"""GLM 5 (Z.ai 2026): DeepSeek V3.2's layers in other sizes; some use the tokens that the indexer before picked.

Models: GLM-5, GLM-5.1 (up to `index_topk` tokens, of which indexers pick all).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.deepseek_v3 import ROUTER, read_latent_base
from mlcpipe.models.deepseek_v32 import indexed, without_picks
from mlcpipe.models.glm4_moe import NAMES
from mlcpipe.nn.base_config import Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.norm import NormSpec

__all__ = ["NAMES", "build"]

DEFAULTS = Defaults(positions=202752, norm=NormSpec(eps=1e-5))
NOPE = 192


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GLM 5 config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(without_picks(config), DEFAULTS, ROUTER, nope=NOPE)
    return indexed(base, config, groups=(1, 1), q_rank=2048, nope=NOPE, value=256)
