"""Describes a bundle: the manifest, MLC's chat config and the library's own metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from mlcpipe.bundle import (
    ENTRY_POINTS,
    AdaptedInfo,
    FileInfo,
    KernelInfo,
    LibraryInfo,
    LinkerInfo,
    Manifest,
    MemoryPlan,
    ModelInfo,
    ScratchInfo,
    TargetInfo,
    VariantInfo,
    abi_hash,
    derive_conv_template,
    mlc_chat_config,
)
from mlcpipe.bundle.conv_template import Message, Render
from mlcpipe.bundle.manifest import FORMAT_VERSION
from mlcpipe.bundle.memory import for_pictures
from mlcpipe.bundle.row_runs import runs_of
from mlcpipe.compiler.backends.base import LibraryWriter
from mlcpipe.compiler.build import BuiltVariant
from mlcpipe.compiler.export import MAX_BATCH
from mlcpipe.compiler.job import Job
from mlcpipe.errors import TemplateError
from mlcpipe.passes.lowering import KernelReport, workspace_bytes
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.stated_sampling import FIELDS, stated_sampling
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.text.tokenizer_files import TOKENIZER
from mlcpipe.support import env as environment
from mlcpipe.targets import Variant, triple, tvm_target
from mlcpipe.version import __version__
from mlcpipe.weights.convert import param_infos

PROBE_S = 2.0  # of processor time, for the renderings that find the MLC conversation template
CONFIG_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class BuiltLibrary:
    """A library that was written to `path` in the bundle."""

    job: Job
    path: str
    built: tuple[BuiltVariant, ...]


def mlc_config(job: Job, tokenizer: Tokenizer, texts: Mapping[str, str]) -> dict[str, Any]:
    """The content of `mlc-chat-config.json`; `texts` are the tokenizer's files by name."""
    source = job.checkpoint
    drawn = stated_sampling(source.generation_config, SamplingParams(temperature=1.0, top_p=1.0))
    parsed = json.loads(texts[TOKENIZER])
    conv_template = None
    if tokenizer.chat_templates:
        try:
            template = tokenizer.chat_template()
            conv_template = derive_conv_template(
                _within(
                    PROBE_S, lambda messages, generation: template.render(messages, add_generation_prompt=generation)
                ),
                name=job.facts.model_type,
                bos_token=tokenizer.special_tokens.get("bos_token"),
                special_tokens={t["content"]: t["id"] for t in parsed.get("added_tokens", [])},
                stop_token_ids=sorted(tokenizer.eos_token_ids),
            )
        except TemplateError:
            conv_template = None  # our engine renders the Jinja template; MLC's hosts get plain completion
    return mlc_chat_config(
        model=model_info(job),
        quantization=job.plan.name,
        model_config=source.config,
        tokenizer_files=list(texts),
        tokenizer_json=parsed,
        conv_template=conv_template,
        generation_config={**source.generation_config, **{name: getattr(drawn, name) for name in FIELDS}},
    )


def _within(seconds: float, render: Render) -> Render:
    """`render` until it has taken `seconds` of processor time in all; each rendering also has its own limit."""
    left = seconds

    def limited(messages: list[Message], generation: bool) -> str:
        nonlocal left
        if left <= 0:
            raise TemplateError("the chat template is slow", expected=f"at most {seconds:g} s for all its renderings")
        began = time.thread_time()
        try:
            return render(messages, generation)
        finally:
            left -= time.thread_time() - began

    return limited


def model_info(job: Job) -> ModelInfo:
    """The shape of the model that a library serves."""
    f = job.facts
    dynamic = next((rope.switch_length for rope in f.ropes if rope.dynamic_factor), None)
    longrope = next((rope.switch_length for rope in f.ropes if rope.long_inv_freq), None)
    return ModelInfo(
        model_type=f.model_type,
        vocab_size=f.vocab_size,
        hidden_size=f.hidden_size,
        num_layers=f.num_layers,
        context_length=job.context,
        dtype=job.target.activation_dtype,
        kv_dtype=job.kv_dtype,
        prefill_chunk=job.chunk,
        max_batch=MAX_BATCH,
        kv_cache=job.target.kv_cache,
        recompute_above=longrope,
        rope_above=dynamic,
        adapted=tuple(
            AdaptedInfo(
                name=one.name,
                inputs=one.shape.k,
                columns=one.shape.parts,
                sources=one.sources,
                dtype=one.shape.dtype,
                rows=runs_of(np.frombuffer(one.order, np.int32)),
            )
            for one in job.state.adapted
        ),
        draft_heads=getattr(job.checkpoint.draft_head, "heads", 0),
        eagle=job.eagle,
        assistant=job.assistant,
        embedding=job.embedding,
        vision=job.vision,
        diffusion=f.diffusion,
        speech=job.speech,
        gathered=tuple(name for weight in job.state.weights for name in weight.gathered_arrays()),
        stage=job.stage,
    )


