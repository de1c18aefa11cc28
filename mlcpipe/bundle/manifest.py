"""`mlcpipe.json`: the schema that convert, compile, runtime and apps share."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from mlcpipe.bundle.model_info import ModelInfo
from mlcpipe.bundle.quality import QualityInfo
from mlcpipe.bundle.schema import Count, Frozen, Name, Names, Positive
from mlcpipe.bundle.states import States, check_states, kv_bytes_per_token
from mlcpipe.bundle.tensor_cache import RECOMPILE
from mlcpipe.errors import BundleError
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.generated import shell_word
from mlcpipe.support.json_files import Items, Table, read_json_object, validated
from tir_schedules.sampling import DRAWS, SIGNATURES, sampling_names

MANIFEST = "mlcpipe.json"
_WEIGHTS_OF_CHECKPOINTS = ("model.safetensors", "model.safetensors.index.json")
FORMAT_VERSION = 4
MAX_STAGES = 64
MAX_MANIFEST_BYTES = 8 << 20
MAX_MANIFEST_VALUES = 200_000  # a model of 405 billion parameters has 2,000 parameters and 6,400 shards: 60,000


def _common(own_pages: bool, draw: str = "sample") -> tuple[str, ...]:
    return (*(str(SIGNATURES[name]) for name in sampling_names(own_pages, draw)), "_metadata() -> str")


_PREFILL = "prefill(tokens: i32[n], rows: i32[r], step: i32[k], logits: f32[r, V], states, params) -> logits"
_COPY_PAGES = "copy_pages(pairs: [i32[c, 2] of each group], states) -> states"


ENTRY_POINTS: dict[str, tuple[str, ...]] = {
    "pages": (
        "decode(tokens: i32[b], step: i32[k], logits: f32[b, V], states, params) -> logits",
        _PREFILL,
        _COPY_PAGES,
        *_common(own_pages=True),
    ),
    "blocks": (_PREFILL, _COPY_PAGES, *_common(own_pages=True, draw=DRAWS["blocks"])),
    "answers": (_PREFILL, _COPY_PAGES, *_common(own_pages=True, draw=DRAWS["answers"])),
    "stage": (
        "decode(rows: i32[b] or f32[b, d], step: i32[k], handed: f32[b, d], states, params) -> handed",
        "prefill(rows: i32[n] or f32[n, d], step: i32[k], handed: f32[n, d], states, params) -> handed",
        "decode(rows: f32[b, d], step: i32[k], logits: f32[b, V], states, params) -> logits",
        "prefill(rows: f32[n, d], wanted: i32[r], step: i32[k], logits: f32[r, V], states, params) -> logits",
        "copy_pages(pairs: [i32[c, 2] of each group], states) -> states",
        *_common(own_pages=True),
    ),
    "experts": (
        "experts_decode_{layer}(rows: f32[r, d], weights: f32[r, e], ids: i32[r, e], handed: f32[r, d], params)"
        " -> handed",
        "experts_prefill_{layer}(rows: f32[n, d], weights: f32[n, e], ids: i32[n, e], handed: f32[n, d], params)"
        " -> handed",
        "_metadata() -> str",
    ),
    "texts": (
        "embed_texts(tokens: i32[n], types: i32[n], rows: i32[r], step: i32[k], embeddings: f32[r, d], states, params)"
        " -> embeddings",
        "_metadata() -> str",
    ),
    "speech": (
        "encode_sound(features: f32[t, 2 m], step: i32[k], heard: f32[t, d], states, params) -> heard",
        "keep_sound(heard: f32[t, d], step: i32[k], sound: states, params) -> sound",
        "decode(tokens: i32[b], step: i32[k], heard: i32[l], logits: f32[b, V], states, sound, params) -> logits",
        "prefill(tokens: i32[n], rows: i32[r], step: i32[k], heard: i32[l], logits: f32[r, V], states, sound, params)"
        " -> logits",
        "_metadata() -> str",
    ),
    "tvm": (
        "embed(ids: i32[n], params) -> [n, d]",
        "prefill(embed: [1, n, d], kv, params) -> (f32[1, 1, V], kv)",
        "decode(embed: [1, 1, d], kv, params) -> (f32[1, 1, V], kv)",
        "batch_prefill(embeds: [1, n, d], logit_positions: i32[b], kv, params) -> (f32[1, b, V], kv)",
        "batch_decode(embeds: [b, 1, d], kv, params) -> (f32[b, 1, V], kv)",
        "batch_verify(embeds: [1, n, d], kv, params) -> (f32[1, n, V], kv)",
        "create_tir_paged_kv_cache(max_sequences: [1], total: [1], chunk: [1], page: [1], sliding: [1])",
        *_common(own_pages=False),
    ),
}
"""Signatures of the library functions that a host calls, by who owns the KV cache; part of the ABI hash.

