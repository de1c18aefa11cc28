"""The parameters and library functions that a draft head adds to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor


class DraftHead:
    """`module` has the parameters, named `parameter` in the model; a step without drafts reads none of them.

    The head reads rows that the model's forwards keep: the inputs of `layers`, then the input of the model's logits.
    `prompts`: also in prefill. `model` in the methods is the CausalLM with the head, after its dtypes are set.
    """

    parameter: str
    module: nn.Module
    layers: tuple[int, ...] = ()
    prompts = False

    def kept_size(self, model: Any) -> int:
        """Length of a kept row."""
        return (len(self.layers) + 1) * int(model.facts.hidden_size)

    def functions(self, model: Any) -> Mapping[str, Callable[..., Tensor]]:
        """The functions of the library, by name."""
        raise NotImplementedError

    def spec(self, model: Any) -> dict[str, Any]:
        """Argument specifications of `functions`, for `nn.Module.export_tvm`."""
        raise NotImplementedError
