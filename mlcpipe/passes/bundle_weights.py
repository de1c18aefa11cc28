"""Bundles the weights into one argument."""

from __future__ import annotations

import tvm
from tvm import relax

from mlcpipe.passes.lowering import Lowering


def bundle_weights(state: Lowering) -> Lowering:
    """Model functions take their weights as one tuple, the last argument."""
    mod = tvm.IRModule(dict(state.mod.functions))
    for gv, func in state.mod.functions.items():
        if isinstance(func, relax.Function) and len(func.params) == int(func.attrs["num_input"]):
            mod[gv] = func.without_attr("num_input")
    return state.with_mod(relax.transform.BundleModelParams("packed_params")(mod))
