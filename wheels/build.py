"""Wheels for Linux with native code inside: `make wheels`, or `python -m wheels.build [x86_64 aarch64]`.

Each brings the Vulkan plugin and the threads of parallel loops, so that a machine needs no compiler. PyPI's ziglang
compiles them for every machine, with the libraries of TVM's own wheel: glibc 2.27, and libstdc++, whose exceptions pass
between TVM and the plugin; its headers are Debian's (g++, g++-aarch64-linux-gnu), as are Vulkan's
(libvulkan-dev). Both only declare what TVM's and the system's libraries define.

There are no such wheels for macOS and Windows. There the pure one has all that could be compiled ahead: on macOS TVM's
Metal runtime takes the plugin's place, on Windows TVM's threads take the pool's, and TVM's libraries have Microsoft's
C++ ABI, which ziglang has no headers for. There pip installs ziglang, which links models.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mlcpipe.devices.support import vulkan_plugin
from mlcpipe.support import compiled
from mlcpipe.support.resources import native_path
from wheels.check import check_library

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "wheels"
GLIBC = "2.27"
MACHINES = ("x86_64", "aarch64")
_HERE, _NATIVE = Path(__file__).parent, native_path()
_FLAGS = ("-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-w")
_VULKAN_HEADERS = ("vulkan", "vk_video")
_TVM_LIBRARIES = ("tvm_runtime", "tvm_ffi")


@dataclass(frozen=True)
class Machine:
    """A kind of machine with Linux, by its name in Python's platform tags."""

    name: str

    @property
    def tag(self) -> str:
        """Of its wheel."""
        return f"py3-none-manylinux_{GLIBC.replace('.', '_')}_{self.name}"

    @property
    def folder(self) -> Path:
        """Of what is compiled for it, which `hatch_build.py` puts into its wheel."""
        return BUILT / self.name

    def run(self, *arguments: object) -> None:
        """Run ziglang's compiler for it."""
        command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{self.name}-linux-gnu.{GLIBC}"]
        subprocess.run([*command, *map(str, arguments)], check=True)

    def headers(self) -> list[Path]:
        """Folders of libstdc++'s headers: the system's own, or Debian's for cross compilers."""
        triple = f"{self.name}-linux-gnu"
        own, cross = Path("/usr/include"), Path("/usr", triple, "include")
        for newest in sorted(own.joinpath("c++").glob("*"), key=_version, reverse=True):
            if (found := own / triple / "c++" / newest.name).is_dir():
                return [newest, found]
        for newest in sorted(cross.joinpath("c++").glob("*"), key=_version, reverse=True):
            return [newest, newest / triple]
        raise SystemExit(f"no libstdc++ for {self.name}: apt-get install g++ g++-aarch64-linux-gnu")

    def library(self, name: str) -> Path:
        """A library of GCC's runtime."""
        triple = f"{self.name}-linux-gnu"
        places = Path("/usr/lib", triple), Path("/lib", triple), Path("/usr", triple, "lib")
        if (found := next((path for place in places if (path := place / name).exists()), None)) is None:
            raise SystemExit(f"no {name} for {self.name}: apt-get install g++ g++-aarch64-linux-gnu")
        return found


def _version(folder: Path) -> int:
    """Of libstdc++'s headers."""
    number = folder.name.partition(".")[0]
    return int(number) if number.isdigit() else -1


def compile_pool(machine: Machine) -> Path:
    """The object file with the threads of parallel loops."""
    output = machine.folder / f"{compiled.POOL}-{compiled.digest_of(compiled.POOL_SOURCES)}.o"
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder, "pool.o"), Path(folder, "glibc.o")]
        for source, part in zip((_NATIVE / "pool.c", _HERE / "glibc.c"), parts, strict=True):
            machine.run(*_FLAGS, *_without_paths([_NATIVE]), "-pthread", "-c", source, "-o", part)
        machine.run("-r", "-nostdlib", *parts, "-o", output)
    return output


def compile_plugin(machine: Machine) -> Path:
    """The Vulkan plugin."""
    output = machine.folder / f"{vulkan_plugin.PLUGIN}-{vulkan_plugin.digest()}.so"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in _VULKAN_HEADERS:
            if (source := Path("/usr/include", name)).is_dir():
                shutil.copytree(source, folder / name)
        packages = [
            Path(spec.origin).parent for name in ("tvm", "tvm_ffi") if (spec := find_spec(name)) and spec.origin
        ]
        ours = [_HERE / "include", folder, _NATIVE / "tvm_shim" / "include", *(one / "include" for one in packages)]
        options = ["-x", "c++", "-std=c++20", "-nostdinc++", "-include", _HERE / "include" / "old_libstdcxx.h"]
        options += [*_FLAGS, *_without_paths([*ours, _NATIVE]), *(f"-I{one}" for one in [*ours, *machine.headers()])]
        objects = []
        for source in (_NATIVE / "vulkan" / "plugin.cc", _HERE / "libstdcxx.cc"):
            objects.append(folder / f"{source.stem}.o")
            machine.run(*options, "-c", source, "-o", objects[-1])
        libraries = [*_stand_ins(machine, folder), *map(machine.library, ("libstdc++.so.6", "libgcc_s.so.1"))]
        shared = ["-shared", "-s", "-Wl,-z,undefs", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed"]
        machine.run(*shared, *objects, *libraries, "-o", output)
    return output


def _without_paths(folders: Iterable[Path]) -> list[str]:
    """No path of this machine gets into a library."""
    return [f"-ffile-prefix-map={folder}=." for folder in folders]


def _stand_ins(machine: Machine, folder: Path) -> Iterator[Path]:
    """Libraries with the names of TVM's and nothing inside: TVM's are loaded before the plugin."""
    empty = folder / "empty.c"
    empty.touch()
    for name in _TVM_LIBRARIES:
        library = folder / f"lib{name}.so"
        machine.run("-shared", "-nostdlib", f"-Wl,-soname,{library.name}", empty, "-o", library)
        yield library


def build(names: Sequence[str], output: Path) -> None:
    """Compile, check, and make a wheel for each machine in the folder `output`."""
    for machine in map(Machine, names):
        shutil.rmtree(machine.folder, ignore_errors=True)
        machine.folder.mkdir(parents=True)
        for library in (compile_pool(machine), compile_plugin(machine)):
            if library.suffix == ".so":
                check_library(library)
            print(f"{library.stat().st_size:>10,} bytes  {library.relative_to(ROOT)}")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
        environment = {**os.environ, "MLCPIPE_WHEEL_FOLDER": str(machine.folder), "MLCPIPE_WHEEL_TAG": machine.tag}
        subprocess.run([*command, "--no-build-isolation", "-w", str(output), str(ROOT)], check=True, env=environment)


if __name__ == "__main__":
    build(sys.argv[1:] or MACHINES, ROOT / "dist")
