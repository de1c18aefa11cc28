"""The reference of a measurement: its checkpoint, compiled for this machine without rounding and kept in the cache."""

from __future__ import annotations

import math
from pathlib import Path

from mlcpipe.bundle import read_manifest
from mlcpipe.checkpoint import Checkpoint, open_checkpoint, resolve
from mlcpipe.compiler.preflight import Purpose
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.host.memory import FreeMemory, free_memory
from mlcpipe.loading import bundle_of, prepare_bundle
from mlcpipe.support.defaults import LOCAL_TARGET
from mlcpipe.support.env import env
from mlcpipe.support.progress import Progress

SCHEMES = {"q0f32": 4, "q0f16": 2}  # bytes of a weight; without quantized weights activations are not rounded either


def prepare_reference(
    reference: str | Path, beside_bytes: int, progress: Progress, checkpoint_hash: str | None = None
) -> Path:
    """The bundle of a reference: a q0f32 or q0f16 bundle itself, or a checkpoint compiled once.

    A checkpoint becomes q0f32, or q0f16 if it does not fit into memory with `beside_bytes`. Raises ResourceError
    before the work if neither fits, UsageError for a rounded bundle and for a checkpoint of another hash than
    `checkpoint_hash`, and what `mlcpipe.load` raises.
    """
    given = bundle_of(reference)
    if given is not None:
        manifest = read_manifest(given)
        _check_hash(manifest.checkpoint_hash, checkpoint_hash, reference)
        if (quantization := manifest.quantization) not in SCHEMES:
            raise UsageError(
                "the reference is rounded itself", where=given, expected=" or ".join(SCHEMES), found=quantization,
                next_step="give the checkpoint",
            )  # fmt: skip
        return given
    purpose = Purpose(LOCAL_TARGET, "q0f16", "f32", disk=env().cached("bundles"), title=str(reference))
    checkpoint = open_checkpoint(resolve(reference, progress, check=purpose.check))
    if checkpoint_hash is not None:
        _check_hash(checkpoint.content_hash(env().cached("hashes")), checkpoint_hash, reference)
    scheme = choose_scheme(_numbers(checkpoint), beside_bytes, free_memory())
    if scheme != "q0f32":
        progress.note("memory has no room for the reference in float32: it is compiled in float16")
    return prepare_bundle(reference, "cpu", scheme, kv_cache_dtype="f32", progress=progress)


def choose_scheme(numbers: int, beside_bytes: int, free: FreeMemory) -> str:
    """The first of SCHEMES in which the weights and `beside_bytes` fit into memory. Raises ResourceError."""
    for scheme, size in SCHEMES.items():
        if numbers * size + beside_bytes <= free.nbytes:
            return scheme
    raise ResourceError(
        "not enough memory for the reference",
        expected=f"{byte_size(numbers * min(SCHEMES.values()) + beside_bytes)} free",
        found=free,
        next_step="measure on a larger machine",
    )


def _check_hash(found: str, expected: str | None, reference: str | Path) -> None:
    if expected not in (None, found):
        raise UsageError(
            "the bundle was compiled from another checkpoint", where=reference,
            expected=f"the content {str(expected)[:12]}", found=found[:12],
            next_step="give its own checkpoint; to compare two models add --other-reference",
        )  # fmt: skip


def _numbers(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