`pages`: the runtime, as `tir_schedules/step_layout.py` says; `blocks` and
`answers`, of models that denoise them; `texts`, of models
that embed them; `stage`, of a run of a model's layers: the first takes tokens, the last, which alone samples, gives
logits, and with `calls` each gets what calls experts, before `params`; `experts`, of a part that has experts alone;
`speech`, of models that write what they hear. `tvm`: TVM's object, as MLC's published contract says.
"""


def relative_path(path: str) -> str:
    """The path of a file in a folder. Raises ValueError for one that may lead elsewhere."""
    # Refused on every system, so that a path means the same file everywhere: absolute paths, drive letters,
    # streams (":"), backslashes, control characters, empty and dot segments.
    parts = path.split("/")
    if len(path) > 500 or re.search(r"[\\:\x00-\x1f\x7f]", path) or any(p in ("", ".", "..") for p in parts):
        raise ValueError("a relative path with forward slashes and no '..'")
    return path


def _iso(moment: str) -> str:
    if datetime.fromisoformat(moment).tzinfo is None:
        raise ValueError("a time with its UTC offset")
    return moment


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("printable characters")
    return text


def _power_of_two(number: int) -> int:
    if number & (number - 1):
        raise ValueError("a power of two")
    return number


def _tvm_target(text: str) -> str:
    try:
        kind = json.loads(text)["kind"]
    except (ValueError, RecursionError, TypeError, KeyError):
        kind = None
    if not isinstance(kind, str) or not re.fullmatch("[a-z]{1,20}", kind):
        raise ValueError("an object of JSON whose kind is one of TVM's, such as llvm")
    return text


RelativePath = Annotated[str, AfterValidator(relative_path)]
# The sizes that WGSL allows: https://www.w3.org/TR/WGSL/#subgroup-size
SubgroupSize = Annotated[int, Field(ge=4, le=128), AfterValidator(_power_of_two)]
Shape = Items[Positive]


class FileInfo(Frozen):
    """One file of the bundle."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: Count