def library_metadata(job: Job) -> dict[str, Any]:
    """The value of a library's `_metadata()`: MLC's fields, and those that the runtime compares with the manifest."""
    return {
        "model_type": job.facts.model_type,
        "quantization": job.plan.name,
        "context_window_size": job.context,
        "sliding_window_size": -1,
        "attention_sink_size": -1,
        "prefill_chunk_size": job.chunk,
        "tensor_parallel_shards": 1,
        "kv_state_kind": "kv_cache",
        "params": [
            {"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "preprocs": []}
            for p in param_infos(job.state.weights)
        ],
        "memory_usage": workspace_bytes(job.state.mod),
        "model": model_info(job).model_dump(mode="json"),
        "variants": [{"name": v.name, "features": list(v.features)} for v in job.variants],
        "memory_plan": _memory_plan(job).model_dump(mode="json"),
        "states": [state.model_dump(mode="json") for state in job.states],
    }


def _memory_plan(job: Job) -> MemoryPlan:
    host = sum(weight.nbytes for weight in job.state.weights if weight.gathered)
    return MemoryPlan(
        weights_bytes=job.weights_bytes - host,
        decode_weights_bytes=sum(w.decode_nbytes for w in job.state.weights),
        workspace_bytes=for_pictures(workspace_bytes(job.state.mod), job.vision),
        attention_bytes=job.attention_bytes,
        host_bytes=host,
    )


def _variants(libraries: Sequence[BuiltLibrary]) -> tuple[VariantInfo, ...]:
    """All variants of all libraries; each names its library where there are several."""
    several = len(libraries) > 1
    return tuple(
        VariantInfo(
            name=built.variant.name,
            features=built.variant.features,
            subgroup_size=_subgroup_size(built.variant),
            tvm_target=str(tvm_target(library.job.target, built.variant)),
            bytes=built.nbytes,
            scratch=_scratch(built),
            library=_library_info(library) if several else None,
        )
        for library in libraries
        for built in library.built
    )


def _scratch(built: BuiltVariant) -> ScratchInfo | None:
    blocks = built.scratch
    return None if blocks is None else ScratchInfo(caller=sum(blocks.caller), helper=sum(blocks.helper))


def _library_info(library: BuiltLibrary) -> LibraryInfo:
    job = library.job
    dtype = job.target.activation_dtype
    return LibraryInfo(
        path=library.path, dtype=dtype, kv_dtype=job.kv_dtype, memory_plan=_memory_plan(job), states=job.states
    )


def _subgroup_size(variant: Variant) -> int | None:
    """The subgroup size that a host must check, because WGSL cannot request one; None without the feature."""
    return int(variant.schedule["subgroup"]) if "subgroups" in variant.features else None


def _kernels(libraries: Sequence[BuiltLibrary]) -> tuple[KernelInfo, ...]:
    """The schedule rule of each kernel; variants with equal reports share one entry."""
    by_report: dict[KernelReport, list[str]] = {}
    for built in (built for library in libraries for built in library.built):
        for report in built.kernels:
            by_report.setdefault(report, []).append(built.variant.name)
    return tuple(
        KernelInfo(variants=tuple(names), name=k.name, op=k.op, rule=k.rule, reason=k.reason, records=k.records)
        for k, names in sorted(by_report.items(), key=lambda item: item[0].name)
    )


def _host_of(job: Job) -> str:
    """Which of ENTRY_POINTS the library has."""
    if job.embedding:
        return "texts"
    if job.stage is not None:
        return "experts" if job.stage.alone else "stage"
    if job.speech:
        return "speech"
    if job.facts.diffusion is not None:
        return job.facts.diffusion.denoises
    return job.target.kv_cache


def manifest(
    libraries: Sequence[BuiltLibrary], files: Mapping[str, FileInfo], writer: LibraryWriter, fitted_to: Sequence[str]
) -> Manifest:
    """The manifest of a bundle; `libraries` are best first, and the last runs on every device of the target."""
    job = libraries[-1].job
    state = job.state
    return Manifest(
        format_version=FORMAT_VERSION,
        mlcpipe_version=__version__,
        abi=abi_hash(),
        target=TargetInfo(name=job.target.name, triple=triple(job.target), variants=_variants(libraries)),
        model=model_info(job),
        quantization=job.plan.name,
        weight_layout=state.layout.name,
        entry_points=ENTRY_POINTS[_host_of(job)],
        params=tuple(param_infos(state.weights)),
        memory_plan=_memory_plan(job),
        states=job.states,
        kernels=_kernels(libraries),
        linker=LinkerInfo(name=writer.name, version=writer.version),
        name=job.checkpoint.name,
        checkpoint_hash=job.checkpoint.content_hash(environment.env().cached("hashes")),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        fitted_to=tuple(fitted_to),
        files=dict(files),
    )
