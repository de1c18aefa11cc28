"""Another way to SPIR-V, to compare with: TVM's generator of WGSL, and naga, which Firefox and wgpu compile it with.

A process of its own compiles so, `python -m tests.spirv.naga CHECKPOINT TARGET.toml QUANTIZATION OUTPUT`: it gives TVM's
target kind `vulkan` the rules of `webgpu`, which would stay.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlcpipe.devices.support.driver_check import PREFIX
from tests.vulkan.kernels import pack

_PACKAGES = Path(__file__).parents[1] / "webgpu"
_TIMEOUT_S = 240
_SCALARS = ("int32", "uint32", "float32")


def missing() -> str:
    """Why naga cannot run here, "" if it can."""
    if shutil.which("node") is None:
        return "node is not installed"
    if not (_PACKAGES / "node_modules" / "naga-wasm").is_dir():
        return "no package naga-wasm: npm ci --prefix tests/webgpu"
    return ""


def _translated(sources: Sequence[str]) -> list[bytes]:
    """SPIR-V of WGSL."""
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("naga.mjs")), str(_PACKAGES)],
        input=json.dumps(sources), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [base64.b64decode(module) for module in json.loads(done.stdout)]


def _for_vulkan(wgsl: str) -> str:
    """TVM's WGSL with its numbers as push constants, and without the test against the size of a grid that is folded."""
    wgsl = wgsl.replace("enable subgroups;\n", "")
    wgsl, count = re.subn(r"@group\(0\) @binding\(\d+\) var<uniform> podArgs", "var<immediate> podArgs", wgsl)
    wgsl, folded = re.subn(r"podArgs\.packGridDimX", "4294967295u", wgsl)
    assert (count, folded) == (1, 1), wgsl[:2000]
    return re.sub(r"^fn \w+\(", "fn main(", wgsl, flags=re.MULTILINE)


def _entry(name: str, facts: Mapping[str, Any], wgsl: str, offset: int, size: int) -> dict[str, Any]:
    """What the plugin must know of a kernel: TVM's description, in its words."""
    tags = [str(tag) for tag in facts["launch_param_tags"]]
    writes = json.loads(next(tag for tag in tags if tag.startswith("paramWriteAccess")).split(":", 1)[1])
    kinds = list(facts["arg_types"])
    buffers = [i for i, kind in enumerate(kinds) if kind == "handle"]
    numbers = [i for i, kind in enumerate(kinds) if kind != "handle"]
    assert all(kinds[i] in _SCALARS for i in numbers), kinds
    sizes = re.search(r"@workgroup_size\((\d+), (\d+), (\d+)\)", wgsl)
    assert sizes is not None
    return {
        "name": name,
        "entry": "main",
        "spirv_offset": offset,
        "spirv_bytes": size,
        "buffers": [
            {"arg": i, "write": bool(written), "dtype": "float32"} for i, written in zip(buffers, writes, strict=True)
        ],
        "scalars": [
            {"arg": i, "dtype": kinds[i], "stored": kinds[i], "offset": 4 * at} for at, i in enumerate(numbers)
        ],
        "grid_base": None,
        "push_constant_bytes": 4 * len(numbers) + 4,
        "workgroup": [int(extent) for extent in sizes.groups()],
        "launch_params": [tag for tag in tags if not tag.startswith("paramWriteAccess")],
        "shared_bytes": 0,
        "subgroup_size": 0,
        "features": [],
    }


def _build(mod: Any, target: Any) -> Any:
    """The code generator: a runtime module of the plugin."""
    import tvm

    from mlcpipe.devices import vulkan

    generate = tvm.get_global_func("target.build.webgpu")
    limits = {key: int(target.attrs[key]) for key in ("max_num_threads", "max_shared_memory_per_block")}
    names, facts, sources = [], [], []
    for gv, func in mod.functions.items():
        made = generate(tvm.IRModule({gv: func}, attrs=mod.attrs), tvm.target.Target({"kind": "webgpu", **limits}))
        ((name, described),) = json.loads(made.inspect_source("func_info")).items()
        names.append(name)
        facts.append(described)
        sources.append(_for_vulkan(made.inspect_source("wgsl")))
    entries, code = [], b""
    for name, described, source, module in zip(names, facts, sources, _translated(sources)):
        entries.append(_entry(name, described, source, len(code), len(module)))
        code += module
    return vulkan.function("create_module")(pack({"format": 1, "kernels": entries}, code))


def _register() -> None:
    """Rules of WGSL's functions, and the code generator, for kind `vulkan` in this process."""
    import tvm
    import tvm_ffi

    for name in tvm.ir.Op.list_op_names():
        rule = tvm.ir.Op.get(name).get_attr("webgpu.FLowerIntrinsic")
        if rule is not None:
            tvm.ir.op.register_op_attr(name, "vulkan.FLowerIntrinsic", rule)
    tvm_ffi.register_global_func("target.build.vulkan", _build, override=True)


def compiled(checkpoint: Path, target: Path, quantization: str, output: Path) -> Path:
    """A bundle whose kernels came through naga."""
    words = [sys.executable, "-m", "tests.spirv.naga", str(checkpoint), str(target), quantization, str(output)]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def _main(checkpoint: str, target: str, quantization: str, output: str) -> None:
    import mlcpipe
    from mlcpipe.compiler import device_library, driver_check
    from mlcpipe.compiler.backends.spirv import codegen as build

    device_library.kernel_store = lambda dump: None  # it has kernels of another code generator
    build.register = _register
    # The driver check has vectors, which TVM's rules for WGSL do not take.
    functions, plain = driver_check.functions, PREFIX + "arithmetic"
    driver_check.functions = lambda target, *, float16: {plain: functions(target, float16=float16)[plain]}
    mlcpipe.compile(
        checkpoint, target=target, quantization=quantization, output=output, context_length=128, kv_cache_dtype="f32"
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