class MemoryPlan(Frozen):
    """Memory use of the model in bytes; workspace by library function.

    `weights_bytes` are those of the device; without the `host_bytes` of tables whose rows hosts gather for each step.
    `decode_weights_bytes` counts the weights that a decode step reads: only the chosen experts, and one row of
    an embedding that is not tied to the output. None (unknown) means all weights. `attention_bytes` bounds the memory
    of attention and delta nets for a prompt's chunk if the scratch of kernels is not known.
    """

    weights_bytes: Count
    decode_weights_bytes: Count | None = None
    workspace_bytes: Table[Name, Count]
    attention_bytes: Count = 0
    host_bytes: Count = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights."""
        return self.weights_bytes + self.host_bytes

    @property
    def weights_read(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self.weights_bytes if self.decode_weights_bytes is None else self.decode_weights_bytes


class LibraryInfo(Frozen):
    """A library with one variant, in a bundle with several libraries for the same weights."""

    path: RelativePath = Field(description="file of the bundle")
    dtype: Name = Field(description="dtype of activations")
    kv_dtype: Name
    memory_plan: MemoryPlan
    states: States


class ScratchInfo(Frozen):
    """Bytes that kernels take during a call, for a whole chunk of a prompt, and that their threads keep."""

    caller: Count = Field(description="of the thread that runs the model")
    helper: Count = Field(description="of each other thread")


class VariantInfo(Frozen):
    """One level of instructions or features that the library has code for, ordered best first.

    `library` is None if one library has all variants. The manifest's model and memory plan describe that library, or
    else the last variant.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")]
    features: Names = Field(
        description="required features: of a CPU beyond its architecture's base (Linux's names) or a GPU (WebGPU's)"
    )
    subgroup_size: SubgroupSize | None = Field(
        default=None, description="lanes in every subgroup: WebGPU's smallest and largest size must both equal it"
    )
    tvm_target: Annotated[str, AfterValidator(_tvm_target)] = Field(max_length=10_000, description="TVM target as JSON")
    bytes: Count = Field(description="size of its object code")
    scratch: ScratchInfo | None = Field(default=None, description="of a CPU's kernels")
    library: LibraryInfo | None = None

    @property
    def tvm_facts(self) -> dict[str, Any]:
        """The fields of the TVM target, `kind` among them."""
        facts: dict[str, Any] = json.loads(self.tvm_target)
        return facts


class TargetInfo(Frozen):
    """What the library was compiled for."""

    name: Name
    triple: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")] = Field(
        description="operating system and architecture, as LLVM writes it"
    )
    variants: Annotated[Items[VariantInfo], Field(min_length=1)]


class ParamInfo(Frozen):
    """One parameter of the library, in call order, and its source tensors in the checkpoint.

    `scheme` is how its weight is stored if every weight has its own: a block format of GGUF, q0f16 or q0f32.
    """

    name: Name
    shape: Shape
    dtype: Name
    sources: Names
    scheme: Name | None = None


class KernelInfo(Frozen):
    """Which rule scheduled a PrimFunc in some variants, why, and the tuning records that it used."""

    variants: Names
    name: Name
    op: str
    rule: Name
    reason: str
    records: Names = ()


class LinkerInfo(Frozen):
    """The linker that made the library."""

    name: Name
    version: str


