"""The code generator `target.build.vulkan`: device functions -> SPIR-V and facts for the host -> a runtime module.

Format of the container that `mlcpipe.vulkan.create_module` reads, little-endian: uint64 header length; header, JSON
padded with spaces to a multiple of 8; the kernels' code, at offsets from the header's end that are multiples of 4.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import tvm
import tvm_ffi

from mlcpipe.compiler.backends.spirv import lowering
from mlcpipe.compiler.backends.spirv.kernel import ENTRY, Kernel, compile_kernel
from mlcpipe.errors import CompileError

FORMAT = 1
_CREATE = "mlcpipe.vulkan.create_module"


def register() -> None:
    """Make this the code generator of TVM's target kind `vulkan`, in this process."""
    lowering.install()
    tvm_ffi.register_global_func("target.build.vulkan", build_vulkan, override=True)


def build_vulkan(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
    """The runtime module of device functions. Raises CompileError for a kernel, or if the plugin is not loaded."""
    create = tvm.get_global_func(_CREATE, allow_missing=True)
    if create is None:
        raise CompileError("no Vulkan runtime is loaded", where="target vulkan", next_step="see mlcpipe doctor")
    return create(container(compile_module(mod, target)))


def compile_module(mod: tvm.IRModule, target: tvm.target.Target) -> list[Kernel]:
    """Compile a module of device functions. Raises CompileError for a kernel beyond the target's limits."""
    kernels = []
    for variable, func in mod.functions.items():
        kernel = compile_kernel(func, str(func.attrs.get("global_symbol", variable.name_hint)))
        _check(kernel, target)
        kernels.append(kernel)
    return kernels


def _check(kernel: Kernel, target: tvm.target.Target) -> None:
    x, y, z = kernel.workgroup
    for what, value, key in (
        ("invocations of a workgroup", x * y * z, "max_num_threads"),
        ("bytes of shared memory", kernel.shared_bytes, "max_shared_memory_per_block"),
    ):
        limit = target.attrs.get(key)
        if limit is not None and value > int(limit):
            raise CompileError(f"too many {what}", where=kernel.name, expected=f"at most {limit}", found=value)


def container(kernels: Sequence[Kernel]) -> bytes:
    """The kernels in the format that the runtime reads."""
    entries, at = [], 0
    for kernel in kernels:
        facts = asdict(kernel)
        code = facts.pop("code")
        base = facts.pop("grid_base")
        facts["grid_base"] = None if base is None else {"offset": base}
        entries.append({**facts, "entry": ENTRY, "spirv_offset": at, "spirv_bytes": len(code)})
        at += len(code)
    header = json.dumps({"format": FORMAT, "kernels": entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + b"".join(kernel.code for kernel in kernels)
