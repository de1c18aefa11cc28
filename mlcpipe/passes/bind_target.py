"""Binds kernels to their target."""

from __future__ import annotations

from tvm import tirx

from mlcpipe.passes.lowering import KernelModule


def bind_target(state: KernelModule) -> KernelModule:
    """Set the target of every function; a target without a host (a CPU) is its own host."""
    target = state.tvm_target
    bind = tirx.transform.BindTarget(target if target.host is not None else target.with_host(target))
    return state.with_mod(bind(state.mod))
