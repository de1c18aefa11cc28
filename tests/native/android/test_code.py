"""A model's code for Android: what the library asks of the system, and that an app on a JVM answers with it."""

from __future__ import annotations

import ctypes.util
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import Engine
from mlcpipe.bundle import read_manifest
from mlcpipe.cli import main
from mlcpipe.compiler.android_library import PAGE_BYTES, link_android_library
from mlcpipe.compiler.export import prepare_model
from mlcpipe.compiler.link import find_linker
from mlcpipe.errors import CompileError
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from tests.conftest import DEMO, QUICK, Bundles
from tests.native.android.answers import QUESTIONS, conversation
from tests.native.android.conftest import Scenario

pytestmark = pytest.mark.full  # compiles bundles with several variants


def read_elf(library: Path) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf of binutils, with g++")
    command = ["readelf", "--wide", "--file-header", "--segments", "--dynamic", "--dyn-syms", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("optimized", [False, True])
def test_the_library_needs_android_alone(
    optimized: bool, android_bundle: Callable[[str], Path], tiny_bundles: Bundles, tmp_path: Path
) -> None:
    """Of every variant, and of one as users have it: of loops LLVM makes calls."""
    bundle = android_bundle("android")
    assert {variant.name for variant in read_manifest(bundle).target.variants} == {"i8mm", "dotprod", "baseline"}
    if optimized:
        (tmp_path / "phone.toml").write_text('base = "android"\n[tvm]\nmcpu = "cortex-a76"\n', encoding="utf-8")
        bundle = mlcpipe.compile(
            tiny_bundles.checkpoint, target=str(tmp_path / "phone.toml"), quantization="q4f16_1", output=tmp_path / "b"
        )
    elf = read_elf(bundle / "lib" / "model.so")
    assert "Machine:                           AArch64" in elf
    assert set(re.findall(r"\(NEEDED\).*\[(.*)\]", elf)) == {"libm.so", *(["libc.so"] if optimized else [])}
    loads = re.findall(r"^ +LOAD .* (0x[0-9a-f]+)$", elf, re.MULTILINE)
    assert loads and {int(alignment, 16) for alignment in loads} == {PAGE_BYTES}
    names = re.findall(r"(GLOBAL|WEAK) +\S+ +(\S+) (\S+)$", elf, re.MULTILINE)
    assert [name for _, section, name in names if section != "UND"] == ["mlcpipe_library_symbols"]
    asked = {name for bind, section, name in names if section == "UND" and bind == "GLOBAL"}
    assert asked <= {"memcpy", "memmove", "memset", "cosf", "sinf", "expf", "log2f", "erff"}
    assert ("memcpy" in asked) == optimized
    soname = re.search(r"SONAME.*\[(libmlcpipe_[0-9a-f]{16}\.so)\]", elf)
    assert soname and "TEXTREL" not in elf


def test_a_phone_s_memory_is_spared(android_bundle: Callable[[str], Path]) -> None:
    """Keys and values take 8 bits unless another dtype is asked for."""
    model = read_manifest(android_bundle("android")).model
    assert (model.kv_dtype, model.prefill_chunk) == ("q8", 128)
    config, target, scheme = (
        json.loads((DEMO / "config.json").read_text()),
        load_target("android"),
        load_scheme("q4f16_1"),
    )
    assert prepare_model(config, target, scheme, "f32").kv_dtype == "float32"
    assert prepare_model(config, replace(target, kv_cache_dtype="auto"), scheme).kv_dtype == "float16"


@pytest.fixture
def glibc_for_android(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc's libraries under the names of Android's."""
    if platform.machine() != "x86_64" or ctypes.util.find_library("c") != "libc.so.6":
        pytest.skip("another CPU than x86-64, or another C library")
    for name in ("libc", "libm"):
        (tmp_path / f"{name}.so").symlink_to(next(Path("/").glob(f"lib/x86_64-linux-gnu/{name}.so.6")))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


def test_an_app_answers_with_it(project: Path, scenario: Scenario, tmp_path: Path, glibc_for_android: None) -> None:
    """With the data that phones have too."""
    data, code = project / "models/chat/model.mlcp", project / "jniLibs/x86_64/libmodel_chat.so"
    said = scenario("conversation", data, code, *QUESTIONS)
    same = mlcpipe.compile(DEMO, target=QUICK, quantization="q4f16_1", kv_cache_dtype="q8", output=tmp_path / "same")
    assert [(s["prompt"], s["text"], s["tokens"][2]) for s in said] == conversation(Engine(same))


def test_weights_and_code_that_do_not_belong_together(
    project: Path,
    android_bundle: Callable[[str], Path],
    tiny_bundles: Bundles,
    scenario: Scenario,
    tmp_path: Path,
    glibc_for_android: None,
) -> None:
    """Of another machine, and of another model."""
    code = project / "jniLibs/x86_64/libmodel_chat.so"
    for name, bundle in (("phone", android_bundle("android")), ("other", tiny_bundles["q4f16_1"])):
        assert main(["package", str(bundle), "--app", "weights", "-o", str(tmp_path / name)]) == 0
        (said,) = scenario("openWith", tmp_path / name, code)
        assert said["code"] == {"phone": "TARGET", "other": "BUNDLE"}[name], said
    (said,) = scenario("code", project / "jniLibs/arm64-v8a/libmodel_chat.so")
    assert said["code"] == "BUNDLE"


def test_a_function_that_android_lacks_is_refused(tmp_path: Path) -> None:
    linker = find_linker("aarch64-linux-android")
    source, made = tmp_path / "code.c", tmp_path / "code.o"
    table = "char mlcpipe_0123456789abcdef_code[] = {0}; char mlcpipe_library_symbols[] = {0};"
    source.write_text(f"{table} void qsort_s(void); void f(void) {{ qsort_s(); }}")
    linker.compile(source, made)
    with pytest.raises(CompileError, match="qsort_s"):
        link_android_library(made, tmp_path / "model.so", linker)
