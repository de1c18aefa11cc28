"""Merges GPU kernels that differ only in their names.

Each kernel is a shader that a browser or a driver compiles before the first token. Matrix products whose sizes are
arguments need only one, and so do the passes of a sort.
"""

from __future__ import annotations

from collections import defaultdict

import tvm
from tvm import tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_equal, structural_hash, structural_map

from mlcpipe.passes.lowering import ANY_GRID, KernelModule

_ANY_EXTENT = 2**31 - 1
_CALL = "tirx.call_ffi_kernel"  # its first argument is the kernel's name
_LAUNCHED = 2  # calling convention of kernels: tvm's kDeviceKernelLaunch


def dedupe_kernels(state: KernelModule) -> KernelModule:
    """Keep the first of equal kernels, and let host functions launch it."""
    first: dict[int, list[tuple[str, tirx.PrimFunc]]] = defaultdict(list)
    names: dict[str, str] = {}  # of a kernel -> of the kernel that replaces it
    functions = {}
    for gv, func in state.mod.functions.items():
        if int(func.attrs.get("calling_conv", 0)) != _LAUNCHED:
            functions[gv] = func
            continue
        func = _without_extents(func)
        name, code = str(func.attrs["global_symbol"]), func.without_attr("global_symbol")
        same = first[structural_hash(code, map_free_vars=True)]
        names[name] = next((other for other, body in same if structural_equal(body, code, map_free_vars=True)), name)
        if names[name] == name:
            same.append((name, code))
            functions[gv] = func
    return state.with_mod(_renamed(tvm.IRModule(functions, attrs=state.mod.attrs), names))


def _without_extents(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with constant extents of its arguments and grid.

    Arguments are flat and kernels read neither their extents nor the grid's. Only the host does, and its
    expressions may differ.
    """
    known: dict[tvm.ir.Var, tvm.ir.Var] = {}

    def flat(var: tvm.ir.Var) -> tvm.ir.Var:
        if not is_buffer_var(var) or all(isinstance(extent, tirx.IntImm) for extent in var.shape):
            return var
        if var not in known:
            known[var] = tirx.decl_buffer((_ANY_EXTENT,), str(var.dtype), var.name, scope=var.scope())
        return known[var]

    def grid(attr: tirx.AttrStmt) -> tirx.AttrStmt:
        if attr.attr_key != "thread_extent" or isinstance(attr.value, tirx.IntImm):
            return attr
        return tirx.AttrStmt(attr.node, attr.attr_key, tirx.const(ANY_GRID, "int32"), attr.body, attr.span)

    return structural_map(kernel, ((tvm.ir.Var, flat), (tirx.AttrStmt, grid)))


def _renamed(mod: tvm.IRModule, names: dict[str, str]) -> tvm.IRModule:
    """The module with calls to the remaining kernels."""

    def rename(call: tvm.ir.Call) -> tvm.ir.Call:
        if getattr(call.op, "name", "") != _CALL:
            return call
        name = str(call.args[0].value)
        if names[name] == name:
            return call
        args = [tvm.ir.StringImm(names[name]), *call.args[1:]]
        return tvm.ir.Call(call.op, args, attrs=call.attrs, span=call.span, ret_ty=call.ty)

    functions = {gv: structural_map(func, (tvm.ir.Call, rename)) for gv, func in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs)
