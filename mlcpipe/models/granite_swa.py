"""Granite Swash (IBM 2026): Granite with a window in three of four layers, sinks in all, and a theta by layer.

Models: Granite Swash 2B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.granite import multiplied
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows, rope_table
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=8192, num_kv_heads=4, norm=NormSpec(eps=1e-5), tied=True)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Granite Swash config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS)
    fields, count = base.fields, base.num_layers
    bias = fields.flag("mlp_bias", False)
    windows = layer_windows(fields, fields.optional_integer("sliding_window", 128), [i % 4 > 0 for i in range(count)])
    thetas, table = layer_thetas(base), rope_table(fields)
    known = sorted({one for one in thetas if one}) or [base.theta]
    original = fields.optional_integer("original_max_position_embeddings", None, low=2)
    return multiplied(
        base,
        lambda i: base.mlp(bias=bias),
        lambda i, attention: replace(attention, window=windows[i], sinks=True),
        ropes=[base.read_rope({**table, "rope_theta": theta}, theta, original=original) for theta in known],
        rope_of=[known.index(one) if one else 0 for one in thetas],
        rotated=[one > 0 for one in thetas],
    )


def layer_thetas(base: BaseConfig, without: tuple[int, ...] = ()) -> list[float]:
    """The theta of each layer, 0 for one without RoPE: without a list in the file, for the layers `without`."""
    fields, count = base.fields, base.num_layers
    theta = float(rope_table(fields).get("rope_theta") or base.theta)
    stated = fields.get("layer_rope_theta", [0.0 if i in without else theta for i in range(count)])
    good = isinstance(stated, list) and len(stated) == count
    if not good or not all(type(one) in (int, float) and (one == 0 or 1 <= one <= 1e12) for one in stated):
        expected = f"{count} numbers that are 0 or at least 1"
        raise ConfigError("field layer_rope_theta", where=fields.where, expected=expected, found=stated)
    return [float(one) for one in stated]
