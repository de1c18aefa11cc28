"""Structural hashes of every scheduled PrimFunc of three small models, for every target: what a refactor must not change.

`python -m tests.kernels.golden` writes `golden/<target>.json` again, `python -m tests.kernels.golden vulkan cuda` those
of two targets; `git diff` then names the kernels that are different. A change of kernels commits the new hashes.
Hashes ignore the names of variables and blocks. No tuning records are used: they are data, which has its own tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm_ffi import structural_hash

from mlcpipe.compiler.export import export, prepare_model
from mlcpipe.passes import pipeline
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import compiled_variants, load_target, target_names

GOLDEN = Path(__file__).with_name("golden")
CHUNK = 64
SIZES: Mapping[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Model:
    """A small configuration and how it is compiled; `kv_cache_dtype` is for targets with pages of their own."""

    quantization: str
    config: Mapping[str, Any]
    kv_cache_dtype: str = "auto"


MODELS: Mapping[str, Model] = {
    "llama": Model("q4f16_1", {"model_type": "llama"}),
    "gemma2": Model("q8f16_1", {"model_type": "gemma2", "query_pre_attn_scalar": 64, "sliding_window": 64}, "q8"),
    "qwen3_moe": Model(
        "q4f32_1", {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    ),
}


def golden_names() -> list[str]:
    """Every target but those that depend on the machine: `cpu` is in each target of its architectures."""
    return sorted({*target_names()} - {"cpu", "cpu-native"})


def hashes(name: str, model_name: str) -> dict[str, str]:
    """`variant/function` -> structural hash of the scheduled kernel, in hexadecimal."""
    target, wanted = load_target(name), MODELS[model_name]
    scheme = load_scheme(wanted.quantization)
    kv_cache_dtype = wanted.kv_cache_dtype if target.own_pages else "auto"
    model = prepare_model({**SIZES, **wanted.config}, target, scheme, kv_cache_dtype)
    state = pipeline.run(export(model, target, scheme, CHUNK), *pipeline.SHARED)
    found = {}
    for variant in compiled_variants(target):
        scheduled = pipeline.run(replace(state, variant=variant), pipeline.SCHEDULE)
        for gv, func in scheduled.mod.functions.items():
            if isinstance(func, tirx.PrimFunc):
                number = structural_hash(func, map_free_vars=True) & (1 << 64) - 1
                found[f"{variant.name}/{gv.name_hint}"] = f"{number:016x}"
    return dict(sorted(found.items()))


def main(names: list[str]) -> None:
    """Write the files of hashes."""
    GOLDEN.mkdir(exist_ok=True)
    for name in names or golden_names():
        found = {model: hashes(name, model) for model in MODELS}
        (GOLDEN / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
