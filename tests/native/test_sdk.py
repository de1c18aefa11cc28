"""The folder for projects in C and C++: CMake builds it with each compiler, and a program with its models answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.cli import main
from mlcpipe.compiler.link import find_cxx, find_zig
from mlcpipe.compiler.native_runtime import object_files
from tests.conftest import DEMO, Bundles
from tests.native.cmake import build, compilers, run, tool
from tests.native.conftest import private_cache
from tests.once import shared_work

pytestmark = pytest.mark.full  # compiles TVM's runtime

PROMPT = 'What is a "compiler"?'
# Another project: a program in C++ with both models, each with its own data.
PROJECT = """
cmake_minimum_required(VERSION 3.16)
project(app CXX)
find_package(mlcpipe REQUIRED)
add_executable(app app.cc)
target_compile_definitions(app PRIVATE CHAT="${mlcpipe_chat_DATA}" TINY="${mlcpipe_tiny_model_DATA}")
target_link_libraries(app PRIVATE mlcpipe::mlcpipe mlcpipe::model_chat mlcpipe::model_tiny_model)
"""
APP = """
#include <cstdio>
#include <mlcpipe.h>
#include <mlcpipe_models.h>
int main() {
  const mlcpipe_symbol* codes[] = {MLCPIPE_CODE_CHAT, MLCPIPE_CODE_TINY_MODEL};
  const char* data[] = {CHAT, TINY};
  for (int i = 0; i < 2; ++i) {
    mlcpipe_options options{};
    options.size = sizeof options;
    options.code = codes[i];
    mlcpipe_engine engine = 0;
    if (mlcpipe_open(data[i], &options, &engine) != MLCPIPE_OK) return 1;
    mlcpipe_engine_info info{};
    info.size = sizeof info;
    if (mlcpipe_info(engine, &info) != MLCPIPE_OK || mlcpipe_close(engine) != MLCPIPE_OK) return 2;
    std::printf("%d\\n", static_cast<int>(info.vocab_size));
  }
  return 0;
}
"""


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("gcc", True),
        pytest.param("gcc", False, marks=pytest.mark.everything),
        pytest.param("clang", False, marks=pytest.mark.everything),
        pytest.param("zig", False, marks=pytest.mark.everything),
    ],
)
def test_cmake_builds_a_program_that_answers(
    name: str, dynamic: bool, sdk: Path, sdk_bundles: list[Path], shared: Path, tmp_path: Path
) -> None:
    """It is installed too, and another project finds it there. The shared library has the TVM of other tests."""
    variables, options = compilers(name), [f"-DBUILD_SHARED_LIBS={'ON' if dynamic else 'OFF'}"]
    with shared_work():
        tvm = object_files(find_cxx(), private_cache(shared))[0] if dynamic else None
    built = build(sdk, tmp_path / "build", variables, options, tvm=tvm)
    said = run(built / "example", sdk / "models" / "chat" / "model.mlcp", PROMPT)
    chat = [{"role": "user", "content": PROMPT}]
    assert said == Engine(sdk_bundles[0]).chat(chat, sampling=SamplingParams(seed=0), max_tokens=200).text + "\n"
    run(tool("cmake"), "--install", built, "--prefix", tmp_path / "prefix")
    installed = {path.name for path in (tmp_path / "prefix").rglob("*")}
    assert {"libmlcpipe.so" if dynamic else "libmlcpipe.a", "mlcpipe.h", "THIRD_PARTY.txt"} <= installed
    project = tmp_path / "project"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(PROJECT)
    (project / "app.cc").write_text(APP)
    app = build(project, tmp_path / "app", variables, [f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}"])
    assert run(app / "app").split() == [str(Engine(bundle).vocab_size) for bundle in sdk_bundles]


VULKAN_TARGET = 'base = "vulkan"\narchive = true\n'
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"


@pytest.fixture(scope="session")
def vulkan_sdk(vulkan_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the demo model for Vulkan, and what its program answers; of `vulkan_bundle` the driver is needed."""
    folder = tmp_path_factory.mktemp("vulkan-sdk")
    if find_zig() is None:
        pytest.skip("static libraries need ziglang")
    (folder / "board.toml").write_text(VULKAN_TARGET)
    bundle = mlcpipe.compile(DEMO, target=str(folder / "board.toml"), quantization="q4f16_1", output=folder / "chat")
    assert main(["package", str(bundle), "--app", "native", "-o", str(folder / "sdk")]) == 0
    chat = [{"role": "user", "content": PROMPT}]
    answer = Engine(vulkan_bundle).chat(chat, sampling=SamplingParams(seed=0), max_tokens=200)
    return folder / "sdk", answer.text + "\n"


