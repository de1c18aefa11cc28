"""The Swift package: what is in it, and on Linux, with the native runtime, it answers as Python does."""

from __future__ import annotations

import json
import plistlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.cli import main
from mlcpipe.compiler.link import find_zig
from mlcpipe.compiler.static_library import own_table
from mlcpipe.support.resources import native_path
from tests.conftest import DEMO, UNOPTIMIZED, Bundles
from tests.swift.conftest import write_sources
from tests.swift.swift import LINKER, WORK, swift

APPLE = Path(__file__).parents[1] / "metal" / "apple"
QUESTIONS = ("Hello! What is a compiler?", "And what is a cat?", "Thank you.")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("package") / "Mlcpipe")


@pytest.fixture(scope="module")
def ios_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_zig() is None:
        pytest.skip("static libraries need ziglang")
    folder = tmp_path_factory.mktemp("ios")
    (folder / "ios.toml").write_text(f'base = "ios"\n{UNOPTIMIZED}', encoding="utf-8")
    return mlcpipe.compile(DEMO, target=str(folder / "ios.toml"), quantization="q4f16_1", output=folder / "bundle")


@pytest.fixture(scope="module")
def package(ios_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `mlcpipe package --app ios` makes."""
    output = tmp_path_factory.mktemp("app") / "Chat"
    assert main(["package", str(ios_bundle), "--app", "ios", "-o", str(output)]) == 0
    return output


def expected(bundle: Path) -> dict[str, object]:
    """Greedy answers of Python to a conversation, which has its own answers in later prompts."""
    engine, chat, answers, texts = Engine(bundle, threads=1), [], [], []
    for question in QUESTIONS:
        chat.append({"role": "user", "content": question})
        answer = engine.chat(chat, sampling=GREEDY, max_tokens=60)
        chat.append({"role": "assistant", "content": answer.text})
        answers.append(answer.token_ids)
        texts.append(answer.text)
    messages = [{"role": "user", "content": question} for question in QUESTIONS]
    return {"bundle": f"file://{WORK}/bundle", "messages": messages, "answers": answers, "texts": texts}


@pytest.mark.everything
def test_swift_answers_as_python_does(built: Path, demo_bundles: Bundles) -> None:
    """`swift test` of a package that depends on ours: greedy tokens, cancel, close, errors, saved chats, the session."""
    shutil.copytree(demo_bundles["q4f16_1"], built / "bundle")
    (built / "expected.json").write_text(json.dumps(expected(demo_bundles["q4f16_1"])))
    words = ["swift-test", "--package-path", f"{WORK}/tests", *LINKER]
    said = swift(built, *words, MLCPIPE_EXPECTED=f"{WORK}/expected.json")
    assert "Executed 0 tests" not in said and "0 failures" in said and "warning:" not in said, said[-6000:]


@pytest.mark.everything
def test_the_app_parses(sources: Path) -> None:
    """SwiftUI is on Apple's systems alone: types are not checked."""
    app = [path.relative_to(sources) for path in sources.rglob("*.swift") if "Tests" not in path.parts]
    assert len(app) > 8
    assert swift(sources, "swiftc", "-parse", "-swift-version", "5", *app) == ""


def test_the_folder_has_what_it_needs_and_no_more(sources: Path) -> None:
    files = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*") if path.is_file()}
    assert {"Package.swift", "README.md", "THIRD_PARTY.txt", "App/Chat/ChatApp.swift"} < set(files)
    assert not any(word in name for name in files for word in ("runtime/cuda/", "/cli/", "exports.map", ".py"))
    manifest = files["Package.swift"].read_text()
    listed = re.search(r"sources: \[(.*)\]", manifest)
    searched = re.search(r"cxxSettings: \[(.*)\]", manifest)
    assert listed is not None and searched is not None
    for name in [*json.loads(f"[{listed[1]}]"), *json.loads(f"[{searched[1]}]")]:
        assert (sources / "Sources" / "CMlcpipe" / name).exists(), name
    header = files["Sources/CMlcpipe/include/mlcpipe_model.h"].read_text()
    assert header.count("mlcpipe_0123456789abcdef_code") == 2
    definitions = files["Sources/CMlcpipe/runtime.cc"].read_text()
    assert '#define MLCPIPE_ABI "' in definitions and "#define TVM_DLL\n" in definitions
    for name, path in files.items():
        if not name.startswith("Sources/CMlcpipe/"):
            assert not re.search(r"@[A-Z]+@", path.read_text()), name


def test_the_licences_name_all_that_is_in_the_folder(sources: Path) -> None:
    text = (sources / "THIRD_PARTY.txt").read_text()
    for title in ("mlcpipe (Apache License 2.0)", "apache-tvm ", "apache-tvm-ffi ", "NOTICE", "DLPack"):
        assert title in text, title
    tvm = sources / "Sources" / "CMlcpipe" / "tvm"
    shim = native_path() / "tvm_shim"
    for path in (path for path in tvm.rglob("*") if path.is_file()):
        own = (shim / path.relative_to(tvm)).is_file() or path.name == "dlpack.h"
        assert own or "Licensed to the Apache Software Foundation" in path.read_text(), path


def old_plist(text: str) -> dict[str, Any]:
    """A property list in the notation of NeXTSTEP, as Xcode's projects are."""
    words = iter(re.findall(r'"[^"]*"|[{}()=;,]|[^\s{}()=;,"]+', text.split("\n", 1)[1]))

    def value(word: str) -> Any:
        if word == "{":
            made = {}
            while (key := next(words)) != "}":
                assert next(words) == "="
                made[key.strip('"')] = value(next(words))
                assert next(words) == ";", key
            return made
        if word == "(":
            items = []
            while (item := next(words)) != ")":
                items.append(value(item))
                assert next(words) == ","
            return items
        assert word not in "})=;,"
        return word.strip('"')

    made = value(next(words))
    assert list(words) == []
    return dict(made)


def test_the_project_names_what_it_has(sources: Path) -> None:
    app = sources / "App"
    text = (app / "Chat.xcodeproj" / "project.pbxproj").read_text()
    project = old_plist(text)
    objects = project["objects"]
    assert set(re.findall(r"\bA1\d{22}\b", text)) == set(objects) and project["rootObject"] in objects
    target = next(one for one in objects.values() if one["isa"] == "PBXNativeTarget")
    assert [(app / objects[group]["path"]).is_dir() for group in target["fileSystemSynchronizedGroups"]] == [True]
    assert [objects[product]["productName"] for product in target["packageProductDependencies"]] == ["Mlcpipe"]
    entitlements = plistlib.loads((app / "Chat.entitlements").read_bytes())
    memory = ("increased-memory-limit", "extended-virtual-addressing")
    assert entitlements == {f"com.apple.developer.kernel.{name}": True for name in memory}
    for name in objects[target["buildConfigurationList"]]["buildConfigurations"]:
        assert (app / objects[name]["buildSettings"]["CODE_SIGN_ENTITLEMENTS"]).is_file()


@pytest.mark.full
def test_a_bundle_becomes_a_package(package: Path, ios_bundle: Path) -> None:
    """The code of both platforms, the table that the header names, and the data."""
    info = plistlib.loads((package / "Model.xcframework" / "Info.plist").read_bytes())
    assert info["CFBundlePackageType"] == "XFWK"
    libraries = {
        one["LibraryIdentifier"]: package / "Model.xcframework" / one["LibraryIdentifier"] / one["LibraryPath"]
        for one in info["AvailableLibraries"]
    }
    variants = [one.get("SupportedPlatformVariant") for one in info["AvailableLibraries"]]
    assert list(libraries) == ["ios-arm64", "ios-arm64-simulator"] and variants == [None, "simulator"]
    code = ios_bundle / "lib" / "libmodel.a"
    assert libraries["ios-arm64"].read_bytes() == code.read_bytes()
    assert own_table(libraries["ios-arm64-simulator"]) == own_table(code)
    assert own_table(code) in (package / "Sources" / "CMlcpipe" / "include" / "mlcpipe_model.h").read_text()
    manifest = json.loads((ios_bundle / "mlcpipe.json").read_text())
    assert manifest["model"]["kv_dtype"] == "q8" and manifest["model"]["prefill_chunk"] == 128
    assert [one["name"] for one in manifest["target"]["variants"]] == ["i8mm", "dotprod", "baseline"]
    assert (package / "App" / "Chat" / "model.mlcp").stat().st_size > manifest["memory_plan"]["weights_bytes"]


@pytest.mark.full
def test_what_cannot_be_packaged_is_one_line(
    package: Path, ios_bundle: Path, demo_bundles: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: object) -> str:
        capsys.readouterr()
        assert main(["package", *map(str, words), "--app", "ios"]) == 2
        return capsys.readouterr().err

    assert "no static library for iOS" in said(demo_bundles["q4f16_1"], "-o", tmp_path / "app")
    assert "--title" in said(ios_bundle, "--title", "x", "-o", tmp_path / "app")
    assert "one bundle" in said(ios_bundle, ios_bundle, "-o", tmp_path / "app")
    other = tmp_path / "other"
    other.mkdir()
    (other / "Package.swift").write_text("")
    assert "other" in said(ios_bundle, "--overwrite", "-o", other)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    old = shutil.copytree(package, tmp_path / "old")
    assert main(["package", str(ios_bundle), "--app", "ios", "--overwrite", "-o", str(old)]) == 0


@pytest.mark.everything  # runtime.cc and metal.mm are compiled below
def test_the_runtime_compiles_for_ios(package: Path, tmp_path: Path) -> None:
    folder = package / "Sources" / "CMlcpipe"
    files = [folder / "runtime.cc", folder / "tvm.cc", folder / "pool.c", *(folder / "runtime/text").glob("*.cc")]
    _compile_for_ios(folder, files, tmp_path)


@pytest.mark.full
def test_a_bundle_for_metal_becomes_a_package(tmp_path: Path) -> None:
    """Whose runtime has Metal, compiled against declarations of its classes in the place of Apple's SDK."""
    if find_zig() is None:
        pytest.skip("static libraries need ziglang")
    bundle, package = tmp_path / "bundle", tmp_path / "Chat"
    mlcpipe.compile(DEMO, target="metal-a17", quantization="q4f16_1", output=bundle)
    assert main(["package", str(bundle), "--app", "ios", "-o", str(package)]) == 0
    code = package / "Model.xcframework" / "ios-arm64" / "libmodel.a"
    assert code.read_bytes() == (bundle / "lib" / "libmodel.a").read_bytes()
    folder, described = package / "Sources" / "CMlcpipe", (package / "Package.swift").read_text()
    assert own_table(code) in (folder / "include" / "mlcpipe_model.h").read_text()
    assert "let metal = true" in described and '.linkedFramework("Metal")' in described
    assert not list(package.rglob("*.metal"))  # SwiftPM would compile them
    _compile_for_ios(
        folder, [folder / "runtime.cc", folder / "metal.mm"], tmp_path, "-DMLCPIPE_METAL", f"-isystem{APPLE}"
    )


def _compile_for_ios(folder: Path, files: Sequence[Path], output: Path, *options: str) -> None:
    """Without warnings, by zig with its headers of Darwin, which are those of macOS."""
    zig = find_zig()
    assert zig is not None
    target = ["-target", "aarch64-macos.14.0"]
    target += ["-Xclang", "-triple", "-Xclang", "arm64-apple-ios17.0.0"]
    system = [f"-isystem{folder / 'tvm' / name}" for name in
              (".", "include", "3rdparty/tvm-ffi/include", "3rdparty/tvm-ffi/3rdparty/dlpack/include")]  # fmt: skip
    flags = ["-O0", "-Wall", "-Wextra", "-Werror", f"-I{folder / 'include'}", f"-I{folder / 'runtime'}", *system, "-c"]
    languages = {
        ".c": [zig.command[-1], "-std=gnu11", "-DMLCPIPE_RUNTIME"],
        ".cc": ["c++", "-std=c++17"],
        ".mm": ["c++", "-std=c++17", "-x", "objective-c++", "-fobjc-arc"],
    }
    for path in files:
        words = [*languages[path.suffix], *target, *flags, *options]
        command = [*zig.command[:-1], *words, str(path), "-o", str(output / f"{path.name}.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
