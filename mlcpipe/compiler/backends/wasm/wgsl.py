"""Replaces calls in TVM's WGSL by subgroup builtins (https://www.w3.org/TR/WGSL/#subgroup-builtin-functions).

TVM emits the function names of `tir_schedules/gpu/device_calls.py` unchanged, loads single elements, and offers no hook
to change that. So we edit the kernels where TVM stored them, in an object file: the WGSL text is shorter, and spaces
fill the rest.

WGSL does not define which invocations form a subgroup. In workgroups of one dimension every implementation takes
adjacent ones; a builtin states their order. WGSL also requires a proof that subgroup operations are in uniform control
flow. A loop whose count comes from a table offers none, so a diagnostic filter turns the check off. The schedules
guarantee uniformity (`device_calls.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mlcpipe.errors import CompileError

_PREFIX = "mlcpipe."
_RULE = "//----------------------------------------\n"
_FUNCTION = "// Function: "
_NAMED = _RULE + _FUNCTION
_ENABLE = "enable subgroups;\n"
_DIRECTIVES = _ENABLE + "diagnostic(off, subgroup_uniformity);\n"
_REQUIRED = re.compile(r"^ *mlcpipe\.require_subgroup_size\((\d+)i\);\n", re.MULTILINE)
_SHUFFLE = re.compile(r"mlcpipe\.subgroup_shuffle\(")
_XOR = re.compile(r"mlcpipe\.subgroup_shuffle_xor\(([^()]*), (\d+)i\)")
_CLUSTER = re.compile(r"mlcpipe\.subgroup_cluster_(add|max)\(([^()]*), (\d+)i\)")
_REDUCTION = re.compile(r"mlcpipe\.subgroup_(add|max)\(")
_BUFFER = re.compile(r"^@group\(0\) @binding\(\d+\) var<storage", re.MULTILINE)
_LAST_ARGUMENT = "  @builtin(local_invocation_id) threadIdx : vec3<u32>\n"
_LANE = "  @builtin(subgroup_invocation_id) lane_ : u32\n"


def kernel_of(generated: str) -> str:
    """The kernel as browsers accept it, unchanged if it has no such calls. Raises CompileError for an unknown call."""
    if _PREFIX not in generated:
        return generated
    sizes = set(map(int, _REQUIRED.findall(generated)))
    if len(sizes) != 1:
        raise CompileError("wrong subgroup sizes", where=_name(generated), expected="one size", found=sorted(sizes))
    (size,) = sizes

    def of_all(match: re.Match[str]) -> str:
        return f"{_reduction(match[1])}({match[2]})" if int(match[3]) == size else match[0]

    text = _DIRECTIVES + _REQUIRED.sub("", generated).replace(_RULE, "").replace(_ENABLE, "")
    text = text.replace(_LAST_ARGUMENT, _LAST_ARGUMENT.replace("\n", ",\n") + _LANE)
    text = text.replace("mlcpipe.subgroup_lane()", "i32(lane_)")
    text = text.replace("mlcpipe.subgroup_id()", f"i32(threadIdx.x / {size}u)")
    text = _XOR.sub(r"subgroupShuffleXor(\1, \2u)", _SHUFFLE.sub("subgroupShuffle(", text))
    text = _REDUCTION.sub(lambda match: f"{_reduction(match[1])}(", _CLUSTER.sub(of_all, text))
    text = _in_fours(text)
    if _PREFIX in text:
        unknown = text[text.index(_PREFIX) :].split("\n")[0]
        raise CompileError("WGSL has no such call", where=_name(generated), found=unknown[:80])
    return text


def _reduction(name: str) -> str:
    return f"subgroup{name.capitalize()}"


def _name(generated: str) -> str:
    return generated.partition(_FUNCTION)[2].split("\n")[0][:80]


def _four(buffer: str) -> re.Pattern[str]:
    """Matches four adjacent elements; `packed_loads.neighbours` aligns the first to a multiple of four."""
    others = "".join(rf", \2\[\3 \+ {i}\]" for i in (1, 2, 3))
    return re.compile(rf"vec4<(\w+)>\(({buffer})\[(\w+) \+ 0\]{others}\)")


def _in_fours(text: str) -> str:
    """Turn buffers that the kernel only reads in fours into arrays of vectors: one load of 16 bytes each."""
    for dtype, buffer in sorted({(match[1], match[2]) for match in _four(r"\w+").finditer(text)}):
        declared = f"var<storage, read> {buffer} : array<{dtype}>;"
        in_fours = text.replace(declared, declared.replace(f"<{dtype}>", f"<vec4<{dtype}>>"))
        in_fours, count = _four(buffer).subn(r"\2[\3 >> 2u]", in_fours)
        if declared in text and len(re.findall(rf"\b{buffer}\[", text)) == 4 * count:
            text = in_fours
    return text


def all_kernels_of(generated: str) -> str:
    """`kernel_of` for several concatenated kernels."""
    starts = [match.start() for match in re.finditer(re.escape(_NAMED), generated)]
    if not starts:
        return generated
    parts = [generated[at:end] for at, end in zip(starts, [*starts[1:], len(generated)])]
    return generated[: starts[0]] + "".join(map(kernel_of, parts))


def check_buffers(library: Path, limit: int) -> None:
    """Raise CompileError if a kernel in a library has more storage buffers than hosts ask a browser for."""
    for kernel in library.read_bytes().decode("latin-1").split(_FUNCTION)[1:]:
        if (found := len(_BUFFER.findall(kernel))) > limit:
            raise CompileError(
                "a kernel has too many storage buffers", where=kernel.split("\n")[0][:80], expected=f"at most {limit}",
                found=found,
            )  # fmt: skip


def finish(files: Sequence[Path]) -> None:
    """Edit the kernels in object files of a library, in place. Raises CompileError for an unexpected format."""
    for path in files:
        data = path.read_bytes()
        if _PREFIX.encode() in data and _NAMED.encode() in data:
            path.write_bytes(_finished(data, path))


def _finished(data: bytes, path: Path) -> bytes:
    edited, at, marker = bytearray(data), -1, _NAMED.encode()
    while (at := data.find(marker, at + 1)) >= 0:
        # A text is stored after its length, eight bytes, little-endian (`WebGPUFallbackModuleNode::SaveToBytes`).
        length = int.from_bytes(data[max(0, at - 8) : at], "little")
        stored = data[at : at + length]
        if length > len(data) - at or not stored.rstrip().endswith(b"}") or stored.count(marker) != 1:
            raise CompileError("TVM stores WGSL in an unexpected format", where=path, found=stored[:80])
        text = kernel_of(stored.decode("utf-8")).encode()
        if len(text) > length:
            raise CompileError("an edited kernel is too long", where=path, expected=f"{length} bytes", found=len(text))
        edited[at : at + length] = text.ljust(length)
    return bytes(edited)
