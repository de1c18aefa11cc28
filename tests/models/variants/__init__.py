"""The options of each family that its default configuration leaves out, as fields on top of `tiny.SIZES`.

`hub` writes config.json in the style of transformers 4. Rotary lengths are small enough that the tests' 84 tokens
cross them. Soft caps are small so that tanh bends; windows are smaller than the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.variants import dense, experts, latent, recurrent

_KINDS = (dense, latent, experts, recurrent)
# Fields of all cases of a family, beside `tiny.SIZES`.
OWN: Mapping[str, Mapping[str, Any]] = {name: fields for kind in _KINDS for name, fields in kind.OWN.items()}
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    name: cases for kind in _KINDS for name, cases in kind.VARIANTS.items()
}
