"""One library for every CPU of an architecture: each variant's code and numbers, which one is chosen, other machines."""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import mlcpipe
from mlcpipe.bundle import read_manifest
from mlcpipe.cli import main
from mlcpipe.compiler.build import build, generated_source
from mlcpipe.compiler.export import export, prepare_model
from mlcpipe.errors import BundleError, TargetError, UsageError
from mlcpipe.host import cpu_features
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, host_variants, load_target
from tests.conftest import UNOPTIMIZED, Bundles, TinyLlama, exact_target

TOKENS = [1, 5, 9, 200, 17, 3, 250, 8, 8, 90]
HERE = [v.name for v in host_variants(load_target("cpu"))]
RUNNABLE = [v.name for v in host_variants(load_target("cpu")) if cpu_features.host_features().issuperset(v.features)]
# Variants whose prompts have activations in float32 or bfloat16, with how far logits may be from float32; others have bytes.
FLOAT, SAME = {"baseline": 5e-3, "amx_int8": 0.1}, 5e-3
TRIPLES = {
    "x86_64": "x86_64-unknown-linux-gnu",
    "windows": "x86_64-pc-windows-msvc",
    "aarch64": "aarch64-linux-gnu",
    "macos": "arm64-apple-macos",
}


def board(folder: Path, mtriple: str, mcpu: str = "") -> str:
    """Write a target file that inherits from `cpu`; return its path."""
    path = folder / "board.toml"
    cpu = f'mcpu = "{mcpu}"\n' if mcpu else ""
    path.write_text(f'base = "cpu"\n[tvm]\nmtriple = "{mtriple}"\n{cpu}', encoding="utf-8")
    return str(path)


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets this machine have only the features of a variant."""

    def pretend(variant: str) -> None:
        has = next(v.features for v in host_variants(load_target("cpu")) if v.name == variant)
        monkeypatch.setattr(cpu_features, "host_features", lambda: frozenset(has))

    return pretend


@pytest.mark.parametrize("scheme", [pytest.param("q0f32", marks=pytest.mark.everything), "q4f16_1"])
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.full
def test_every_variant_gives_the_same_logits(
    variant: str, scheme: str, all_variants: Bundles, tiny_bundles: Bundles,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    def logits_of(name: str) -> NDArray[np.float32]:
        monkeypatch.setenv("MLCPIPE_CPU_VARIANT", name)
        engine = mlcpipe.Engine(all_variants[scheme], threads=2)
        assert engine.variant == name
        monkeypatch.delenv("MLCPIPE_CPU_VARIANT")
        return engine.logits(TOKENS)

    found, others = logits_of(variant), [name for name in RUNNABLE if name not in {*FLOAT, variant}]
    if scheme != "q0f32" and variant in FLOAT:
        target = exact_target(tmp_path)
        bundle = mlcpipe.compile(tiny_bundles.checkpoint, target=target, quantization=scheme, output=tmp_path / "float")
        expected = mlcpipe.Engine(bundle, threads=2).logits(TOKENS)
    elif scheme != "q0f32" and others:
        expected = logits_of(others[0])
    else:
        expected = mlcpipe.Engine(tiny_bundles[scheme], threads=2).logits(TOKENS)
    # The same operations in vectors of other lengths; a float16 of the KV cache may round to its other neighbour.
    assert np.abs(found - expected).max() < (1e-4 if scheme == "q0f32" else FLOAT.get(variant, SAME))


@pytest.mark.full
@pytest.mark.parametrize("variant", RUNNABLE)
def test_sampling_of_every_variant(variant: str, all_variants: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that the host calls by name are found under the variant's own symbols."""
    monkeypatch.setenv("MLCPIPE_CPU_VARIANT", variant)
    engine = mlcpipe.Engine(all_variants["q4f16_1"], threads=2)
    sampling = mlcpipe.SamplingParams(temperature=0.0, repetition_penalty=1.1, logit_bias={7: -100.0})
    done = engine.generate(TOKENS, sampling=sampling, max_tokens=8)
    monkeypatch.delenv("MLCPIPE_CPU_VARIANT")
    best = mlcpipe.Engine(all_variants["q4f16_1"], threads=2).generate(TOKENS, sampling=sampling, max_tokens=8)
    assert done.token_ids == best.token_ids


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.full
def test_a_machine_without_the_features_takes_the_next(
    variant: str, all_variants: Bundles, features: Callable[..., None]
) -> None:
    features(variant)
    engine = mlcpipe.Engine(all_variants["q4f16_1"], threads=2)
    assert engine.variant == variant
    assert engine.logits(TOKENS).shape == (len(TOKENS), engine.vocab_size)


