"""Builds llama.cpp's llama-bench, llama-quantize and llama-imatrix for this CPU from the source in PyPI's `llama-cpp-python`.

    python -m bench.build_llama_cpp FOLDER [--vulkan] [--server]

Needs pip, cmake and a C++ compiler; ten minutes on two cores, twenty with `--server`, which adds llama-batched-bench
and llama-server. Do not use gcc 12 or older on a CPU with AMX: it
orders `_tile_loadconfig` wrongly in ggml's AMX kernels, which then crash. With `--vulkan` it has the Vulkan backend,
too: that needs Vulkan's and SPIR-V's headers and `glslc` (Debian's libvulkan-dev, spirv-headers, glslc), and an hour.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from bench.program import command_line, run_program
from mlcpipe.errors import ResourceError

VERSION = "0.3.36"
_PACKAGE = "llama-cpp-python"
_PROGRAMS = ("llama-bench", "llama-quantize", "llama-imatrix")
_SOURCE_NOTE = "SOURCE"  # next to the binary, which knows its commit but neither package nor compiler
# Settings for the validation layer, which Vulkan's headers before 1.3.272 do not know, and nothing needs here.
_LAYER_SETTINGS = re.compile(
    r"    std::vector<vk::LayerSettingEXT> settings = \{.*?layer_setting_info\(settings\);\n", re.DOTALL
)


def build_llama_cpp(
    folder: Path, *, version: str = VERSION, jobs: int | None = None, vulkan: bool = False, server: bool = False
) -> Path:
    """Download, unpack and build in `folder` -> path of llama-bench. Raises ResourceError if a step fails."""
    for tool in ("cmake", *(["glslc"] if vulkan else [])):
        if shutil.which(tool) is None:
            advice = "python -m pip install cmake" if tool == "cmake" else "apt-get install glslc"
            raise ResourceError(f"{tool} is missing", next_step=advice)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{_PACKAGE.replace('-', '_')}-{version}"
    source = folder / name / "vendor" / "llama.cpp"
    if not (source / "CMakeLists.txt").is_file():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", _PACKAGE]
        _run([*pip, "-d", str(folder), f"{_PACKAGE}=={version}"])
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    build = folder / build_name(version, vulkan)
    configure = ["cmake", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
    if vulkan:
        _leave_out_layer_settings(source / "ggml" / "src" / "ggml-vulkan" / "ggml-vulkan.cpp")
        configure.append("-DGGML_VULKAN=ON")
    without = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")
    programs = [*_PROGRAMS, *(["llama-batched-bench", "llama-server"] if server else [])]
    _run([*configure, f"-DLLAMA_BUILD_SERVER={'ON' if server else 'OFF'}", *(f"-D{part}=OFF" for part in without)])
    _run(["cmake", "--build", str(build), "--target", *programs, "-j", str(jobs or os.cpu_count() or 1)])
    binary = build / "bin" / "llama-bench"
    if not binary.is_file():
        raise ResourceError("the build made no llama-bench", expected=binary)
    binary.with_name(_SOURCE_NOTE).write_text(f"{_PACKAGE} {version}, {_compiler(build)}\n", encoding="utf-8")
    return binary


def quantize(source: Path, path: Path, file_type: int, binary: Path, imatrix: Path | None = None) -> Path:
    """Write GGUF `source` to `path` in another of `llama_ftype`, by llama-quantize beside `binary`.

    `imatrix` is what `importance` wrote. Raises ResourceError.
    """
    partial = path.with_name(path.name + ".partial")
    options = ["--allow-requantize", *([] if imatrix is None else ["--imatrix", str(imatrix)])]
    words = [str(source), str(partial), str(file_type), str(os.cpu_count() or 1)]
    _run([str(_program(binary, "llama-quantize")), *options, *words])
    os.replace(partial, path)
    return path


def importance(source: Path, text: Path, path: Path, binary: Path, chunks: int = 64) -> Path:
    """Write the importance matrix of GGUF `source` on so many windows of 512 tokens of a text, by llama-imatrix.

    Raises ResourceError.
    """
    partial = path.with_name(f"partial-{path.name}")  # the end of its name says the format
    words = ["-m", source, "-f", text, "-o", partial, "-c", 512, "--chunks", chunks, "--no-ppl"]
    _run([str(_program(binary, "llama-imatrix")), *map(str, words)])
    os.replace(partial, path)
    return path


def _program(binary: Path, name: str) -> Path:
    program = binary.with_name(name)
    if not program.is_file():
        raise ResourceError(f"no {name}", expected=program, next_step="build it: python -m bench.build_llama_cpp")
    return program


def build_name(version: str, vulkan: bool) -> str:
    """The folder of a build."""
    return f"build-vulkan-{version}" if vulkan else f"build-{version}"


def _leave_out_layer_settings(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    text = _LAYER_SETTINGS.sub("", text).replace("layers, extensions, &layer_setting_info)", "layers, extensions)")
    source.write_text(text, encoding="utf-8")


def source_of(binary: Path) -> str:
    """The package and compiler that `build_llama_cpp` noted; "" for a llama-bench from elsewhere."""
    note = binary.with_name(_SOURCE_NOTE)
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


def _compiler(build: Path) -> str:
    for line in (build / "CMakeCache.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("CMAKE_CXX_COMPILER:"):
            path = line.partition("=")[2]
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return done.stdout.partition("\n")[0]
    return "an unknown compiler"


def _run(command: list[str]) -> None:
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if status:
        raise ResourceError(" ".join(command[:4]) + " failed", found=f"exit status {status}")


def main() -> None:
    """Parse the command line, build, print the path of llama-bench."""
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default=VERSION, help="of llama-cpp-python (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: the processors)")
    parser.add_argument("--vulkan", action="store_true", help="with the Vulkan backend")
    parser.add_argument("--server", action="store_true", help="llama-batched-bench and llama-server, too")
    print(build_llama_cpp(**vars(parser.parse_args())))


if __name__ == "__main__":
    run_program(main)
