"""How checkpoints name the tensors of a model: published files keep the names that their first program gave them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

DRAFTS = "mtp.layer"  # the layer of a model's own draft head, whose modules have the names of other layers'
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class CheckpointNames:
    """The checkpoints' names of the tensors `model.…` and `lm_head.…`.

    `prefixes`: alternatives for `model.`, of which the first that fits counts. `unused`: beginnings of names of tensors
    that no step needs, after the prefix or without it. `top` renames modules outside the layers and `layers` itself,
    `layer` those of a layer, with all inside them; "{}" stands for a number, and the longest name that fits counts.
    `also`: parts of published names -> what some files have in their place. `turned`: how modules end whose matrices
    safetensors files have as [in, out]. `draft_norm`: the last norm of a layer that drafts.
    """

    prefixes: tuple[str, ...] = ("model.", "")
    unused: tuple[str, ...] = ()
    top: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    turned: tuple[str, ...] = ()
    draft_norm: str = "shared_head.norm"

    def published(self, name: str) -> str:
        """The checkpoint's name of a tensor, still with `model.` instead of a prefix."""
        head, _, rest = name.partition(".")
        if name.startswith(f"{DRAFTS}."):
            module, _, part = name.rpartition(".")
            if module in self.top:
                return f"{self.top[module]}.{part}"
            return f"{self.top[DRAFTS]}.{_renamed(name.removeprefix(f'{DRAFTS}.'), self.layer)}"
        if head != "model":
            return _renamed(name, self.top)
        if not rest.startswith("layers."):
            return f"model.{_renamed(rest, self.top)}"
        _, number, inner = rest.split(".", 2)
        return f"model.{self.layers}.{number}.{_renamed(inner, self.layer)}"

    def candidates(self, name: str) -> list[str]:
        """The names that a tensor of the model may have, by prefix; the first is the usual one."""
        published = self.published(name)
        if not published.startswith("model."):
            return [published]
        return [prefix + published.removeprefix("model.") for prefix in self.prefixes]

    def with_draft_layer(self, layers: int) -> CheckpointNames:
        """Where the family says no other, the layer that drafts is the one after the last of `layers`."""
        layer = f"model.{self.layers}.{layers}"
        usual = {"mtp": layer, DRAFTS: layer, "mtp.norm": f"{layer}.{self.draft_norm}"}
        return self if DRAFTS in self.top else replace(self, top={**self.top, **usual})

    @property
    def layers(self) -> str:
        """The name of the list of layers."""
        return self.top.get("layers", "layers")


def _renamed(path: str, table: Mapping[str, str]) -> str:
    """A path of modules with its longest beginning that is in the table replaced."""
    numbers, parts = _NUMBER.findall(path), _NUMBER.sub("{}", path).split(".")
    for count in range(len(parts), 0, -1):
        if (found := table.get(".".join(parts[:count]))) is not None:
            renamed = ".".join([found, *parts[count:]])
            return renamed.format(*numbers) if numbers else renamed
    return path
