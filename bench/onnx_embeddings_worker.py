"""Exports a BERT checkpoint as ONNX, fuses it as onnxruntime's own tool does, and embeds; in an environment of its own.

python onnx_embeddings_worker.py CHECKPOINT FOLDER 8|32 THREADS

Reads a line of JSON from stdin, lists of token ids of one length, and answers each with one: seconds, and the first
four embeddings (the mean of all rows of a text).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers import optimizer
from transformers import BertModel


def main() -> None:
    """Export what is missing, then answer until stdin ends."""
    checkpoint, folder, bits, threads = (Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    model = BertModel.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    plain, fused, packed = (folder / f"bert-{name}.onnx" for name in ("plain", "fused", "int8"))
    if not packed.exists():
        export(model.eval(), plain)
        sizes = {"num_heads": model.config.num_attention_heads, "hidden_size": model.config.hidden_size}
        optimizer.optimize_model(str(plain), "bert", **sizes).save_model_to_file(str(fused))
        # Fused operations have no shapes that the tool infers: all of their numbers are float32.
        fallback = {"DefaultTensorType": onnx.TensorProto.FLOAT}
        quantize_dynamic(fused, packed, weight_type=QuantType.QInt8, per_channel=True, extra_options=fallback)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(packed if bits == 8 else fused, options)
    for line in sys.stdin:
        texts = np.array(json.loads(line), np.int64)
        began = time.perf_counter()
        (rows,) = session.run(None, {"input_ids": texts, "attention_mask": np.ones_like(texts)})
        means = rows.mean(1)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "embeddings": means[:4].tolist()}), flush=True)


def export(model: torch.nn.Module, path: Path) -> None:
    """The model's last hidden states from `input_ids` and `attention_mask` i64[texts, tokens]."""

    class Body(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.body(input_ids, attention_mask=attention_mask).last_hidden_state

    ids = torch.ones(2, 8, dtype=torch.int64)
    torch.onnx.export(
        Body(), (ids, ids), str(path), input_names=["input_ids", "attention_mask"], output_names=["rows"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in ("input_ids", "attention_mask", "rows")},
        opset_version=17, dynamo=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
