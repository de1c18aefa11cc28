"""`mlcpipe.json`: the one schema that crosses convert, compile, runtime and apps."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mlcpipe.bundle.tensor_cache import invalid_json, read_small_file
from mlcpipe.errors import BundleError

MANIFEST = "mlcpipe.json"
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 64 << 20

ENTRY_POINTS: tuple[str, ...] = (
    "embed(ids: i32[n], params) -> [n, d]",
    "prefill(embed: [1, n, d], kv, params) -> (f32[1, 1, V], kv)",
    "decode(embed: [1, 1, d], kv, params) -> (f32[1, 1, V], kv)",
    "batch_prefill(embeds: [1, n, d], logit_positions: i32[b], kv, params) -> (f32[1, b, V], kv)",
    "batch_decode(embeds: [b, 1, d], kv, params) -> (f32[b, 1, V], kv)",
    "batch_verify(embeds: [1, n, d], kv, params) -> (f32[1, n, V], kv)",
    "sample(logits: f32[b, 1, V], temperature: f32[b], top_p: f32[b], top_k: i32[b], min_p: f32[b], draw: f32[b])"
    " -> i32[b]",
    "create_tir_paged_kv_cache(max_sequences: [1], total: [1], chunk: [1], page: [1], sliding: [1])",
    "softmax_with_temperature(logits: f32[b, 1, V], temperature: f32[b]) -> f32[b, 1, V]",
    "argsort_probs(probs: f32[b, V]) -> (f32[b, V], i32[b, V])",
    "sample_with_top_p(sorted: f32[b, V], ids: i32[b, V], draw: f32[n], row: i32[n], p: f32[b]) -> i32[n]",
    "apply_logit_bias_inplace(logits: f32[b, V], row: i32[n], token: i32[n], bias: f32[n])",
    "apply_penalty_inplace(logits: f32[b, V], seq: i32[n], row, token, count: i32[k], penalties: f32[n, 3])",
    "apply_bitmask_inplace(logits: f32[b, V], seq: i32[n], mask: i32[b, ceil(V/32)])",
    "_metadata() -> str",
)
"""Signatures of the library functions a host calls: part of the ABI hash. MLC's published contract."""


def _relative(path: str) -> str:
    # Refused on every system alike, so that a bundle made on one cannot mean another file on the next:
    # absolute paths, drive letters, streams (":"), backslashes, control characters, empty and dot segments.
    parts = path.split("/")
    if len(path) > 500 or re.search(r"[\\:\x00-\x1f\x7f]", path) or any(p in ("", ".", "..") for p in parts):
        raise ValueError("a relative path with forward slashes and no '..'")
    return path


def _iso(moment: str) -> str:
    if datetime.fromisoformat(moment).tzinfo is None:
        raise ValueError("a time with its UTC offset")
    return moment


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _power_of_two(number: int) -> int:
    if number & (number - 1):
        raise ValueError("a power of two")
    return number


