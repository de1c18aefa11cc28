"""Models that come with code of their own, `auto_map`, whose layers are Llama's: they get its `model_type`.

What else their tensors or fields say is refused as of any Llama.
"""

from __future__ import annotations

from dataclasses import replace

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.nn.config import Fields

# InternLM 3 (Shanghai AI Laboratory 2025), Yi's first files, Aquila, XVERSE.
LLAMAS = ("internlm3", "Yi", "aquila", "xverse")
_CODE = "auto_map"


def known(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as one of Llama, or the same one. Raises ConfigError for biases that Llama does not have."""
    config = checkpoint.config
    if config.get("model_type") not in LLAMAS or _CODE not in config:
        return checkpoint
    bias = Fields(config).flag("bias", False)
    Fields(config).refuse(qkv_bias=[None, bias])
    stated = {name: value for name, value in config.items() if name not in (_CODE, "architectures")}
    biases = {"attention_bias": bias, "mlp_bias": bias} if "bias" in config else {}
    return replace(checkpoint, config={**stated, "model_type": "llama", **biases})
