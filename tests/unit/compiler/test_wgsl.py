"""WGSL of kernels with subgroups, made of what TVM writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.compiler.backends import find_writer
from mlcpipe.compiler.backends.wasm import wgsl
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.targets import load_target

RULE = "//----------------------------------------\n"
# As TVM writes a kernel; `{}` is its body.
KERNEL = (
    RULE + "// Function: sum_kernel\n" + RULE + "enable f16;\n\n"
    "@group(0) @binding(0) var<storage, read> x : array<f16>;\n"
    "@group(0) @binding(1) var<storage, read> w : array<u32>;\n"
    "@compute @workgroup_size(64, 1, 1)\nfn sum_kernel(\n"
    "  @builtin(workgroup_id) blockIdx : vec3<u32>,\n"
    "  @builtin(local_invocation_id) threadIdx : vec3<u32>\n) {\n"
    "  mlcpipe.require_subgroup_size(32i);\n%s}\n\n"
)
FOUR = "vec4<f16>(x[v_1 + 0], x[v_1 + 1], x[v_1 + 2], x[v_1 + 3])"


def kernel(*lines: str) -> str:
    return KERNEL % "".join(f"  {line}\n" for line in lines)


def body(*lines: str) -> list[str]:
    """The statements that lines of a kernel become."""
    text = wgsl.kernel_of(kernel(*lines))
    return [line.strip() for line in text.split(") {\n")[1].split("\n}")[0].split("\n")]


def test_kernels_with_more_buffers_than_a_browser_gives_are_refused(tmp_path: Path) -> None:
    library = tmp_path / "model.wasm"
    library.write_bytes(b"\0asm\xff" + kernel("x;").encode() + wgsl.kernel_of(kernel("x;")).encode() + b"\xff")
    wgsl.check_buffers(library, 2)
    with pytest.raises(CompileError, match="too many storage buffers in sum_kernel; expected at most 1; found 2"):
        wgsl.check_buffers(library, 1)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("let v : i32 = mlcpipe.subgroup_lane();", "let v : i32 = i32(lane_);"),
        ("let v : i32 = mlcpipe.subgroup_id();", "let v : i32 = i32(threadIdx.x / 32u);"),
        ("a[0i] = mlcpipe.subgroup_shuffle(b[0i], (c * 8i));", "a[0i] = subgroupShuffle(b[0i], (c * 8i));"),
        ("a = (a + mlcpipe.subgroup_shuffle_xor(b[0i], 16i));", "a = (a + subgroupShuffleXor(b[0i], 16u));"),
        ("a = mlcpipe.subgroup_add((b + c(d)));", "a = subgroupAdd((b + c(d)));"),
        ("a = mlcpipe.subgroup_cluster_max(b[0i], 32i);", "a = subgroupMax(b[0i]);"),
    ],
)
def test_calls_are_those_of_wgsl(written: str, expected: str) -> None:
    assert body(written) == [expected]


def test_directives_stand_first_and_the_lane_is_an_argument() -> None:
    text = wgsl.kernel_of(kernel("let v : i32 = mlcpipe.subgroup_lane();"))
    assert text.startswith("enable subgroups;\ndiagnostic(off, subgroup_uniformity);\n// Function: sum_kernel\n")
    assert "threadIdx : vec3<u32>,\n  @builtin(subgroup_invocation_id) lane_ : u32\n) {" in text
    assert len(text) <= len(kernel("let v : i32 = mlcpipe.subgroup_lane();"))


def test_four_numbers_are_one_load_where_a_buffer_is_read_in_no_other_way() -> None:
    text = wgsl.kernel_of(
        kernel(f"let a = {FOUR};", f"let b = w[v_2] + {FOUR.replace('x', 'w').replace('f16', 'u32')};")
    )
    assert "x : array<vec4<f16>>;" in text and "let a = x[v_1 >> 2u];" in text
    assert "w : array<u32>;" in text and "w[v_1 + 3]" in text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("a = mlcpipe.subgroup_cluster_add(b[0i], 8i);",), "no such call.*sum_kernel.*cluster_add"),
        (("a = mlcpipe.mma(b, c);",), "no such call.*mma"),
        (("mlcpipe.require_subgroup_size(16i);",), r"one size.*\[16, 32\]"),
    ],
)
def test_what_wgsl_lacks_is_refused(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        wgsl.kernel_of(kernel(*lines))


def test_kernels_are_edited_in_place(tmp_path: Path) -> None:
    plain = kernel().replace("  mlcpipe.require_subgroup_size(32i);\n", "")
    texts = [kernel("let v : i32 = mlcpipe.subgroup_lane();").encode(), plain.encode()]
    stored = b"code" + b"".join(len(text).to_bytes(8, "little") + text for text in texts) + b"data"
    path = tmp_path / "devc.o"
    path.write_bytes(stored)
    wgsl.finish([path])
    edited = path.read_bytes()
    assert len(edited) == len(stored)
    assert edited[:12] == stored[:12]
    assert edited[12 : 12 + len(texts[0])].decode().rstrip() == wgsl.kernel_of(texts[0].decode()).rstrip()
    assert edited[12 + len(texts[0]) :] == stored[12 + len(texts[0]) :]


def test_a_length_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "devc.o"
    for length in (0, 10, 1 << 40):
        path.write_bytes(length.to_bytes(8, "little") + kernel().encode())
        with pytest.raises(CompileError, match="stores WGSL in an unexpected format"):
            wgsl.finish([path])


def test_a_target_names_the_feature_and_a_size_or_neither(tmp_path: Path) -> None:
    board = tmp_path / "board.toml"
    for text in ('features = ["subgroups"]\n', "[schedule]\nsubgroup = 32\n"):
        board.write_text('base = "webgpu"\n' + text, encoding="utf-8")
        with pytest.raises(TargetError, match="schedule.subgroup"):
            find_writer(load_target(str(board)))
    best = load_target("webgpu-subgroups32")
    assert (best.schedule["subgroup"], best.features) == (32, ("shader-f16", "subgroups"))
    assert load_target("webgpu-subgroups").companions == ("webgpu-subgroups32", "webgpu-f16")
