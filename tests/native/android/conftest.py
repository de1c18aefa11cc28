"""The Android library's Kotlin, compiled and run on a JVM of this machine with the real native library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlcpipe.host.cpu_features import architecture
from tests.conftest import DEMO, OPTIMIZED, UNOPTIMIZED
from tests.native.conftest import private_cache
from tests.native.cxx import ROOT
from tests.once import Once

if TYPE_CHECKING:
    from mlcpipe.compiler.native_runtime import DevicePlugin

PROJECT = ROOT / "mlcpipe" / "native" / "android"
LIBRARY = PROJECT / "mlcpipe" / "src" / "main"
SCENARIOS = Path(__file__).parent / "kotlin"
DECLARATIONS = Path(__file__).parent / "declarations"
TOOLS = Path(__file__).parent / "build"
KOTLIN = Path(__file__).parent / "node_modules" / "kotlin-compiler" / "lib"
CLASSES = tuple(KOTLIN / f"{name}.jar" for name in ("kotlin-stdlib", "kotlinx-coroutines-core-jvm"))
NAMES = {"android": "chat", "android-x86_64": "android-x86_64"}  # of bundles, by their targets
# Of the emulator's code the variant for this machine alone, where it is one: phones' code has all of its variants.
CPUS = {"android-x86_64": 'mcpu = "native"\n'} if architecture() == "x86_64" and not OPTIMIZED else {}
QUICK_JAVA = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")  # programs of seconds pay for threads and optimizations
# Lines of JSON that a scenario prints.
Scenario = Callable[..., list[dict[str, Any]]]


def jdk() -> Path:
    """The folder of a Java development kit, which has JNI's headers."""
    java = shutil.which("javac")
    if java is None:
        pytest.skip("no JDK")
    return Path(java).resolve().parents[1]


def tool(path: str) -> Path:
    """A file that get_tools.sh brings."""
    if not (TOOLS / path).exists():
        pytest.skip("no Android tools: tests/native/android/get_tools.sh")
    return TOOLS / path


def kotlin_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kt"))


def plain_kotlin() -> list[Path]:
    """The library without what needs Android's classes."""
    return [path for path in kotlin_files(LIBRARY / "kotlin") if path.parent.name != "android"]


def compile_kotlin(sources: list[Path], output: Path, *classes: Path, options: tuple[str, ...] = ()) -> None:
    """Compile Kotlin without warnings. `classes` are more of the class path."""
    java = jdk() / "bin" / "java"
    if not KOTLIN.is_dir():
        pytest.skip("no kotlin-compiler: npm ci --prefix tests/native/android")
    compiler = os.pathsep.join(str(KOTLIN / f"kotlin-{name}.jar") for name in ("preloader", "compiler"))
    path = os.pathsep.join(map(str, (*CLASSES, *classes)))
    command = [java, *QUICK_JAVA, "-Xmx1g", "-cp", compiler, "org.jetbrains.kotlin.cli.jvm.K2JVMCompiler"]
    flags = ["-no-stdlib", "-no-reflect", "-Werror", "-Wextra", "-jvm-target", "1.8", *options, "-cp", path]
    done = subprocess.run(
        list(map(str, [*command, *flags, "-d", output, *sources])), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def link_jni(output: Path, cache: Path, machine: str | None = None, plugin: DevicePlugin | None = None) -> None:
    """The native runtime with the functions for Kotlin, for a JVM of this machine or another, with a kind of GPU."""
    from mlcpipe.compiler.link import find_cxx
    from mlcpipe.compiler.native_runtime import RUNTIME_SOURCES, object_files

    compiler, include, cpp = find_cxx(machine), jdk() / "include", LIBRARY / "cpp"
    includes = [f"-I{path}" for path in (RUNTIME_SOURCES, include, include / "linux")]
    flags = ["-std=c++17", "-Os", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-shared", "-pthread"]
    exports = ["-Wl,--gc-sections", "-Wl,-s", f"-Wl,--version-script={cpp / 'exports.map'}"]
    objects = map(str, object_files(compiler, cache, plugin))
    compiler.run([*flags, *includes, *exports, str(cpp / "jni.cc"), *objects, "-ldl", "-o", str(output)])


@pytest.fixture(scope="session")
def library_and_classes(once: Once, shared: Path) -> tuple[Path, Path]:
    """The folder of libmlcpipe.so, and a jar of the library in Kotlin with the scenarios."""

    def work(folder: Path) -> list[str]:
        sources = [*plain_kotlin(), *kotlin_files(SCENARIOS)]
        compile_kotlin(sources, folder / "library.jar")
        link_jni(folder / "libmlcpipe.so", private_cache(shared))
        return [str(folder), str(folder / "library.jar")]

    folder, jar = once("android-library", work)
    return Path(folder), Path(jar)


@pytest.fixture(scope="session")
def android_bundle(once: Once) -> Callable[[str], Path]:
    """Compiles the demo model for a target, once."""
    import mlcpipe
    from mlcpipe.compiler.link import find_zig

    def work(folder: Path, target: str) -> str:
        path = folder / f"{target}.toml"
        tvm = (UNOPTIMIZED or "[tvm]\n") + CPUS.get(target, "")
        path.write_text(f'base = "{target}"\n{tvm}', encoding="utf-8")
        return str(mlcpipe.compile(DEMO, target=str(path), quantization="q4f16_1", output=folder / "chat"))

    def bundle(target: str) -> Path:
        if find_zig() is None:
            pytest.skip("libraries for Android need ziglang")
        return Path(once(f"bundle-{target}", lambda folder: work(folder, target)))

    return bundle


@pytest.fixture(scope="session")
def project(once: Once, android_bundle: Callable[[str], Path]) -> Path:
    """What `mlcpipe package --app android` makes of the demo model, beside its bundles."""
    from mlcpipe.cli import main

    def work(folder: Path) -> str:
        bundles = [shutil.copytree(android_bundle(target), folder / name) for target, name in NAMES.items()]
        assert main(["package", *map(str, bundles), "--app", "android", "-o", str(folder / "project")]) == 0
        return str(folder / "project")

    return Path(once("android-project", work))


@pytest.fixture
def scenario(library_and_classes: tuple[Path, Path]) -> Scenario:
    """Runs a function of Scenarios.kt in a JVM of its own."""
    folder, jar = library_and_classes
    return scenario_in([jdk() / "bin" / "java", "-Xcheck:jni"], folder, jar)


def scenario_in(java: Sequence[str | Path], folder: Path, jar: Path) -> Scenario:
    """Runs scenarios of a jar by a command of Java, with the libmlcpipe.so of a folder."""
    path = os.pathsep.join(map(str, (jar, *CLASSES)))

    def run(*words: object) -> list[dict[str, Any]]:
        flags = [*QUICK_JAVA, "-Xmx512m", "-Dfile.encoding=UTF-8", f"-Djava.library.path={folder}", "-cp", path]
        command = list(map(str, [*java, *flags, "ai.mlcpipe.ScenariosKt", *words]))
        done = subprocess.run(command, input="", capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert "WARNING" not in done.stdout, done.stdout[-2000:]  # of the checks of JNI
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
