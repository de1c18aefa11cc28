"""MLCPIPE_DUMP and MLCPIPE_DEBUG on real compiles: every pass of every phase, each variant and target in its folder."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mlcpipe.compiler import job
from mlcpipe.compiler.build import build_for_device
from mlcpipe.compiler.compile import compile as compile_model
from mlcpipe.compiler.export import export, prepare_model
from mlcpipe.passes import pipeline
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target
from tests.conftest import EXACT, TinyLlama, write_llama

CPU_PHASES = (pipeline.MODEL, pipeline.OPERATORS, pipeline.MEMORY, pipeline.VM)


def files(phase: pipeline.Phase) -> list[str]:
    return [f"{i:02d}_{one.__name__}.py" for i, one in enumerate(phase.passes)]


def dumped(folder: Path) -> dict[str, list[str]]:
    """Names of files by folder."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        found.setdefault(str(path.parent.relative_to(folder)), []).append(path.name)
    return found


def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, quantization: str) -> Path:
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(layers=1))
    monkeypatch.setenv("MLCPIPE_DUMP", str(tmp_path / "ir"))
    monkeypatch.setenv("MLCPIPE_DEBUG", "1")
    compile_model(checkpoint, target=target, quantization=quantization, output=tmp_path / "bundle")
    return tmp_path / "ir"


@pytest.mark.full
def test_every_phase_of_every_variant_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        job, "compiled_variants", lambda target: compiled_variants(target)[-2:]
    )  # the others take longest
    (tmp_path / "cpu.toml").write_text('base = "cpu"\n[tvm]\nopt-level = 0\n', encoding="utf-8")
    folder = compiled(tmp_path, monkeypatch, str(tmp_path / "cpu.toml"), "q0f32")
    variants = [variant.name for variant in compiled_variants(load_target("cpu"))[-2:]]
    expected = {f"cpu/{phase.name}": files(phase) for phase in CPU_PHASES}
    for name in variants:
        expected[f"cpu/{name}/{pipeline.SCHEDULE.name}"] = files(pipeline.SCHEDULE)
        expected[f"cpu/{name}/kernels/{pipeline.LLVM.name}"] = files(pipeline.LLVM)
        expected[f"cpu/{name}/kernels/{pipeline.UNCHECKED.name}"] = files(pipeline.UNCHECKED)
        expected[f"cpu/{name}/kernels_of_hosts/{pipeline.LLVM.name}"] = files(pipeline.LLVM)
    assert dumped(folder) == expected
    after = [one.__name__ for one in pipeline.MODEL.passes].index("fuse_add_norm")
    names = files(pipeline.MODEL)[after - 1 : after + 1]
    fused = [(folder / "cpu/1-model" / name).read_text(encoding="utf-8") for name in names]
    assert ["add_rms_norm" in text for text in fused] == [False, True]
    scheduled = {(folder / f"cpu/{name}/4-schedule/00_schedule_kernels.py").read_bytes() for name in variants}
    assert len(scheduled) == len(variants)
    timed = set(re.findall(r"^ *\d+\.\d ms  (\S+ \S+)", capsys.readouterr().err, re.MULTILINE))
    assert timed >= {key.replace("/", " ") for key in expected if key.count("/") == 1}
    assert timed >= {" ".join(key.rsplit("/", 1)) for key in expected}


@pytest.mark.full
def test_companions_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, companions in (("board", '["other.toml"]'), ("other", "[]")):
        text = f"companions = {companions}\n{EXACT}"
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = dumped(compiled(tmp_path, monkeypatch, "board.toml", "auto"))
    for name in ("board", "other"):
        (variant,) = compiled_variants(load_target("cpu-native"))
        assert found[f"{name}/{pipeline.MODEL.name}"] == files(pipeline.MODEL)
        assert found[f"{name}/{variant.name}/kernels/{pipeline.LLVM.name}"] == files(pipeline.LLVM)


@pytest.mark.full
def test_phases_of_a_device_are_written(tmp_path: Path) -> None:
    target, scheme = load_target("webgpu"), load_scheme("q0f32")
    state = export(prepare_model(TinyLlama(layers=1).config_json(), target, scheme), target, scheme, 64)
    build_for_device(pipeline.run(replace(state, dump=tmp_path), *pipeline.SHARED, pipeline.SCHEDULE))
    expected = {f"webgpu/{phase.name}": files(phase) for phase in pipeline.SHARED}
    for phase in (pipeline.SCHEDULE, pipeline.VM, pipeline.DEVICE, pipeline.UNCHECKED, pipeline.HOST, pipeline.SHADERS):
        expected[f"webgpu/{state.variant.name}/{phase.name}"] = files(phase)
    assert dumped(tmp_path) == expected
