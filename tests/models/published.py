"""Models in the sizes in which they are published, and the code of their kernels for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.compiler.backends.base import Backend
from mlcpipe.compiler.export import export, prefill_chunk, prepare_model
from mlcpipe.passes import pipeline
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from tests.models import small_configs

# Of a family a model that people run, one layer of it (of gemma and gpt_oss two: with and without a window), of the others
# the layer of an 8B llama.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "head_dim": 64},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8},
    "phi3": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 96},
    "gemma2": {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"hidden_size": 1152, "intermediate_size": 6912, "num_key_value_heads": 1, "head_dim": 256},
    "olmo2": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16},
    "mixtral": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8},
    "qwen3_moe": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8},
    "gpt_oss": {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
}  # fmt: skip


def generated(family: str, target_name: str, scheme: str, backend: Backend) -> str:
    """The code of a model's kernels."""
    target, quantization = load_target(target_name), load_scheme(scheme)
    layers = 2 if family.startswith(("gemma", "gpt_oss")) else 1
    sizes = {"head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096, **SIZES.get(family, SIZES["llama"])}
    model = prepare_model(small_configs.config(family, num_hidden_layers=layers, **sizes), target, quantization)
    chunk = prefill_chunk(model, target, 4096)
    scheduled = pipeline.run(export(model, target, quantization, chunk), *pipeline.SHARED, pipeline.SCHEDULE)
    return backend.source(scheduled)
