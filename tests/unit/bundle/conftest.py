"""A small bundle on disk: parameters, a stand-in library, a tokenizer file and the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlcpipe.bundle import (
    FORMAT_VERSION,
    FileInfo,
    KernelInfo,
    LinkerInfo,
    Manifest,
    MemoryPlan,
    ModelInfo,
    ParamInfo,
    ParamsWriter,
    TargetInfo,
    VariantInfo,
    abi_hash,
    write_manifest,
)
from mlcpipe.bundle.states import Part, State

MODEL = ModelInfo(
    model_type="llama",
    vocab_size=320,
    hidden_size=128,
    num_layers=2,
    context_length=256,
    dtype="float32",
    kv_dtype="float32",
    prefill_chunk=64,
    max_batch=64,
)


_PARTS = (
    Part(name="keys", dtype="float32", shape=(32, 16), token_axis=1),
    Part(name="values", dtype="float32", shape=(16, 32), token_axis=0),
)
STATES = tuple(
    State(name=f"layers.{layer}.attention", kind="pages", copies=2, parts=_PARTS, layers=(layer,)) for layer in range(2)
)


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Arrays of every dtype and of sizes that are no multiples of the alignment."""
    rng = np.random.default_rng(0)
    dtypes = ("float16", "float32", "uint32", "int8", "uint8")
    arrays = {
        f"layer.{i}.{dtype}": rng.integers(0, 127, (3, 5 + 11 * i)).astype(dtype) for i in range(3) for dtype in dtypes
    }
    arrays["scalar"] = np.array(1.5, dtype="float32")
    arrays["large"] = rng.standard_normal((40, 40)).astype("float32")
    return arrays


def small_manifest(params: tuple[ParamInfo, ...], files: dict[str, FileInfo]) -> Manifest:
    """Of MODEL, with the given parameters and files."""
    return Manifest(
        format_version=FORMAT_VERSION,
        mlcpipe_version="0.1.0",
        abi=abi_hash(),
        target=TargetInfo(
            name="cpu",
            triple="x86_64-linux-gnu",
            variants=(VariantInfo(name="avx2", features=("avx2",), tvm_target='{"kind": "llvm"}', bytes=1000),),
        ),
        model=MODEL,
        quantization="q0f32",
        weight_layout="row",
        entry_points=("prefill", "decode"),
        params=params,
        memory_plan=MemoryPlan(weights_bytes=1000, workspace_bytes={"decode": 4096}),
        states=STATES,
        kernels=(KernelInfo(variants=("avx2",), name="matmul", op="matmul", rule="gemv", reason="one row"),),
        linker=LinkerInfo(name="cc", version="14.2"),
        checkpoint_hash="ab" * 32,
        created="2026-11-21T03:00:00+00:00",
        files=files,
    )


@pytest.fixture
def make_manifest() -> Callable[[tuple[ParamInfo, ...], dict[str, FileInfo]], Manifest]:
    """A manifest of one small model, with the given parameters and files."""
    return small_manifest


@pytest.fixture
def bundle(tmp_path: Path, arrays: dict[str, np.ndarray]) -> Path:
    directory = tmp_path / "bundle"
    (directory / "lib").mkdir(parents=True)
    with ParamsWriter(directory, max_shard_bytes=1024) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        files = writer.finish()
    for path, content in (("lib/model.so", b"\x7fELF" + bytes(500)), ("tokenizer.json", b"{}\n")):
        (directory / path).write_bytes(content)
        files[path] = FileInfo(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    params = tuple(
        ParamInfo(name=name, shape=array.shape, dtype=array.dtype.name, sources=(f"model.{name}",))
        for name, array in arrays.items()
    )
    write_manifest(directory, small_manifest(params, files))
    return directory
