"""The project for Android Studio: its Kotlin compiles against Android's classes, and CMake builds its native library."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlcpipe.cli import main
from tests.conftest import Bundles
from tests.native.android.conftest import CLASSES, compile_kotlin, jdk, kotlin_files
from tests.native.cmake import build, compilers

pytestmark = pytest.mark.full  # compiles a bundle with several variants

ANDROID = Path("/usr/share/java/com.android.android-23.jar")


@pytest.fixture(scope="module")
def project(android_bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `mlcpipe package --app android` makes of the demo model."""
    folder = tmp_path_factory.mktemp("android")
    bundle = shutil.copytree(android_bundle("android"), folder / "chat")
    assert main(["package", str(bundle), "--app", "android", "-o", str(folder / "project")]) == 0
    return folder / "project"


def test_the_project_has_what_it_needs(project: Path) -> None:
    files = {path.relative_to(project).as_posix(): path for path in project.rglob("*") if path.is_file()}
    code = files["app/src/main/jniLibs/arm64-v8a/libmodel_chat.so"]
    assert code.read_bytes()[:4] == b"\x7fELF" and "models/chat/model.mlcp" in files
    assert "NOTICE" in files["THIRD_PARTY.txt"].read_text()
    native = "mlcpipe/src/main/cpp"
    for name, path in files.items():
        if path.suffix in (".kt", ".kts", ".md", ".xml", ".pro") or name == f"{native}/runtime/CMakeLists.txt":
            text = path.read_text()
            assert not any(word in text for word in ("@ABI@", "@MODEL@", "@MODELS@", "@TRIPLE@", "@VERSION@")), name
        if path.suffix == ".xml":
            assert "permission" not in ElementTree.tostring(ElementTree.parse(path).getroot(), "unicode")
    assert 'abiFilters += "arm64-v8a"' in files["mlcpipe/build.gradle.kts"].read_text()
    assert 'load("libmodel_chat.so")' in files["app/src/main/kotlin/com/example/chat/ChatActivity.kt"].read_text()


def test_kotlin_compiles_against_android(project: Path, tmp_path: Path) -> None:
    if not ANDROID.exists():
        pytest.skip("libandroid-23-java of Debian sid")
    compile_kotlin(kotlin_files(project), tmp_path / "app.jar", ANDROID)


def test_the_rules_keep_what_the_native_library_looks_up(project: Path) -> None:
    """JNI finds classes by names, which the shrinker of an app may change."""
    source = (project / "mlcpipe/src/main/cpp/jni.cc").read_text()
    rules = (project / "mlcpipe/consumer-rules.pro").read_text()
    for name in ("Native", "Sink", "MlcpipeException"):
        assert f"ai/mlcpipe/{name}" in source and f"class ai.mlcpipe.{name}" in rules


def test_cmake_builds_the_library(project: Path, tmp_path: Path) -> None:
    """For a JVM of this machine, which loads it."""
    home = jdk()
    built = build(project / "mlcpipe/src/main/cpp", tmp_path / "build", {**compilers("gcc"), "JAVA_HOME": str(home)})
    compile_kotlin([*kotlin_files(project / "mlcpipe"), _loads(tmp_path)], tmp_path / "app.jar")
    path = os.pathsep.join(map(str, (tmp_path / "app.jar", *CLASSES)))
    command = [home / "bin" / "java", f"-Djava.library.path={built}", "-cp", path, "ai.mlcpipe.LoadsKt"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert "threads; expected" in done.stdout, done.stderr[-2000:]


def _loads(folder: Path) -> Path:
    source = folder / "Loads.kt"
    source.write_text(
        "package ai.mlcpipe\n"
        "fun main() = try { Mlcpipe.setThreads(0) } catch (error: MlcpipeException) { println(error.message) }\n"
    )
    return source


def test_what_cannot_be_packaged_is_one_line(
    project: Path, demo_bundles: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: object) -> str:
        capsys.readouterr()
        assert main(["package", *map(str, words), "--app", "android"]) == 2
        return capsys.readouterr().err

    assert "--target android" in said(demo_bundles["q4f16_1"], "-o", tmp_path / "project")
    bundle = project.parent / "chat"
    assert "bundles of one name" in said(bundle, shutil.copytree(bundle, tmp_path / "CHAT"), "-o", tmp_path / "project")
    assert "--title has no effect" in said(bundle, "--title", "x", "-o", tmp_path / "project")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "build.gradle.kts").write_text("")
    assert "mine" in said(bundle, "--overwrite", "-o", tmp_path / "mine")
    assert not (tmp_path / "project").exists()
