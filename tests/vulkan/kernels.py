"""Small kernels in GLSL for tests of the plugin, which knows nothing of where SPIR-V comes from, and modules of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HEAD = "#version 450\nlayout(local_size_x = {x}) in;\n"


@dataclass(frozen=True)
class Kernel:
    """A kernel: its buffers come first among the arguments, then its scalars, then the extents of `launch`."""

    name: str
    glsl: str
    buffers: tuple[bool, ...]  # whether each is written
    scalars: tuple[tuple[str, int], ...] = ()  # type and offset in the push constants
    push_bytes: int = 0
    threads: int = 64
    launch: tuple[str, ...] = ("blockIdx.x", "threadIdx.x")
    extra: dict[str, Any] = field(default_factory=dict)


ADD = Kernel(
    "add",
    """layout(set = 0, binding = 0) buffer A { float a[]; };
    layout(set = 0, binding = 1) buffer B { float b[]; };
    layout(set = 0, binding = 2) buffer C { float c[]; };
    layout(push_constant) uniform P { int n; float scale; };
    void main() { uint i = gl_GlobalInvocationID.x; if (i < n) c[i] = a[i] + scale * b[i]; }""",
    (False, False, True),
    (("int32", 0), ("float32", 4)),
    8,
)

INCREMENT = Kernel(
    "increment",
    """layout(set = 0, binding = 0) buffer A { int a[]; };
    layout(push_constant) uniform P { int n; };
    void main() { uint i = gl_GlobalInvocationID.x; if (i < n) a[i] += 1; }""",
    (True,),
    (("int32", 0),),
    4,
)

# Writes the number of each workgroup, wherever the plugin cut a launch into dispatches.
NUMBER = Kernel(
    "number",
    """layout(set = 0, binding = 0) buffer A { uint a[]; };
    layout(push_constant) uniform P { uint base; };
    void main() { uint group = base + gl_WorkGroupID.x; a[group] = group; }""",
    (True,),
    (),
    4,
    threads=1,
    extra={"grid_base": {"offset": 0}},
)

SUBGROUP = Kernel(
    "subgroup",
    """layout(set = 0, binding = 0) buffer A { uint a[]; };
    void main() { a[gl_GlobalInvocationID.x] = subgroupAdd(1u); }""",
    (True,),
    extra={"features": ["subgroupBasic", "subgroupArithmetic"]},
)


def spirv(kernel: Kernel, folder: Path) -> bytes:
    """A kernel as SPIR-V 1.5."""
    extensions = "#extension GL_KHR_shader_subgroup_arithmetic : enable\n"
    head = HEAD.format(x=kernel.threads)
    source, output = folder / f"{kernel.name}.comp", folder / f"{kernel.name}.spv"
    source.write_text(head.replace("\n", "\n" + extensions, 1) + kernel.glsl)
    command = ["glslangValidator", "-V", "--target-env", "vulkan1.2", "-o", str(output), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return output.read_bytes()


def entry(kernel: Kernel, offset: int, size: int) -> dict[str, Any]:
    """The kernel's part of the header."""
    count = len(kernel.buffers)
    scalars = [{"arg": count + i, "dtype": t, "offset": at} for i, (t, at) in enumerate(kernel.scalars)]
    fields = {
        "name": kernel.name,
        "entry": "main",
        "spirv_offset": offset,
        "spirv_bytes": size,
        "buffers": [{"arg": i, "write": write, "dtype": "float32"} for i, write in enumerate(kernel.buffers)],
        "scalars": scalars,
        "push_constant_bytes": kernel.push_bytes,
        "workgroup": [kernel.threads, 1, 1],
        "launch_params": list(kernel.launch),
        "shared_bytes": 0,
        "subgroup_size": 0,
        "features": [],
    }
    return {**fields, **kernel.extra}


def pack(header: dict[str, Any], code: bytes) -> bytes:
    """Header and code in the module's format (`mlcpipe/native/vulkan/kernel.h`)."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + code


def module_bytes(kernels: Sequence[Kernel], folder: Path) -> bytes:
    entries, code = [], b""
    for kernel in kernels:
        blob = spirv(kernel, folder)
        entries.append(entry(kernel, len(code), len(blob)))
        code += blob
    return pack({"format": 1, "kernels": entries}, code)


def with_extra(kernel: Kernel, **fields: Any) -> Kernel:
    """A kernel whose header has other fields."""
    return replace(kernel, extra={**kernel.extra, **fields})
