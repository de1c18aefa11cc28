"""What a draft head adds to a model: parameters, and functions of the library that a host drafts with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor


class DraftHead:
    """`module` has the parameters, which `parameter` names in the model; a step without drafts reads none of them.

    The head reads rows that the model's forwards keep: the inputs of `layers`, then what the model's logits come from.
    `prompts`: those of prompts, too. `model` is the CausalLM that has the head, once it has its dtypes.
    """

    parameter: str
    module: nn.Module
    layers: tuple[int, ...] = ()
    prompts = False

    def kept_size(self, model: Any) -> int:
        """Numbers of a row that is kept."""
        return (len(self.layers) + 1) * int(model.facts.hidden_size)

    def functions(self, model: Any) -> Mapping[str, Callable[..., Tensor]]:
        """The functions of the library, by name."""
        raise NotImplementedError

    def spec(self, model: Any) -> dict[str, Any]:
        """Argument specifications of `functions`, for `nn.Module.export_tvm`."""
        raise NotImplementedError
