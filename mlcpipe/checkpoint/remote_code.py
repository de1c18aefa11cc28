"""Models that come with code of their own, `auto_map`, whose layers are those of a family: they get its `model_type`.

What else their tensors or fields say is refused as of any model of that family.
"""

from __future__ import annotations

from dataclasses import replace

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.nn.config import Fields

# InternLM 3 (Shanghai AI Laboratory 2025), Yi's first files, Aquila, XVERSE.
LLAMAS = ("internlm3", "Yi", "aquila", "xverse")
_SAME = {"kimi_k2": "deepseek_v3", "Dream": "dream"}
_CODE = "auto_map"


def known(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as one of its family, or the same one. Raises ConfigError for biases that Llama does not have."""
    config = checkpoint.config
    if (family := _SAME.get(str(config.get("model_type")))) is not None:
        return replace(checkpoint, config={**config, "model_type": family})
    if config.get("model_type") not in LLAMAS or _CODE not in config:
        return checkpoint
    bias = Fields(config).flag("bias", False)
    Fields(config).refuse(qkv_bias=[None, bias])
    stated = {name: value for name, value in config.items() if name not in (_CODE, "architectures")}
    biases = {"attention_bias": bias, "mlp_bias": bias} if "bias" in config else {}
    return replace(checkpoint, config={**stated, "model_type": "llama", **biases})
