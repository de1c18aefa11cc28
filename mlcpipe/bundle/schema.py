"""The base of the models of the bundle's JSON files: strict, frozen, no unknown fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mlcpipe.support.json_files import Items, OnlyKnown

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Names = Items[Name]


class Frozen(OnlyKnown, BaseModel):
    """The base of all parts of a manifest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
