"""EuroBERT (Boizard et al. 2025): a Llama whose tokens attend to all others.

Models: EuroBERT 210M, 610M, 2.1B and embedding models made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.config import Fields
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.encoder_config import check_encoder
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.text_encoder import DecoderEncoder, TextEncoder

DEFAULTS = Defaults(positions=8192, norm=NormSpec(eps=1e-5))


def build(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for a EuroBERT config.json. Raises ConfigError for unsupported fields."""
    check_encoder(Fields(config), ("EuroBertModel", "EuroBertForMaskedLM"))
    base = read_base({name: value for name, value in config.items() if name != "architectures"}, DEFAULTS)
    bias, mlp_bias = base.fields.flag("attention_bias", False), base.fields.flag("mlp_bias", False)
    specs = base.attentions(qkv_bias=bias, o_bias=bias)
    model = decoder(replace(base, tied=True), specs, lambda i: base.mlp(bias=mlp_bias))
    return DecoderEncoder(model, bidirectional=True)
