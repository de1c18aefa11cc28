"""Families of models by what their code is made of: tests of one path for all families compile one of each kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models import build_model, model_types
from tests.models.tiny import TinyCase, tiny_config


def first_of_each_kind(families: Iterable[str] | None = None, *, options: bool = True) -> list[str]:
    """Of all families, or some, those with a block or an option of one that none before has: the others differ in sizes.

    Without `options` blocks and their parameters alone count.

    A new family of known blocks is not among them: its parity is in `test_parity.py`.
    """
    first, seen = [], set[str]()
    for family in sorted(families or model_types(), key=lambda name: (name != "llama", name)):
        found = {trait for trait in _traits(family) if options or "=" not in trait}
        if found - seen:
            first.append(family)
            seen |= found
    return first


def new_kinds(cases: Iterable[TinyCase]) -> list[TinyCase]:
    """Those with a trait that none before has; the default cases come before all others."""
    found, seen = [], set[str]()
    for case in sorted(cases, key=lambda case: case.variant != "default"):
        own = traits(build_model(tiny_config(case).to_dict()))
        if own - seen:
            found.append(case)
            seen |= own
    return found


@cache
def _traits(family: str) -> set[str]:
    return traits(build_model(tiny_config(TinyCase(family, "default")).to_dict()))


def traits(block: nn.Module) -> set[str]:
    """What chooses a block's code: classes of it and its parts, their parameters, and which of their options are on."""
    kind = type(block).__name__
    found = {kind}
    for name, value in vars(block).items():
        for one in value if isinstance(value, list) else [value]:
            found |= traits(one) if isinstance(one, nn.Module) else set(_options(f"{kind}.{name}", one))
    return found


def _options(name: str, value: Any) -> Iterable[str]:
    if isinstance(value, nn.Parameter):
        yield name
    elif is_dataclass(value):
        for field in fields(value):
            if field.name != "model_type":
                yield from _options(f"{type(value).__name__}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        yield f"{name} differs={len(set(value)) > 1}"
        for one in filter(is_dataclass, value):
            yield from _options(name, one)
    elif isinstance(value, str) or callable(value):
        yield f"{name}={getattr(value, '__name__', value)}"
    else:
        yield f"{name}={value if isinstance(value, bool) else value not in (None, 0, 1)}"