class Manifest(Frozen):
    """Everything a host needs to know before it loads the library. Fields are written in this order."""

    format_version: int
    mlcpipe_version: Name
    abi: Name
    target: TargetInfo
    model: ModelInfo
    quantization: Name
    weight_layout: Name
    entry_points: Names
    params: Items[ParamInfo]
    memory_plan: MemoryPlan
    states: Annotated[States, AfterValidator(check_states)] = Field(
        description="in the order of the library's argument"
    )
    kernels: Items[KernelInfo]
    linker: LinkerInfo
    name: Annotated[Name, AfterValidator(_printable)] | None = Field(
        default=None, description="the checkpoint's: org/name of the hub, or its folder's"
    )
    checkpoint_hash: Name
    created: Annotated[str, AfterValidator(_iso)]
    fitted_to: Items[Name] = Field(
        default=(), description="`text_hash` of the texts that weights or their bits were fitted to"
    )
    quality: QualityInfo | None = Field(default=None, description="what `mlcpipe quality` measured, if it was run")
    stages: Annotated[Items[RelativePath], Field(max_length=MAX_STAGES)] = Field(
        default=(),
        description="the folders of its stages in order, each a bundle; library, target and kernels are then theirs",
    )
    files: Table[RelativePath, FileInfo] = Field(description="every file but this one, by path in the bundle")

    @field_validator("params")
    @classmethod
    def _has_gathered(cls, params: tuple[ParamInfo, ...], info: ValidationInfo) -> tuple[ParamInfo, ...]:
        gathered = info.data["model"].gathered if "model" in info.data else ()
        if sorted(gathered) != sorted({p.name for p in params if len(p.shape) == 2}.intersection(gathered)):
            raise ValueError("those of model.gathered, which are matrices, each once")
        return params

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in the pages of all states."""
        return kv_bytes_per_token(self.states)


def abi_hash(entry_points: Mapping[str, Sequence[str]] = ENTRY_POINTS) -> str:
    """SHA-256 of everything that host and library must agree on: this format, TVM's version, and the signatures.

    Raises:
        BundleError: TVM is not installed.
    """
    parts = [f"manifest {FORMAT_VERSION}"]
    for package in ("apache-tvm", "apache-tvm-ffi"):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            raise BundleError(f"{package} is not installed", next_step=f"pip install {package}") from None
    signatures = [f"{owner} {signature}" for owner, several in entry_points.items() for signature in several]
    return hashlib.sha256("\n".join([*parts, *signatures]).encode()).hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `mlcpipe.json` in one step: fields in the order of the class, two spaces of indent, UTF-8."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False)
    atomic_write(directory / MANIFEST, f"{text}\n".encode())


def read_manifest(directory: Path, *, check_abi: bool = True) -> Manifest:
    """Read and validate `mlcpipe.json`, trusting nothing in it.

    Args:
        directory: the bundle.
        check_abi: refuse a bundle whose library cannot run with the installed TVM; disable for read-only inspection.

    Raises:
        BundleError: missing, too large, invalid JSON or schema, or another version or ABI.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise BundleError(
            f"no bundle at {directory}",
            expected="a directory",
            next_step=f"make one with: {_command(directory, {})}",
        )
    if not path.exists() and any((directory / name).exists() for name in _WEIGHTS_OF_CHECKPOINTS):
        raise BundleError(
            "the folder has a checkpoint, not a bundle", where=directory, expected=MANIFEST,
            next_step=f"compile it: mlcpipe compile {shell_word(directory)} -o BUNDLE",
        )  # fmt: skip
    content = read_json_object(
        path,
        limit=MAX_MANIFEST_BYTES,
        error=BundleError,
        next_step=f"recompile with: {_command(directory, {})}",
        max_values=MAX_MANIFEST_VALUES,
    )
    version, summary = content.get("format_version"), _summary(content)
    if version != FORMAT_VERSION:
        newer = type(version) is int and version > FORMAT_VERSION
        update = "a newer mlcpipe wrote it: pip install --upgrade mlcpipe, or " if newer else ""
        raise BundleError(
            "the bundle has an unsupported format_version",
            where=path,
            expected=FORMAT_VERSION,
            found=repr(version)[:80],
            next_step=f"{update}recompile with: {_command(directory, summary)}",
        )
    manifest = validated(Manifest, content, what=MANIFEST, where=directory, error=BundleError, next_step=RECOMPILE)
    if check_abi and manifest.abi != abi_hash():
        raise BundleError(
            "the bundle was compiled for another version of mlcpipe or TVM",
            where=path,
            expected=f"ABI {abi_hash()[:12]}",
            found=f"{manifest.abi[:12]} of mlcpipe {manifest.mlcpipe_version}",
            next_step=f"recompile with: {_command(directory, summary)}",
        )
    return manifest


def _summary(data: dict[str, Any]) -> dict[str, str]:
    """The names for a recompile command, from a manifest of any version."""
    target = data.get("target")
    summary = {
        "target": target.get("name") if isinstance(target, dict) else None,
        "quantization": data.get("quantization"),
    }
    # Only plain words from a hostile file reach a command line that a user may paste.
    word = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")
    return {key: value for key, value in summary.items() if isinstance(value, str) and word.fullmatch(value)}


def _command(directory: Path, summary: dict[str, str]) -> str:
    options = "".join(f" --{key} {value}" for key, value in summary.items())
    return f"mlcpipe compile CHECKPOINT{options} --output {shell_word(directory)}"