RelativePath = Annotated[str, AfterValidator(_relative)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
# The sizes that WGSL knows: https://www.w3.org/TR/WGSL/#subgroup-size
SubgroupSize = Annotated[int, Field(ge=4, le=128), AfterValidator(_power_of_two)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
# Strict mode takes no list for a tuple; a caller may give either.
Names = Annotated[tuple[Name, ...], BeforeValidator(_as_tuple)]
Shape = Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class FileInfo(_Frozen):
    """One file of the bundle."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: Count


class MemoryPlan(_Frozen):
    """Bytes the model takes; workspace by library function.

    `decode_weights_bytes` are those of the weights that a decode step reads: of experts the chosen ones, of an
    embedding that is not also the output one row. None (a bundle that does not say) stands for all.
    """

    weights_bytes: Count
    decode_weights_bytes: Count | None = None
    kv_bytes_per_token: Count
    workspace_bytes: dict[Name, Count]

    @property
    def weights_read(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self.weights_bytes if self.decode_weights_bytes is None else self.decode_weights_bytes


class LibraryInfo(_Frozen):
    """A library with one variant, in a bundle that has several libraries for the same weights."""

    path: RelativePath = Field(description="file of the bundle")
    dtype: Name = Field(description="dtype of activations")
    kv_dtype: Name
    memory_plan: MemoryPlan


class VariantInfo(_Frozen):
    """One level of instructions or features that there is code for; a target's are ordered, best first.

    `library` is None where one library has all variants; the manifest's model and memory plan are those of it then, of
    the last variant otherwise.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
    features: Names = Field(
        description="what the CPU must have beyond its architecture's base, by Linux's names; or a GPU, by WebGPU's"
    )
    subgroup_size: SubgroupSize | None = Field(
        default=None, description="lanes that every subgroup of a GPU must have: WebGPU's least and largest size"
    )
    tvm_target: str = Field(description="TVM target as JSON")
    bytes: Count = Field(description="size of its object code")
    library: LibraryInfo | None = None


class TargetInfo(_Frozen):
    """What the library was compiled for."""

    name: Name
    triple: Name = Field(description="operating system and architecture, as LLVM writes it")
    variants: Annotated[tuple[VariantInfo, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class ModelInfo(_Frozen):
    """The model's shape; lengths in tokens."""

    model_type: Name
    vocab_size: Positive
    hidden_size: Positive
    num_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    context_length: Positive
    sliding_window: Positive | None
    dtype: Name = Field(description="dtype of activations")
    kv_dtype: Name
    prefill_chunk: Positive
    recompute_above: Positive | None = Field(
        default=None, description="length above which RoPE frequencies change (longrope): cached keys are useless then"
    )


class ParamInfo(_Frozen):
    """One parameter of the library, in call order, and the checkpoint tensors it was made from."""

    name: Name
    shape: Shape
    dtype: Name
    sources: Names


# Measured on Linux x86-64, 2026-11: what Python and the VM take while they run, with room to spare; and what one token
# of a tokenizer of 128,000 takes.
_RUN_BYTES = 16 << 20
_TOKENIZER_BYTES = 384


class KernelInfo(_Frozen):
    """Which rule scheduled a PrimFunc in some variants, why, and the tuning records that it used."""

    variants: Names
    name: Name
    op: str
    rule: Name
    reason: str
    records: Names = ()


class LinkerInfo(_Frozen):
    """The linker that made the library."""

    name: Name
    version: str


class Manifest(_Frozen):
    """Everything a host must know before it loads the library. Written in this order."""

    format_version: int
    mlcpipe_version: Name
    abi: Name
    target: TargetInfo
    model: ModelInfo
    quantization: Name
    weight_layout: Name
    entry_points: Names
    params: Annotated[tuple[ParamInfo, ...], BeforeValidator(_as_tuple)]
    memory_plan: MemoryPlan
    kernels: Annotated[tuple[KernelInfo, ...], BeforeValidator(_as_tuple)]
    linker: LinkerInfo
    checkpoint_hash: Name
    created: Annotated[str, AfterValidator(_iso)]
    files: dict[RelativePath, FileInfo] = Field(description="every file but this one, by path in the bundle")

    @property
    def running_bytes(self) -> int:
        """An upper bound of what a run needs besides weights, KV cache and a process that can open a bundle.

        Workspace of the largest function, and as much for scratch inside kernels (gate and up, where they meet there,
        are twice its largest tensor; int8 copies a quarter of one); a chunk's embeddings, and its queries, keys and
        values in TVM's KV cache, which has a head for each query's sums too; logits; the tokenizer. A llama of 1B,
        int4, took 68 % of it: 100 of 147 MiB, for a prefill of 2048 tokens on AVX-512 VNNI.
        """
        model = self.model
        workspace = max(self.memory_plan.workspace_bytes.values(), default=0)
        heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads + 16
        chunk = 4 * model.prefill_chunk * (model.hidden_size + heads * model.head_dim)
        vocabulary = model.vocab_size * (2 * 4 + _TOKENIZER_BYTES)
        return 2 * workspace + chunk + vocabulary + _RUN_BYTES


def abi_hash(entry_points: Sequence[str] = ENTRY_POINTS) -> str:
    """SHA-256 over everything that a host and a library must agree on: this format, TVM, and the signatures.

    Raises:
        BundleError: TVM is not installed.
    """
    parts = [f"manifest {FORMAT_VERSION}"]
    for package in ("apache-tvm", "apache-tvm-ffi"):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            raise BundleError(f"{package} is not installed", next_step=f"pip install {package}") from None
    return hashlib.sha256("\n".join([*parts, *entry_points]).encode()).hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `mlcpipe.json`: fields in the order of the class, two spaces of indent, UTF-8."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8", newline="\n")


def read_manifest(directory: Path, *, check_abi: bool = True) -> Manifest:
    """Read and validate `mlcpipe.json`, trusting nothing in it.

    Args:
        directory: the bundle.
        check_abi: refuse a bundle whose library cannot run with the installed TVM; off for who only looks.

    Raises:
        BundleError: missing, too large, not JSON, not of this schema, of another version or ABI.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise BundleError(
            f"no bundle at {directory}",
            expected="a directory",
            next_step=f"make one with: {_command(directory, {})}",
        )
    raw = read_small_file(path, MAX_MANIFEST_BYTES)
    version, summary = _peek(directory, raw)
    if version != FORMAT_VERSION:
        raise BundleError(
            "the bundle has another format_version",
            where=path,
            expected=FORMAT_VERSION,
            found=repr(version)[:80],
            next_step=f"recompile with: {_command(directory, summary)}",
        )
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_json(path, error) from None
    if check_abi and manifest.abi != abi_hash():
        raise BundleError(
            "the bundle was compiled for another version of mlcpipe or TVM",
            where=path,
            expected=f"ABI {abi_hash()[:12]}",
            found=f"{manifest.abi[:12]} of mlcpipe {manifest.mlcpipe_version}",
            next_step=f"recompile with: {_command(directory, summary)}",
        )
    return manifest


def _peek(directory: Path, raw: bytes) -> tuple[object, dict[str, str]]:
    """Read the version, and the names for a recompile command, of a manifest of any version."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{MANIFEST} is not JSON",
            where=directory,
            found=str(error)[:80],
            next_step=f"recompile with: {_command(directory, {})}",
        ) from None
    if not isinstance(data, dict):
        raise BundleError(f"{MANIFEST} is not a JSON object", where=directory, found=type(data).__name__)
    target = data.get("target")
    summary = {
        "target": target.get("name") if isinstance(target, dict) else None,
        "quantization": data.get("quantization"),
    }
    # Only plain words of a hostile file reach a command line that a user may paste.
    word = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")
    plain = {key: value for key, value in summary.items() if isinstance(value, str) and word.fullmatch(value)}
    return data.get("format_version"), plain


def _command(directory: Path, summary: dict[str, str]) -> str:
    options = "".join(f" --{key} {value}" for key, value in summary.items())
    return f"mlcpipe compile CHECKPOINT{options} --output {directory}"
