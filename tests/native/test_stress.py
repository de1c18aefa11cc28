"""Engines that several threads use, cancel and close at once, in a program that sanitizers watch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cmake import build, compilers, run

pytestmark = pytest.mark.everything  # compiles TVM's runtime for each sanitizer
PROJECT = """
cmake_minimum_required(VERSION 3.16)
project(stress C CXX)
set(MLCPIPE_EXAMPLE OFF)
add_subdirectory({sdk} mlcpipe)
add_executable(stress {source})
target_compile_features(stress PRIVATE cxx_std_17)
target_link_libraries(stress PRIVATE mlcpipe::mlcpipe mlcpipe::model_chat mlcpipe::model_tiny_model)
"""


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(sanitizer: str, sdk: Path, tmp_path: Path) -> None:
    """TVM's runtime is compiled for them too; kernels are not."""
    source = Path(__file__).with_name("stress.cc")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(sdk=sdk, source=source))
    flags = f"-g -fsanitize={sanitizer} -fno-sanitize-recover=all"
    built = build(tmp_path, tmp_path / "build", compilers("gcc"), flags=flags)
    data = [sdk / "models" / name / "model.mlcp" for name in ("chat", "tiny_model")]
    assert run(built / "stress", *data, 20, TSAN_OPTIONS="halt_on_error=1") == "done\n"
