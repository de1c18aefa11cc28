"""`mlcpipe inspect` of a checkpoint, and the recipe that it writes: shown, compiled, and refused with one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlcpipe import cli
from mlcpipe.bundle import read_manifest
from tests.conftest import QUICK, TinyLlama, write_llama
from tests.unit.cli.conftest import Run

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyLlama(hidden_size=256, intermediate_size=512, heads=4, head_dim=64, layers=1)
    return write_llama(tmp_path_factory.mktemp("recipe") / "checkpoint", sizes)


@pytest.mark.full
def test_a_recipe_is_written_edited_and_compiled(mlcpipe_run: Run, checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    shown = mlcpipe_run("inspect", checkpoint, "--quantization", "q4f16_m", "-o", recipe, env={"COLUMNS": "200"})
    assert shown.returncode == 0, shown.stderr
    row = next(line.split() for line in shown.stdout.splitlines() if line.startswith(EMBEDDING))
    assert row[:5] == [EMBEDDING, "304", "x", "256", "Q6_K"] and "6.56" in row and float(row[-1]) < 0.03
    assert "8 matrices" in shown.stdout and f"--quantization {recipe}" in shown.stdout
    text = recipe.read_text()
    assert f'"{EMBEDDING}" = "Q6_K"' in text and text.count("Q4_K") == 7
    recipe.write_text(text.replace('v_proj.weight" = "Q4_K"', 'v_proj.weight" = "q8f16_1"'))
    made = mlcpipe_run("compile", checkpoint, "--quantization", recipe, "--target", QUICK, "-o", tmp_path / "b")
    assert made.returncode == 0, made.stderr
    manifest = read_manifest(tmp_path / "b")
    schemes = {param.name.rpartition(".")[0].rpartition(".")[2]: param.scheme for param in manifest.params}
    assert manifest.quantization.startswith("mixed-")
    assert schemes["v_proj"] == "q8f16_1" and schemes["qk_proj"] == "Q4_K" and schemes["embed_tokens"] == "Q6_K"
    assert "Q4_K 12" in mlcpipe_run("inspect", tmp_path / "b").stdout
    again = mlcpipe_run("inspect", checkpoint, "-o", recipe)
    assert again.returncode == 2 and "the recipe exists already" in again.stderr


@pytest.mark.full
def test_bits_are_spent_without_a_text(mlcpipe_run: Run, checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--bits-per-weight", "5", "--bits-text", "none")
    shown = json.loads(mlcpipe_run("inspect", checkpoint, *arguments, "--json").stdout)
    sizes = [(one["nbytes"], one["bits"], one["shape"]) for one in shown["matrices"]]
    numbers = sum(8 * nbytes / bits for nbytes, bits, _ in sizes)
    assert 4.5 < 8 * sum(nbytes for nbytes, *_ in sizes) / numbers <= 5 and "guessed" in shown["how"]
    made = mlcpipe_run("compile", checkpoint, *arguments, "--target", QUICK, "-o", tmp_path / "b", "--json")
    assert made.returncode == 0 and json.loads(made.stdout)["bits_per_weight"] <= 5, made.stderr
    assert "guessed: no text was given" in made.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "--bits-text", "none"], "--bits-text has no effect"),
        (["inspect", "--bits-per-weight", "5", "--quantization", "q8f16_1"], "both set the bits"),
        (["inspect", "--bits-per-weight", "5", "--bits-text", "no/such/text"], "missing text"),
        (["inspect", "--bits-per-weight", "1", "--bits-text", "none"], "for this model"),
        (["inspect", "-o", "recipe.json"], "expected a .toml file"),
        (["inspect", "--kernels"], "--kernels is for bundles"),
        (["inspect", "--quantization", "no/such.toml"], "missing recipe"),
        (["inspect", "--quantization", "q9"], "unknown quantization"),
        (["compile", "-o", "b", "--quantization", "no/such.toml"], "missing recipe"),
    ],
)
def test_mistakes_are_one_line(
    checkpoint: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *options = arguments
    assert cli.main([verb, str(checkpoint), *options]) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: ") and written.count("\n") == 1 and words in written, written