@pytest.mark.everything
@pytest.mark.parametrize(("name", "flags"), [("gcc", ""), ("clang", ""), ("zig", ""), ("gcc", SANITIZERS)])
def test_cmake_builds_vulkan(name: str, flags: str, vulkan_sdk: tuple[Path, str], tmp_path: Path) -> None:
    """Because a model is for it; the sanitizers watch our code, and the driver's memory aside."""
    sdk, answer = vulkan_sdk
    built = build(sdk, tmp_path / "build", compilers(name), flags=flags)
    assert "MLCPIPE_VULKAN:BOOL=ON" in (built / "CMakeCache.txt").read_text()
    assert (
        run(built / "example", sdk / "models" / "chat" / "model.mlcp", PROMPT, ASAN_OPTIONS="detect_leaks=0") == answer
    )


def test_the_folder_has_what_it_needs_and_no_more(sdk: Path) -> None:
    files = {path.relative_to(sdk).as_posix(): path for path in sdk.rglob("*") if path.is_file()}
    assert "src/tvm/src/runtime/vm/vm.cc" in files and "src/runtime/api.cc" in files
    assert not any(word in name for name in files for word in ("runtime/cuda/", "/cli/", "opencl", "rpc"))
    assert sum(path.stat().st_size for name, path in files.items() if name.startswith("src/")) < 9 << 18
    assert all(
        word in files["THIRD_PARTY.txt"].read_text() for word in ("apache-tvm-ffi", "DLPack", "NOTICE", "UNICODE, INC.")
    )
    changed = files["src/tvm/3rdparty/tvm-ffi/include/tvm/ffi/base_details.h"].read_text()
    assert changed.startswith("// Changed by mlcpipe") and changed.count("Changed by mlcpipe") == 1
    for name, path in files.items():
        if not name.startswith(("models/", "src/")):
            assert "@" not in path.read_text().replace("@PACKAGE_INIT@", "") or name == "mlcpipe-config.cmake.in", name


def test_what_cannot_be_packaged_is_one_line(
    sdk: Path, sdk_bundles: list[Path], demo_bundles: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: object) -> str:
        capsys.readouterr()
        assert main(["package", *map(str, words), "--app", "native"]) == 2
        return capsys.readouterr().err

    assert "no static library" in said(demo_bundles["q4f16_1"], "-o", tmp_path / "sdk")
    shutil.copytree(sdk_bundles[1], tmp_path / "TINY.model")
    assert "bundles of one name" in said(sdk_bundles[1], tmp_path / "TINY.model", "-o", tmp_path / "sdk")
    assert "--title has no effect" in said(sdk_bundles[0], "--title", "x", "-o", tmp_path / "sdk")
    project = tmp_path / "project"
    project.mkdir()
    (project / "CMakeLists.txt").write_text("")
    assert "project" in said(sdk_bundles[0], "--overwrite", "-o", project)
    assert not (tmp_path / "sdk").exists() and (project / "CMakeLists.txt").exists()
    old = shutil.copytree(sdk, tmp_path / "old")
    assert "old" in said(sdk_bundles[0], "-o", old)
    assert main(["package", str(sdk_bundles[0]), "--app", "native", "--overwrite", "-o", str(old)]) == 0
    assert not (old / "models" / "tiny_model").exists()
