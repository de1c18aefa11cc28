"""The project for Android Studio: its Kotlin compiles against Android's classes, and CMake builds its native library."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlcpipe.cli import main
from tests.conftest import Bundles
from tests.native.android.conftest import (
    CLASSES,
    DECLARATIONS,
    KOTLIN,
    compile_kotlin,
    jdk,
    kotlin_files,
    plain_kotlin,
    tool,
)
from tests.native.cmake import build, compilers

pytestmark = pytest.mark.full  # compiles a bundle with several variants

ANDROID = "sdk/usr/share/java/com.android.android-23.jar"


def test_the_project_has_what_it_needs(project: Path) -> None:
    files = {path.relative_to(project).as_posix(): path for path in project.rglob("*") if path.is_file()}
    for abi, machine in (("arm64-v8a", 183), ("x86_64", 62)):
        code = files[f"jniLibs/{abi}/libmodel_chat.so"].read_bytes()
        assert code[:4] == b"\x7fELF" and code[18] == machine
    assert [name for name in files if name.startswith("models/")] == [
        "models/chat/model.json",
        "models/chat/model.mlcp",
    ]
    licences = files["mlcpipe/src/main/resources/META-INF/ai.mlcpipe/THIRD_PARTY.txt"].read_text()
    for name in ("NOTICE", "apache-tvm ", "DLPack", "Kotlin's standard library", "kotlinx.coroutines", "mlcpipe"):
        assert name in licences, name
    native = "mlcpipe/src/main/cpp"
    for name, path in files.items():
        if path.suffix in (".kt", ".kts", ".md", ".xml", ".pro") or name == f"{native}/runtime/CMakeLists.txt":
            text = path.read_text()
            assert not re.search("@[A-Z]+@", text), name
        if path.suffix == ".xml":
            assert "permission" not in ElementTree.tostring(ElementTree.parse(path).getroot(), "unicode")
    for script in ("mlcpipe/build.gradle.kts", "build.gradle.kts"):  # of the library, and of both apps
        gradle = files[script].read_text()
        assert 'listOf("arm64-v8a", "x86_64")' in gradle and "minSdk = 26" in gradle
    for app in ("app/src/main/kotlin/com/example/chat", "views/src/main/kotlin/com/example/views"):
        assert '"libmodel_chat.so"' in files[f"{app}/ChatActivity.kt"].read_text()


def test_kotlin_compiles_against_android(project: Path, tmp_path: Path) -> None:
    """By Compose's compiler plugin, against declarations of the functions of Compose that the app uses."""
    plugin = f"-Xplugin={KOTLIN / 'compose-compiler-plugin.jar'}"
    sources = [*kotlin_files(project), *kotlin_files(DECLARATIONS)]
    compile_kotlin(sources, tmp_path / "app.jar", tool(ANDROID), options=(plugin,))
    assert "com/example/chat/ComposableSingletons" in "\n".join(zipfile.ZipFile(tmp_path / "app.jar").namelist())


def test_the_rules_keep_what_the_native_library_looks_up(project: Path) -> None:
    """JNI finds classes by names, which the shrinker of an app may change."""
    source = (project / "mlcpipe/src/main/cpp/jni.cc").read_text()
    rules = (project / "mlcpipe/consumer-rules.pro").read_text()
    for name in ("Native", "Sink", "MlcpipeException"):
        assert f"ai/mlcpipe/{name}" in source and f"class ai.mlcpipe.{name}" in rules


@pytest.mark.everything  # tests/native/test_sdk.py compiles the same C++
def test_cmake_builds_the_library(project: Path, tmp_path: Path) -> None:
    """For a JVM of this machine, which loads it."""
    home = jdk()
    built = build(project / "mlcpipe/src/main/cpp", tmp_path / "build", {**compilers("gcc"), "JAVA_HOME": str(home)})
    compile_kotlin([*plain_kotlin(), _loads(tmp_path)], tmp_path / "app.jar")
    path = os.pathsep.join(map(str, (tmp_path / "app.jar", *CLASSES)))
    command = [home / "bin" / "java", f"-Djava.library.path={built}", "-cp", path, "ai.mlcpipe.LoadsKt"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert "threads; expected" in done.stdout, done.stderr[-2000:]


def _changed(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle as of another model: its shape differs."""
    path = shutil.copytree(bundle, folder) / "mlcpipe.json"
    manifest = json.loads(path.read_text())
    manifest["model"]["context_length"] -= 1
    path.write_text(json.dumps(manifest))
    return folder


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
    bundle, other = project.parent / "chat", project.parent / "android-x86_64"
    assert "two bundles of one model" in said(bundle, bundle, "-o", tmp_path / "project")
    assert "models for different machines" in said(bundle, _changed(other, tmp_path / "b"), "-o", tmp_path / "project")
    changed = _changed(bundle, tmp_path / "CHAT")
    assert "bundles of one name" in said(bundle, changed, "-o", tmp_path / "project")
    assert "--title has no effect" in said(bundle, "--title", "x", "-o", tmp_path / "project")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "build.gradle.kts").write_text("")
    assert "mine" in said(bundle, "--overwrite", "-o", tmp_path / "mine")
    assert not (tmp_path / "project").exists()
