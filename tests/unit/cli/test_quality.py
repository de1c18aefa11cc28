"""`mlcpipe quality`, and `mlcpipe compile --require` that makes no bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlcpipe.cli import main
from tests.conftest import QUICK, Bundles
from tests.unit.cli.conftest import Run


@pytest.fixture
def bundle(tiny_bundles: Bundles, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundles["q4f16_1"], tmp_path / "bundle"))


def test_a_table_a_manifest_and_an_exit_code(mlcpipe_run: Run, tiny_bundles: Bundles, bundle: Path) -> None:
    options = ["quality", bundle, "--reference", tiny_bundles["q0f32"], "--tokens", "600", "--decode-tokens", "200"]
    done = mlcpipe_run(*options)
    assert done.returncode == 0, done.stderr
    for words in ("bits per weight", "in q0f32", "KL divergence", "99.9 %", "same top token", "RMS of Δp", "tok/s"):
        assert words in done.stdout
    kept = json.loads((bundle / "mlcpipe.json").read_text())["quality"]
    assert kept["prefill"]["tokens"] > kept["decode"]["tokens"] > 0
    shown = mlcpipe_run("inspect", bundle).stdout
    assert "quality of prefill" in shown and "against" in shown and f"{kept['prefill']['kld']:.5f}" in shown
    failed = mlcpipe_run(*options, "--json", "--require", "kld<=1e-9")
    assert failed.returncode == 3 and "expected kld<=1e-09; found" in failed.stderr
    assert json.loads(failed.stdout)["quality"]["prefill"]["kld"] == pytest.approx(kept["prefill"]["kld"])


@pytest.mark.parametrize(
    "options, words",
    [
        (("--require", "kld<0.1"), "expected such as kld<=0.03"),
        (("--require", "kls<=0.1"), "kld_99_9"),
        (("--tokens", "0"), "--tokens"),
        (("--text", "no.txt"), "missing text"),
    ],
    ids=["malformed", "unknown", "tokens", "text"],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny_bundles: Bundles, bundle: Path, options: tuple[str, str], words: str
) -> None:
    before = (bundle / "mlcpipe.json").read_bytes()
    assert main(["quality", str(bundle), "--reference", str(tiny_bundles["q0f32"]), *options]) == 2
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and words in errors[0] and out == ""
    assert (bundle / "mlcpipe.json").read_bytes() == before


def test_another_checkpoint_is_no_reference(
    bundle: Path, demo_bundles: Bundles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(bundle), "--reference", str(demo_bundles.checkpoint)]) == 2
    words = f"the bundle was compiled from another checkpoint in {demo_bundles.checkpoint}; expected the content "
    line = capsys.readouterr().err
    assert words in line and "to compare two models add --other-reference" in line


@pytest.mark.full
def test_require_fails_the_build(
    mlcpipe_run: Run, cli_environment: dict[str, str], tiny_bundles: Bundles, tmp_path: Path
) -> None:
    compiled = ["compile", tiny_bundles.checkpoint, "--target", QUICK, "--quantization", "q4f16_1"]
    compiled += ["-o", tmp_path / "out" / "bundle", "--require"]
    accepted = Path(cli_environment["MLCPIPE_CONFIG"]) / "bundles"
    known = set(accepted.iterdir()) if accepted.exists() else set()
    done = mlcpipe_run(*compiled, "kld<=1e-9")
    assert done.returncode == 3 and done.stderr.splitlines()[-1].startswith("error: the prefill of the bundle"), (
        done.stderr
    )
    assert list((tmp_path / "out").iterdir()) == []
    left = set(accepted.iterdir()) - known
    assert len(left) == 1  # the reference in the cache
    (tmp_path / "own.txt").write_text("One sentence of many words, said again. " * 200)
    options = ["--text", tmp_path / "own.txt", "--tokens", "400"]
    done = mlcpipe_run(*compiled, "kld<=10,top1>=0.01", *options)
    assert done.returncode == 0 and "quality of prefill" in done.stdout, done.stderr
    quality = json.loads((tmp_path / "out" / "bundle" / "mlcpipe.json").read_text())["quality"]
    assert quality["reference_quantization"] == "q0f32" and quality["text"] == "own.txt"
    assert quality["prefill"]["tokens"] <= 400
    done = mlcpipe_run("chat", tmp_path / "out" / "bundle", "-p", "a", "--max-tokens", "1")
    assert done.returncode == 0 and "note: this runs" not in done.stderr  # it stays accepted


@pytest.mark.parametrize(
    "options, words",
    [
        (("--text", "no.txt", "--require", "kld<=1"), "missing text"),
        (("--tokens", "0", "--require", "kld<=1"), "--tokens"),
        (("--tokens", "500"), "--tokens has no effect"),
        (("--text", "README.md"), "--text has no effect"),
    ],
    ids=["text", "tokens", "tokens-alone", "text-alone"],
)
def test_what_a_build_cannot_measure_is_said_before_it(
    capsys: pytest.CaptureFixture[str], tiny_bundles: Bundles, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    command = ["compile", str(tiny_bundles.checkpoint), "--target", QUICK, "-o", str(tmp_path / "out")]
    assert main([*command, *options]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_other_machines_bundles_cannot_be_measured(mlcpipe_run: Run, tiny_bundles: Bundles, tmp_path: Path) -> None:
    options = ["-o", tmp_path / "out", "--require", "kld<=1"]
    for target in ("webgpu", "riscv64-linux"):
        done = mlcpipe_run("compile", tiny_bundles.checkpoint, "--target", target, *options)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert not (tmp_path / "out").exists()
