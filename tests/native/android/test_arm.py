"""What a phone runs: the library's Kotlin on a JVM for 64-bit ARM under qemu, and a signed app with Android's own views."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

import mlcpipe
from mlcpipe import Engine
from mlcpipe.compiler.link import find_zig
from mlcpipe.compiler.native_runtime import DevicePlugin
from tests.conftest import DEMO, QUICK
from tests.native.android.answers import QUESTIONS, conversation
from tests.native.android.conftest import (
    CLASSES,
    DECLARATIONS,
    compile_kotlin,
    jdk,
    kotlin_files,
    link_jni,
    scenario_in,
    tool,
)
from tests.native.conftest import private_cache

pytestmark = pytest.mark.everything  # compiles the runtime for another machine, and runs a JVM in an emulator

ANDROID = "sdk/usr/share/java/com.android.android-23.jar"
DX = "sdk/usr/share/java/com.android.dx.jar"
ARM = "aarch64-linux-gnu.2.31"
JAVA = "arm64/usr/lib/jvm/java-21-openjdk-arm64/bin/java"
MAX_APP_BYTES = 3 << 20
MAX_AAR_BYTES, MAX_LIBRARY_BYTES, MAX_VULKAN_BYTES = 2_000_000, 2_500_000, 3_200_000


@pytest.fixture(scope="session")
def arm_library(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libmlcpipe.so for 64-bit ARM, with glibc in the place of Android's C library."""
    if find_zig() is None:
        pytest.skip("libraries for another machine need ziglang")
    folder = tmp_path_factory.mktemp("arm")
    link_jni(folder / "libmlcpipe.so", private_cache(shared), ARM)
    return folder


def test_an_arm_jvm_answers_as_python(
    project: Path, library_and_classes: tuple[Path, Path], arm_library: Path, tmp_path: Path
) -> None:
    """With the code that the project has for phones."""
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("no qemu-aarch64")
    java = tool(JAVA)
    system = tool("arm64")
    for name in ("libc", "libm"):  # by the names that Android has
        (tmp_path / f"{name}.so").symlink_to(next((system / "usr/lib/aarch64-linux-gnu").glob(f"{name}.so.6")))
    emulated = ["qemu-aarch64", "-L", system, "-E", f"LD_LIBRARY_PATH={tmp_path}", java, "-XX:TieredStopAtLevel=1"]
    scenario = scenario_in(emulated, arm_library, library_and_classes[1])
    data, code = project / "models/chat/model.mlcp", project / "jniLibs/arm64-v8a/libmodel_chat.so"
    said = scenario("conversation", data, code, *QUESTIONS)
    same = mlcpipe.compile(DEMO, target=QUICK, quantization="q4f16_1", kv_cache_dtype="q8", output=tmp_path / "same")
    assert [(s["prompt"], s["text"], s["tokens"][2]) for s in said] == conversation(Engine(same))


def run(*words: str | Path) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_size_of_the_library(arm_library: Path, shared: Path, vulkan_plugin: DevicePlugin, tmp_path: Path) -> None:
    """Stripped, without Vulkan and with it."""
    link_jni(tmp_path / "vulkan.so", private_cache(shared), ARM, vulkan_plugin)
    plain, vulkan = (arm_library / "libmlcpipe.so").stat().st_size, (tmp_path / "vulkan.so").stat().st_size
    assert plain <= MAX_LIBRARY_BYTES and plain < vulkan <= MAX_VULKAN_BYTES, (plain, vulkan)


def test_the_library_becomes_an_aar(project: Path, arm_library: Path, tmp_path: Path) -> None:
    """As Gradle would put it together for phones alone; an app with Android's own views compiles against it."""
    module, aar = project / "mlcpipe", tmp_path / "mlcpipe.aar"
    declared = [DECLARATIONS / "PowerManager.kt"]
    compile_kotlin([*kotlin_files(module), *declared], tmp_path / "all.jar", tool(ANDROID))
    classes = _without(tmp_path / "all.jar", tmp_path / "classes.jar", ("android/",), (".class", ".kotlin_module"))
    resources = module / "src/main/resources"
    with zipfile.ZipFile(classes, "a", zipfile.ZIP_DEFLATED) as jar:
        for path in resources.rglob("*.txt"):
            jar.write(path, path.relative_to(resources))
    text = (module / "src/main/AndroidManifest.xml").read_text()
    manifest = text.replace("<manifest ", '<manifest package="ai.mlcpipe" ', 1)
    with zipfile.ZipFile(aar, "w", zipfile.ZIP_DEFLATED) as library:
        library.writestr("AndroidManifest.xml", manifest)
        library.write(classes, "classes.jar")
        library.write(module / "consumer-rules.pro", "proguard.txt")
        library.writestr("R.txt", "")
        library.write(arm_library / "libmlcpipe.so", "jni/arm64-v8a/libmlcpipe.so")
    assert aar.stat().st_size <= MAX_AAR_BYTES, aar.stat().st_size
    _check_aar(aar, tmp_path)
    compile_kotlin(kotlin_files(project / "views"), tmp_path / "views.jar", tool(ANDROID), tmp_path / "of_aar.jar")


