"""Code for kernels of a device: as `tvm.tirx.build`, but kernels that differ only in their names are one.

Each kernel is a shader that a browser or a driver compiles before the first token; products of matrices whose sizes are
arguments, and passes of a sort, need only one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import tvm
from tvm import tirx
from tvm.tirx.buffer import is_buffer_var
from tvm.tirx.build import split_host_device_mods, tir_to_runtime
from tvm_ffi import structural_equal, structural_hash, structural_map

_MANY = 2**31 - 1
# Kinds whose compilers find common terms. In a variable TVM does not see that an index is a multiple of 4, and loads
# numbers one by one that lie in one vector.
_MERGE_THEMSELVES = ("cuda", "metal", "opencl")
_CALL = "tirx.call_ffi_kernel"  # its first argument is the kernel's name


def build_kernels(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
    """The module of the host's code, which imports the device's. `target` has a host."""
    mod = tirx.transform.BindTarget(target)(mod)
    pipeline, finish_host, finish_device = tirx.get_default_tir_pipeline(target)
    with _as_written():
        mod = pipeline(mod)
    host, devices = split_host_device_mods(mod)
    names: dict[str, str] = {}
    devices = {one: _shared(kernels, names) for one, kernels in devices.items()}
    common = [] if target.kind.name in _MERGE_THEMSELVES else [tirx.transform.CommonSubexprElim()]
    finish = tvm.transform.Sequential([finish_device(), *common])
    return tir_to_runtime(
        finish_host()(_renamed(host, names)),
        {one: finish(kernels) for one, kernels in devices.items()},
        target.host,
    )


def _as_written() -> tvm.transform.PassContext:
    """The present context, without two passes that make kernels depend on the others of their function.

    What kernels have in common would become arguments of theirs. And a workspace would shrink to what they are seen to
    touch, an expression of many terms, which are those of its indices then.
    """
    now = tvm.transform.PassContext.current()
    return tvm.transform.PassContext(
        opt_level=now.opt_level,
        required_pass=now.required_pass,
        disabled_pass=[*now.disabled_pass, "s_tir.CompactBufferAllocation"],
        config={**now.config, "tirx.disable_cse_tir": True},
    )


def _shared(kernels: tvm.IRModule, names: dict[str, str]) -> tvm.IRModule:
    """The kernels without repetitions; `names` gets the name of the one that stays for each."""
    first: dict[int, list[tuple[str, tirx.PrimFunc]]] = defaultdict(list)
    kept = {}
    for gv, func in kernels.functions.items():
        func = _without_extents(func)
        name, code = str(func.attrs["global_symbol"]), func.without_attr("global_symbol")
        same = first[structural_hash(code, map_free_vars=True)]
        names[name] = next((other for other, its in same if structural_equal(its, code, map_free_vars=True)), name)
        if names[name] == name:
            same.append((name, code))
            kept[gv] = func
    return tvm.IRModule(kept, attrs=kernels.attrs)


def _without_extents(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with numbers for extents of its arguments and of the grid.

    The arguments are flat, and nothing in a kernel reads their extents or the grid's: they are the host's, which may
    know other expressions for them.
    """
    known: dict[tvm.ir.Var, tvm.ir.Var] = {}

    def flat(var: tvm.ir.Var) -> tvm.ir.Var:
        if not is_buffer_var(var) or all(isinstance(extent, tirx.IntImm) for extent in var.shape):
            return var
        if var not in known:
            known[var] = tirx.decl_buffer((_MANY,), str(var.dtype), var.name, scope=var.scope())
        return known[var]

    def grid(attr: tirx.AttrStmt) -> tirx.AttrStmt:
        if attr.attr_key != "thread_extent" or isinstance(attr.value, tirx.IntImm):
            return attr
        return tirx.AttrStmt(attr.node, attr.attr_key, tirx.const(_MANY, "int32"), attr.body, attr.span)

    return structural_map(kernel, ((tvm.ir.Var, flat), (tirx.AttrStmt, grid)))


def _renamed(host: tvm.IRModule, names: dict[str, str]) -> tvm.IRModule:
    """The host's functions, which call the kernels that stayed."""

    def rename(call: tvm.ir.Call) -> tvm.ir.Call:
        if getattr(call.op, "name", "") != _CALL:
            return call
        name = str(call.args[0].value)
        if names[name] == name:
            return call
        args = [tvm.ir.StringImm(names[name]), *call.args[1:]]
        return tvm.ir.Call(call.op, args, attrs=call.attrs, span=call.span, ret_ty=call.ty)

    functions = {gv: structural_map(func, (tvm.ir.Call, rename)) for gv, func in host.functions.items()}
    return tvm.IRModule(functions, attrs=host.attrs)
