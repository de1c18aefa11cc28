"""Checks the memory plan against the device's binding limit."""

from __future__ import annotations

from tvm import relax

from mlcpipe.errors import TargetError
from mlcpipe.passes.lowering import Lowering, storage_bytes

# Functions that hosts call with up to the planned number of tokens.
_STEPS = (
    *("embed", "prefill", "decode"),
    *("forward_few", "forward_many", "forward_few_adapted", "forward_many_adapted", "embed_texts"),
)


def check_bindings(state: Lowering) -> Lowering:
    """Raise TargetError for a storage that the device cannot bind."""
    limit = state.target.limits.get("max_binding_bytes")
    for gv, func in state.mod.functions.items():
        if limit is None or gv.name_hint not in _STEPS or not isinstance(func, relax.Function):
            continue
        largest = max(storage_bytes(func), default=0)
        if largest > limit:
            raise TargetError(
                f"the workspace of {gv.name_hint} does not fit a binding",
                where=state.target.name,
                expected=f"{limit:,} bytes or less",
                found=f"{largest:,} bytes",
                next_step="lower limits.max_prefill_chunk in your own target file",
            )
    return state