def _check_aar(aar: Path, folder: Path) -> None:
    """Its manifest and code are Android's, and its licences and rules are there; classes.jar becomes `of_aar.jar`."""
    with zipfile.ZipFile(aar) as library:
        assert ElementTree.fromstring(library.read("AndroidManifest.xml")).attrib == {"package": "ai.mlcpipe"}
        assert library.read("jni/arm64-v8a/libmlcpipe.so")[18] == 183
        assert "-keep class ai.mlcpipe.Native" in library.read("proguard.txt").decode()
        (folder / "of_aar.jar").write_bytes(library.read("classes.jar"))
    with zipfile.ZipFile(folder / "of_aar.jar") as jar:
        names = jar.namelist()
        assert {"ai/mlcpipe/Mlcpipe.class", "ai/mlcpipe/android/DeviceEvents.class"} < set(names)
        assert all(name.startswith(("ai/mlcpipe/", "META-INF/")) for name in names), names
        assert "kotlinx.coroutines" in jar.read("META-INF/ai.mlcpipe/THIRD_PARTY.txt").decode()


def dex(project: Path, folder: Path) -> Path:
    """Byte code of the app with Android's views, and of what it needs."""
    sources = [path for module in ("mlcpipe", "views") for path in kotlin_files(project / module)]
    declared = [DECLARATIONS / "PowerManager.kt"]
    flags = ("-Xlambdas=class", "-Xsam-conversions=class")  # dx knows no later byte code than Java 8's without lambdas
    compile_kotlin([*sources, *declared], folder / "app.jar", tool(ANDROID), options=flags)
    jars = [_without(jar, folder / jar.name, ("META-INF/", "android/")) for jar in (folder / "app.jar", *CLASSES)]
    java = [jdk() / "bin" / "java", "-Xmx1g", "-cp", tool(DX), "com.android.dx.command.Main", "--dex"]
    run(*java, "--min-sdk-version=26", f"--output={folder / 'classes.dex'}", *jars)
    return folder / "classes.dex"


def _without(jar: Path, output: Path, begins: Sequence[str], kinds: tuple[str, ...] = (".class",)) -> Path:
    """The files of some kinds of a jar without those of some folders."""
    with zipfile.ZipFile(jar) as source:
        kept = {name: source.read(name) for name in source.namelist() if name.endswith(kinds)}
    with zipfile.ZipFile(output, "w") as target:
        for name, content in kept.items():
            if not name.startswith(tuple(begins)):
                target.writestr(name, content)
    return output


def test_the_views_become_a_signed_app(project: Path, arm_library: Path, tmp_path: Path) -> None:
    """As Gradle would build it for a phone, with libmlcpipe.so linked for glibc."""
    for command, package in (("aapt2", "aapt"), ("zipalign", "zipalign"), ("apksigner", "apksigner")):
        if shutil.which(command) is None:
            pytest.skip(f"no Android tools: apt install {package}")
    manifest = tmp_path / "AndroidManifest.xml"
    text = (project / "views/src/main/AndroidManifest.xml").read_text()
    manifest.write_text(text.replace("<manifest ", '<manifest package="com.example.views" ', 1))
    app = tmp_path / "app.apk"
    versions = ("--min-sdk-version", "26", "--target-sdk-version", "35", "--version-code", "1", "--version-name", "1")
    run("aapt2", "link", "-o", app, "-I", tool(ANDROID), "--manifest", manifest, *versions)
    with zipfile.ZipFile(app, "a", zipfile.ZIP_DEFLATED) as package:
        package.write(dex(project, tmp_path), "classes.dex")
        package.write(arm_library / "libmlcpipe.so", "lib/arm64-v8a/libmlcpipe.so")
        package.write(project / "jniLibs/arm64-v8a/libmodel_chat.so", "lib/arm64-v8a/libmodel_chat.so")
        licences = project / "mlcpipe/src/main/resources/META-INF/ai.mlcpipe/THIRD_PARTY.txt"
        package.write(licences, "META-INF/ai.mlcpipe/THIRD_PARTY.txt")
    signed = sign(app, tmp_path)
    verified = run("apksigner", "verify", "--verbose", "--min-sdk-version", "26", signed)
    assert "v2 scheme (APK Signature Scheme v2): true" in verified
    assert "v3 scheme (APK Signature Scheme v3): true" in verified
    described = run("aapt2", "dump", "badging", signed)
    assert "launchable-activity: name='com.example.views.ChatActivity'" in described
    assert "native-code: 'arm64-v8a'" in described and "uses-permission" not in described
    assert signed.stat().st_size <= MAX_APP_BYTES, signed.stat().st_size


def sign(app: Path, folder: Path) -> Path:
    """The app at its final place, signed with a key that is made for it."""
    key, signed = folder / "key.jks", folder / "signed.apk"
    names = ("-alias", "key", "-dname", "CN=test", "-storepass", "secret", "-keypass", "secret")
    kind = ("-keyalg", "EC", "-groupname", "secp256r1", "-validity", "2")
    run(jdk() / "bin" / "keytool", "-genkeypair", "-keystore", key, *kind, *names)
    run("zipalign", "-p", "4", app, folder / "aligned.apk")
    key_options = ("--ks", key, "--ks-pass", "pass:secret", "--min-sdk-version", "26")
    run("apksigner", "sign", *key_options, "--out", signed, folder / "aligned.apk")
    return signed
