"""Exports a checkpoint as ONNX for browsers; runs in the environment that build_onnx.py makes.

python onnx_worker.py CHECKPOINT FILE.onnx fp32|int4
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
from onnxruntime_genai.models import builder

# Float32 activations, as not every adapter has shader-f16; logits of the last token alone, as ours. Matrix products
# with weights in blocks of 32, as Q4_0 and q4f16_1 have; the embedding stays in float32.
_COMMON = ("use_webgpu_fp32=true", "prune_lm_head=true")
_OPTIONS = {
    "fp32": _COMMON,
    "int4": (*_COMMON, "block_size=32", "shared_embeddings=false", "op_types_to_quantize=MatMul"),
}


def main() -> None:
    """Export, fix what transformers.js cannot read, write one file."""
    checkpoint, target, precision = sys.argv[1:]
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, builder.__file__, "-i", checkpoint, "-o", folder, "-p", precision, "-e", "webgpu"]
        options = ["-c", str(Path(folder) / "cache"), "--extra_options", *_OPTIONS[precision]]
        subprocess.run([*command, *options], check=True)
        model = onnx.load(str(Path(folder) / "model.onnx"))
    for value in [*model.graph.input, *model.graph.output]:
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "kv_cache_dim":  # left open by the exporter, needed by transformers.js
                dimension.dim_value = head
    onnx.save(model, target)


if __name__ == "__main__":
    main()
