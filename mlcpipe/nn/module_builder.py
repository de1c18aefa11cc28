"""Building the modules of models, whose layers call the same functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.exporter import Exporter
from tvm.relax.frontend.nn.spec import ModuleSpec


class ModuleBuilder(relax.BlockBuilder):  # type: ignore[misc]
    """Knows each function that it was given; TVM's own reads all of its code to see whether the module has it."""

    def __init__(self, mod: tvm.IRModule | None = None) -> None:
        super().__init__(mod)
        self._added: dict[int, tuple[tvm.ir.BaseFunc, tvm.ir.GlobalVar]] = {}

    def add_func(self, func: tvm.ir.BaseFunc, func_name: str) -> tvm.ir.GlobalVar:
        if id(func) not in self._added:
            self._added[id(func)] = func, super().add_func(func, func_name)
        return self._added[id(func)][1]


def exported(model: nn.Module, spec: Mapping[str, Any]) -> tuple[tvm.IRModule, list[tuple[str, nn.Parameter]]]:
    """What `model.export_tvm(spec)` gives: the module, and the parameters by name."""
    exporter = Exporter(debug=False)
    exporter.builder = ModuleBuilder()
    mod, params, _ = exporter.build(ModuleSpec.from_raw(spec, model))
    return mod, params