@pytest.mark.full
@pytest.mark.skipif(len(RUNNABLE) < 2, reason="needs a CPU with more than the base of its architecture")
def test_a_variant_that_cannot_run_is_refused_in_words(
    all_variants: Bundles, features: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    features("baseline")
    monkeypatch.setenv("MLCPIPE_CPU_VARIANT", RUNNABLE[0])
    with pytest.raises(UsageError, match=f"asks for {RUNNABLE[0]}, which this CPU cannot run; expected a CPU with"):
        mlcpipe.Engine(all_variants["q4f16_1"])
    monkeypatch.setenv("MLCPIPE_CPU_VARIANT", "pentium")
    with pytest.raises(UsageError, match="names no variant of the bundle; expected .*baseline; found 'pentium'"):
        mlcpipe.Engine(all_variants["q4f16_1"])


@pytest.mark.skipif(len(RUNNABLE) < 2, reason="needs a CPU with more than the base of its architecture")
def test_a_bundle_for_one_cpu_is_refused_on_a_lesser_one(tiny_bundles: Bundles, features: Callable[..., None]) -> None:
    bundle = tiny_bundles["q0f32"]  # compiled for this CPU
    features("baseline")
    with pytest.raises(TargetError, match="a CPU with more instructions.*compile the model again with --target cpu"):
        mlcpipe.Engine(bundle)


@pytest.mark.full
def test_a_manifest_that_moves_variants_is_refused(all_variants: Bundles, tmp_path: Path) -> None:
    """Else one word in the manifest would make the machine run instructions that it has not."""
    for name, old, new in (("features", '"avx512_vnni"', '"avx2"'), ("name", '"name": "baseline"', '"name": "base"')):
        bundle = Path(shutil.copytree(all_variants["q4f16_1"], tmp_path / name))
        path = bundle / "mlcpipe.json"
        text = path.read_text(encoding="utf-8")
        if old not in text:
            continue
        path.write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises((BundleError, TargetError)):
            mlcpipe.Engine(bundle)


@pytest.mark.full
def test_inspect_and_doctor_say_which_runs(
    all_variants: Bundles, features: Callable[..., None], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "400")
    lesser = HERE[-2]
    features(lesser)
    assert main(["inspect", str(all_variants["q4f16_1"])]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert re.search(r"\bruns\b", lines[lesser]) and "can run" in lines["baseline"]
    assert all("lacks" in lines[name] for name in HERE[:-2])
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "cpu variant" in out and f"{lesser}; better ones: {HERE[0]} needs" in out and "also runs baseline" in out
    monkeypatch.setenv("MLCPIPE_CPU_VARIANT", HERE[0])
    main(["doctor"])
    assert re.search(rf"MLCPIPE_CPU_VARIANT\s+broken\s+asks for {HERE[0]}", capsys.readouterr().out)


@pytest.mark.full
def test_the_manifest_lists_variants_best_first(all_variants: Bundles, tiny_bundles: Bundles) -> None:
    manifest = read_manifest(all_variants["q4f16_1"])
    assert [v.name for v in manifest.target.variants] == HERE
    assert all(v.bytes > 10_000 for v in manifest.target.variants)
    assert {name for kernel in manifest.kernels for name in kernel.variants} == set(HERE)
    (alone,) = read_manifest(tiny_bundles["q4f16_1"]).target.variants
    assert alone.name == RUNNABLE[0]
    assert set(alone.features) <= cpu_features.host_features()


@pytest.mark.skipif(sys.platform != "linux" or "avx512_vnni" not in HERE, reason="reads code of x86 through dlsym")
@pytest.mark.parametrize("name", ["__truncsfhf2", "__extendhfsf2"])
@pytest.mark.full
def test_what_variants_share_is_the_code_of_the_base(
    name: str, all_variants: Bundles, tiny_bundles: Bundles, tmp_path: Path
) -> None:
    """Every object file defines these weakly. The linker once took the AVX-512 one, which baseline called."""
    base = tmp_path / "base"
    target = Path(board(tmp_path, TRIPLES["x86_64"], "x86-64"))
    target.write_text(target.read_text() + UNOPTIMIZED.removeprefix("[tvm]\n"))
    mlcpipe.compile(tiny_bundles.checkpoint, target=str(target), quantization="q4f16_1", output=base)
    every, least, best = (code(path, name) for path in (all_variants["q4f16_1"], base, tiny_bundles["q4f16_1"]))
    assert every == least
    if "avx512_vnni" in RUNNABLE:
        assert every != best, "this test would see it"


def code(bundle: Path, name: str) -> bytes:
    """The first bytes of a function of a bundle's library; it refers to nothing outside."""
    function = getattr(ctypes.CDLL(str(bundle / "lib" / "model.so")), name)
    return ctypes.string_at(ctypes.cast(function, ctypes.c_void_p).value or 0, 160)


# ---- the code of each variant


@cache
def lowered(triple: str, folder: Path) -> Lowering:
    target, scheme = load_target(board(folder, triple)), load_scheme("q4f16_1")
    model = prepare_model(TinyLlama().config_json(), target, scheme)
    return pipeline.run(export(model, target, scheme, 64), *pipeline.SHARED)


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """The assembly of a variant for a system."""
    folder = tmp_path_factory.mktemp("board")

    @cache
    def generated(system: str, name: str) -> str:
        state = lowered(TRIPLES[system], folder)
        variant = next(v for v in compiled_variants(state.target) if v.name == name)
        return generated_source(build(pipeline.run(replace(state, variant=variant), pipeline.SCHEDULE)))

    return generated


def operations(source: str) -> set[str]:
    """The mnemonics of assembly text."""
    lines = (line.split("#")[0].split() for line in source.splitlines())
    return {words[0] for words in lines if words and not words[0].startswith(".") and not words[0].endswith(":")}


def registers(source: str, kind: str) -> int:
    return len(re.findall(rf"%{kind}\d", source))


@pytest.mark.full_cases("x86_64")
@pytest.mark.parametrize("system", ["x86_64", "windows"])
@pytest.mark.full
def test_the_base_of_x86_has_no_avx(system: str, assembly: Callable[[str, str], str]) -> None:
    source = assembly(system, "baseline")
    assert not registers(source, "ymm") and not registers(source, "zmm") and registers(source, "xmm")
    # Every VEX and EVEX mnemonic begins with v, the two that are older do not write vectors.
    assert {op for op in operations(source) if op.startswith("v")} <= {"verr", "verw"}
    later = r"(pshufb|pmulld|pmaxs[bd]|pmins[bd]|blendv\w*|round[ps][sd]|pmovzx\w+|pmovsx\w+|pextr[bdq]|pinsr[bdq]"
    later += r"|popcnt\w*|lzcnt\w*|tzcnt\w*|andn\w?|bextr\w?|mulx\w?|s[ah][lr]x\w?|rorx\w?|movbe\w?|crc32\w?|ptest)"
    assert not [op for op in operations(source) if re.fullmatch(later, op)]


@pytest.mark.full_cases("avx_vnni")  # avx2 has a subset of its code, and runs on a Haswell in test_qemu.py
@pytest.mark.parametrize("variant", ["avx2", "avx_vnni"])
@pytest.mark.full
def test_avx2_has_no_register_of_512_bits(variant: str, assembly: Callable[[str, str], str]) -> None:
    source = assembly("x86_64", variant)
    assert registers(source, "ymm") and not registers(source, "zmm") and not registers(source, "k")
    assert not re.search(r"%[xy]mm(1[6-9]|2\d|3[01])\b", source), "registers above 15 are EVEX"
    assert any(op.startswith("vfmadd") for op in operations(source))
    assert ("vpdpbusd" in source) <= (variant == "avx_vnni")


@pytest.mark.full
def test_avx512_uses_512_bits(assembly: Callable[[str, str], str]) -> None:
    source = assembly("x86_64", "avx512_vnni")
    assert len(re.findall(r"vfmadd\w+ps\s.*%zmm", source)) > 100
    assert registers(source, "zmm") > registers(source, "ymm")


# A variant of each system; test_qemu.py runs baseline and dotprod on CPUs that have no more.
@pytest.mark.full_cases("aarch64-i8mm", "macos-dotprod")
@pytest.mark.parametrize("variant", ["i8mm", "dotprod", "baseline"])
@pytest.mark.parametrize("system", ["aarch64", "macos"])
@pytest.mark.full
def test_code_for_arm(system: str, variant: str, assembly: Callable[[str, str], str]) -> None:
    source = assembly(system, variant)
    assert "fmla" in operations(source) or re.search(r"fmla(\.4s)?\s", source)
    if variant == "baseline":
        assert not re.search(r"\b[su]dot\b|\b[su]mmla\b", source)
    if variant == "dotprod":
        assert not re.search(r"\b[su]mmla\b", source)
    assert not re.search(r"\bz\d+\.[bhsd]\b", source), "no SVE"


@pytest.mark.parametrize(
    ("mcpu", "mtriple", "variant"),
    [
        ("cortex-a76", "aarch64-linux-gnu", "dotprod"),
        ("neoverse-v1", "aarch64-linux-gnu", "i8mm"),
        ("cortex-a53", "aarch64-linux-gnu", "baseline"),
        ("apple-m1", "arm64-apple-macos", "dotprod"),
        ("apple-m2", "arm64-apple-macos", "i8mm"),
        ("haswell", "x86_64-pc-windows-msvc", "avx2"),
        ("znver4", "x86_64-unknown-linux-gnu", "avx512_vnni"),
        ("skylake-avx512", "x86_64-unknown-linux-gnu", "avx2"),
        ("alderlake", "x86_64-unknown-linux-gnu", "avx_vnni"),
        ("diamondrapids", "x86_64-unknown-linux-gnu", "amx_int8"),
        ("nehalem", "x86_64-unknown-linux-gnu", "baseline"),
    ],
)
def test_a_named_cpu_gets_one_variant_of_its_own(mcpu: str, mtriple: str, variant: str, tmp_path: Path) -> None:
    target = load_target(board(tmp_path, mtriple, mcpu))
    (one,) = compiled_variants(target)
    assert (one.name, one.mcpu) == (variant, mcpu)
    assert set(one.features) >= set(
        next(v for v in target.variants if (v.name, v.arch) == (variant, one.arch)).features
    )


def test_native_trusts_the_system_not_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a VM that masks AVX-512 LLVM's name of the CPU still promises it."""
    if cpu_features.architecture() != "x86_64":
        pytest.skip("x86")
    import tvm

    masked = frozenset(next(v for v in load_target("cpu").variants if v.name == "avx2").features)
    monkeypatch.setattr(cpu_features, "host_features", lambda: masked)
    monkeypatch.setattr(tvm.target.codegen, "llvm_get_system_cpu", lambda: "znver5")
    native = load_target("cpu-native")
    (one,) = compiled_variants(native)
    assert one.name == "avx2" and set(one.features) == masked
    model, scheme = prepare_model(TinyLlama().config_json(), native, load_scheme("q4f16_1")), load_scheme("q4f16_1")
    state = pipeline.run(export(model, native, scheme, 64), *pipeline.SHARED, pipeline.SCHEDULE)
    source = generated_source(build(state))
    assert registers(source, "ymm") and not registers(source, "zmm") and "vpdpbusd" not in source


def test_native_of_another_architecture(tmp_path: Path) -> None:
    other = "aarch64-linux-gnu" if cpu_features.architecture() == "x86_64" else "x86_64-linux-gnu"
    with pytest.raises(TargetError, match="native means this machine's CPU.*set an mcpu"):
        compiled_variants(load_target(board(tmp_path, other, "native")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": ["avx2"]}, "does not list all its features in board; expected features for LLVM's avx,"),
        ({"features": ["quantum"]}, "needs an unknown feature"),
        ({"arch": "mips64"}, "variants.0.arch in .*; expected x86_64, aarch64 or riscv64; found 'mips64'"),
        ({"name": "../x"}, "variants.0.name in .*; found '../x'"),
        ({"mattr": ["avx"]}, "variants.0.mattr.0 in .*; found 'avx'"),
        ({"schedule": {"lanes": -1}}, "an integer >= 0 or a name; found -1"),
        ({"schedule": {"int8_gemv_streams": 0}}, "knob int8_gemv_streams in .*; expected an integer >= 1; found 0"),
        ({"schedule": {"gemm_rows": "six"}}, "knob gemm_rows in .*; expected an integer >= 1; found six"),
        ({"colour": "red"}, "variants.0.colour in .*; expected no such field; found 'red'"),
    ],
)
def test_a_variant_that_cannot_be_trusted(change: dict[str, object], words: str, tmp_path: Path) -> None:
    entry: dict[str, object] = {
        "name": "fast", "arch": "x86_64", "mcpu": "x86-64-v3", "mattr": [], "features": [], "schedule": {"lanes": 8},
    }  # fmt: skip
    entry |= change
    body = "\n".join(f"{key} = {toml(value)}" for key, value in entry.items())
    path = tmp_path / "board.toml"
    path.write_text(f'base = "cpu"\n[tvm]\nmtriple = "x86_64-linux-gnu"\n[[variants]]\n{body}\n', encoding="utf-8")
    with pytest.raises(TargetError, match=words):
        compiled_variants(load_target(str(path)))


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    return str(value) if isinstance(value, int) else repr(value)
