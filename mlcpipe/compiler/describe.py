"""What a bundle says about itself: the manifest, MLC's chat config and the library's own metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from mlcpipe import env as environment
from mlcpipe.bundle import (
    ENTRY_POINTS,
    MLC_CONFIG,
    FileInfo,
    KernelInfo,
    LibraryInfo,
    LinkerInfo,
    Manifest,
    MemoryPlan,
    ModelInfo,
    TargetInfo,
    VariantInfo,
    abi_hash,
    derive_conv_template,
    mlc_chat_config,
)
from mlcpipe.bundle.manifest import FORMAT_VERSION
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.build import BuiltVariant
from mlcpipe.compiler.convert import param_infos
from mlcpipe.compiler.library import LibraryWriter
from mlcpipe.errors import TemplateError
from mlcpipe.nn.causal_lm import ModelFacts
from mlcpipe.passes.lowering import KernelReport, Lowering
from mlcpipe.passes.plan_memory import workspace_bytes
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.runtime.tokenizer import Tokenizer
from mlcpipe.targets import Variant, triple, tvm_target
from mlcpipe.version import __version__

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Job:
    """Everything about the compile of one library that does not change while it runs."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    scheme: Scheme
    facts: ModelFacts
    state: Lowering
    variants: tuple[Variant, ...]
    context: int
    chunk: int
    kv_dtype: str
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Library:
    """A library that was written to `path` in the bundle."""

    job: Job
    path: str
    built: tuple[BuiltVariant, ...]


def mlc_config(job: Job, tokenizer: Tokenizer, names: Sequence[str]) -> dict[str, Any]:
    """`mlc-chat-config.json` of a checkpoint with a tokenizer.json; `names` are the files copied from it."""
    source = job.checkpoint
    parsed = json.loads((source.path / TOKENIZER).read_text(encoding="utf-8"))
    conv_template = None
    if tokenizer.chat_templates:
        try:
            template = tokenizer.chat_template()
            conv_template = derive_conv_template(
                lambda messages, generation: template.render(messages, add_generation_prompt=generation),
                name=job.facts.model_type,
                bos_token=tokenizer.special_tokens.get("bos_token"),
                special_tokens={t["content"]: t["id"] for t in parsed.get("added_tokens", [])},
                stop_token_ids=sorted(tokenizer.eos_token_ids),
            )
        except TemplateError:
            conv_template = None  # our engine renders the Jinja template; MLC's hosts get plain completion
    # The compiled cache keeps all pages and masks by position, so MLC's sliding window stays off.
    return mlc_chat_config(
        model=model_info(job).model_copy(update={"sliding_window": None}),
        quantization=job.scheme.name,
        model_config=source.config,
        tokenizer_files=[name for name in names if name not in (*CONFIG_FILES, MLC_CONFIG)],
        tokenizer_json=parsed,
        conv_template=conv_template,
        generation_config=source.generation_config,
    )


def model_info(job: Job) -> ModelInfo:
    """The model's shape, as the library serves it."""
    f = job.facts
    longrope = next((rope.switch_length for rope in f.ropes if rope.long_inv_freq), None)
    return ModelInfo(
        model_type=f.model_type,
        vocab_size=f.vocab_size,
        hidden_size=f.hidden_size,
        num_layers=f.num_layers,
        num_attention_heads=f.num_heads,
        num_key_value_heads=f.num_kv_heads,
        head_dim=f.head_dim,
        context_length=job.context,
        sliding_window=f.window,
        dtype=job.state.target.activation_dtype,
        kv_dtype=job.kv_dtype,
        prefill_chunk=job.chunk,
        recompute_above=longrope,
    )


def _memory_plan(job: Job) -> MemoryPlan:
    weights = job.state.weights
    return MemoryPlan(
        weights_bytes=sum(w.nbytes for w in weights),
        decode_weights_bytes=sum(w.decode_nbytes for w in weights),
        kv_bytes_per_token=job.kv_bytes_per_token,
        workspace_bytes=workspace_bytes(job.state.mod),
    )


def _variants(libraries: Sequence[Library]) -> tuple[VariantInfo, ...]:
    """The variants of one library, or of several each the one that it has."""
    found = []
    for library in libraries:
        job, info = library.job, None
        if len(libraries) > 1:
            dtype = job.state.target.activation_dtype
            info = LibraryInfo(path=library.path, dtype=dtype, kv_dtype=job.kv_dtype, memory_plan=_memory_plan(job))
        for one in library.built:
            target = str(tvm_target(job.state.target, one.variant))
            found.append(
                VariantInfo(
                    name=one.variant.name,
                    features=one.variant.features,
                    subgroup_size=_subgroup_size(one.variant),
                    tvm_target=target,
                    bytes=one.nbytes,
                    library=info,
                )
            )
    return tuple(found)


def _subgroup_size(variant: Variant) -> int | None:
    """Lanes that a host must see to, where shaders cannot ask for them: WebGPU's feature `subgroups`."""
    return int(variant.schedule["subgroup"]) if "subgroups" in variant.features else None


def _kernels(libraries: Sequence[Library]) -> tuple[KernelInfo, ...]:
    """What the rules said, once for all variants that they said it of."""
    by_report: dict[KernelReport, list[str]] = {}
    for one in (one for library in libraries for one in library.built):
        for report in one.kernels:
            by_report.setdefault(report, []).append(one.variant.name)
    return tuple(
        KernelInfo(variants=tuple(names), name=k.name, op=k.op, rule=k.rule, reason=k.reason, records=k.records)
        for k, names in sorted(by_report.items(), key=lambda item: item[0].name)
    )


def manifest(libraries: Sequence[Library], files: Mapping[str, FileInfo], writer: LibraryWriter) -> Manifest:
    """The manifest of a bundle: libraries best first, the last one runs on every device of the target."""
    job = libraries[-1].job
    state = job.state
    return Manifest(
        format_version=FORMAT_VERSION,
        mlcpipe_version=__version__,
        abi=abi_hash(),
        target=TargetInfo(name=state.target.name, triple=triple(state.target), variants=_variants(libraries)),
        model=model_info(job),
        quantization=job.scheme.name,
        weight_layout=state.layout.name,
        entry_points=ENTRY_POINTS,
        params=tuple(param_infos(state.weights)),
        memory_plan=_memory_plan(job),
        kernels=_kernels(libraries),
        linker=LinkerInfo(name=writer.name, version=writer.version),
        checkpoint_hash=job.checkpoint.content_hash(environment.env().cache_dir / "hashes"),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        files=dict(files),
    )
