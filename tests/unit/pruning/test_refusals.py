"""What cannot be pruned is refused in one line that names it, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.cli import main
from mlcpipe.errors import ConfigError, MlcpipeError, UsageError
from mlcpipe.models import build_model
from mlcpipe.pruning.methods import heads, layers, width
from mlcpipe.pruning.prune import prune
from mlcpipe.pruning.work import PrunedTensor, Work
from tests.conftest import TinyLlama, write_llama

REFUSED: dict[str, tuple[dict[str, Any], type[MlcpipeError], str]] = {
    "an unknown method": ({"method": "random"}, UsageError, "--method; expected wanda.*found 'random'"),
    "a path as a method": ({"method": "../work"}, UsageError, "--method"),
    "keep and ratio": ({"method": "width", "keep": 32, "ratio": 0.5}, UsageError, "both"),
    "keep of a pattern": ({"method": "wanda", "keep": 2}, UsageError, "no effect on wanda"),
    "ratio of a pattern": ({"method": "sparsegpt", "ratio": 0.5}, UsageError, "no effect on sparsegpt"),
    "a ratio of 0": ({"method": "width", "ratio": 0.0}, UsageError, "--ratio; expected a number between 0 and 1"),
    "no ratio": ({"method": "width", "ratio": float("nan")}, UsageError, "--ratio"),
    "all layers": ({"method": "layers", "keep": 2}, UsageError, "--keep of 2 layers; expected 1; found 2"),
    "no layer": ({"method": "layers", "keep": 0}, UsageError, "--keep of 2 layers"),
    "an odd width": ({"method": "width", "keep": 33}, UsageError, "--keep of 104 MLP columns; expected 32, 64, 96"),
    "no text": ({"method": "wanda", "calibration": "absent.txt"}, UsageError, "absent.txt"),
}  # fmt: skip


def with_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], type[MlcpipeError], str]] = {
    "experts": (with_config(model_type="qwen3_moe"), ConfigError, "cannot be pruned.*'qwen3_moe'"),
    "windows of two kinds": (with_config(model_type="gemma2"), ConfigError, "'gemma2'"),
    "a type that is no name": (with_config(model_type=["llama"]), ConfigError, "cannot be pruned"),
    "a quantized checkpoint": (
        with_config(quantization_config={"quant_method": "fp8"}), MlcpipeError, "quantiz|fp8",
    ),
    "a model of embeddings": (lambda folder: (folder / "modules.json").write_text("[]") and None, UsageError, "embeds"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), UsageError, "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_cannot_be_honoured(case: str, tmp_path: Path) -> None:
    options, error, named = REFUSED[case]
    write_llama(tmp_path / "model")
    with pytest.raises(error, match=named):
        prune(tmp_path / "model", output=tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_that_cannot_be_pruned(case: str, tmp_path: Path) -> None:
    change, error, named = CHECKPOINTS[case]
    change(write_llama(tmp_path / "model"))
    with pytest.raises(error, match=named):
        prune(tmp_path / "model", method="layers", output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "model")

    def stopped(work: Work) -> Iterator[PrunedTensor]:
        yield PrunedTensor("model.norm.weight", "model.norm.weight")
        (partial,) = (path for path in tmp_path.iterdir() if "partial" in path.name)
        assert (partial / "model.safetensors").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("mlcpipe.pruning.prune.Stream", lambda *arguments, **options: None)
    monkeypatch.setattr(layers, "pruned", stopped)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path / "model", method="layers", output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_checkpoint_is_never_its_own_output(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    with pytest.raises(UsageError, match="itself"):
        prune(folder, method="layers", output=tmp_path / "." / "model", overwrite=True)


def test_another_folder_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--overwrite replaces what this command wrote: a checkpoint of somebody's has no recipe."""
    model, other = (str(write_llama(tmp_path / name)) for name in ("model", "other"))
    assert main(["prune", model, "-o", other, "--method", "layers", "--overwrite"]) == 2
    assert "refusing to overwrite" in capsys.readouterr().err


def test_how_many_may_stay() -> None:
    """Query heads of a llama must divide its hidden size, in transformers; a qwen2's need not."""
    config = TinyLlama(hidden_size=64, heads=8, kv_heads=4, head_dim=16, layers=3, intermediate_size=96).config_json()
    llama, qwen2 = (build_model(config | {"model_type": name}) for name in ("llama", "qwen2"))
    assert list(heads.allowed(llama)) == [1, 2, 4] and list(heads.allowed(qwen2)) == [1, 2, 3, 4]
    assert list(width.allowed(llama)) == [32, 64, 96] and list(layers.allowed(llama)) == [1, 2, 3]
