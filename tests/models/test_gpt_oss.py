"""gpt-oss with its experts in MXFP4 has the logits of transformers with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

from safetensors.numpy import load_file, save_file

import mlcpipe
from mlcpipe.bundle import read_manifest
from mlcpipe.checkpoint import open_checkpoint
from tests.conftest import exact_target
from tests.models import tiny
from tests.unit.checkpoint.mxfp4_files import PLAIN, random_stack, values

CASE = tiny.TinyCase("gpt_oss", "default", {"vocab_size": 130})


def quantized(source: Path, folder: Path) -> Path:
    """The checkpoint with random experts in MXFP4; those of `source` get the same numbers."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    plain = load_file(source / "model.safetensors")
    codes = dict(plain)
    for seed, name in enumerate([name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]):
        experts, k, n = codes.pop(name).shape
        codes[f"{name}_blocks"], codes[f"{name}_scales"] = random_stack(seed, experts, n, k)
        plain[name] = np.ascontiguousarray(values(codes[f"{name}_blocks"], codes[f"{name}_scales"]).swapaxes(1, 2))
    save_file(codes, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, source / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.full
def test_kept_codes_have_the_logits_of_transformers(tmp_path: Path) -> None:
    """Activations in float32: sums of the same products in another order."""
    source = tiny.write_tiny(CASE, tmp_path / "source", seed=3)
    folder = quantized(source, tmp_path / "quantized")
    assert open_checkpoint(folder).quantization(None) == "keep"
    bundle = tmp_path / "bundle"
    mlcpipe.compile(folder, target=exact_target(tmp_path), kv_cache_dtype="f32", output=bundle)
    tokens = tiny.prompt_tokens(CASE, 40)
    found = mlcpipe.Engine(bundle).logits_stepwise(tokens, prefill_tokens=20)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()[19:]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))
    kept = {param.name: param for param in read_manifest(bundle).params}
    schemes = {param.scheme for name, param in kept.items() if ".experts_" in name and name.endswith("q_weight")}
    assert schemes == {"MXFP4"} and kept["model.layers.0.self_attn.sinks"].dtype == "float32"
