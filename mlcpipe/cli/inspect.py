"""`mlcpipe inspect`: the content of a bundle, and the reasons for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.inspect_checkpoint import Asked, inspect_checkpoint
from mlcpipe.cli.options import (
    BitsOption,
    BitsTextOption,
    CompileTargetOption,
    ContextOption,
    DeviceMemoryOption,
    JsonOption,
    MethodOption,
    QuantizationOption,
    StagesOption,
    check_at_least_one,
)
from mlcpipe.cli.quality import quality_lines
from mlcpipe.cli.terminal import cell, new_table, print_json, print_rows, say, stdout_console
from mlcpipe.errors import UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.loading import is_bundle
from mlcpipe.support.defaults import DEFAULT_TARGET
from mlcpipe.support.files import local_path
from tir_schedules.step_layout import PAGE

if TYPE_CHECKING:
    from rich.console import Console

    from mlcpipe.bundle import EmbeddingInfo, Manifest, ModelInfo, SpeechInfo


def inspect_command(
    model: Annotated[
        str,
        typer.Argument(help="A compiled model's folder; or a checkpoint folder, GGUF file, hf:// or ollama:// name."),
    ],
    kernels: Annotated[bool, typer.Option("--kernels", help="Every kernel: its schedule rule and the reason.")] = False,
    params: Annotated[bool, typer.Option("--params", help="Every parameter and the tensors it comes from.")] = False,
    quantization: QuantizationOption = None,
    method: MethodOption = None,
    bits_per_weight: BitsOption = None,
    bits_text: BitsTextOption = None,
    target: CompileTargetOption = DEFAULT_TARGET,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Plan stages of a checkpoint for these devices, such as vulkan,cpu.",
        ),
    ] = None,
    stages: StagesOption = None,
    device_memory_bytes: DeviceMemoryOption = None,
    context: ContextOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the recipe for --quantization into this .toml file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a bundle: model, target, memory plan, kernels and where the weights come from.

    It only reads the manifest, so it also shows bundles of other versions and for other machines. Of a checkpoint it
    shows what a quantization would do: bytes, bits and relative error of each matrix. With --output it writes that as
    a recipe, a file in which you give single matrices other schemes.

    Examples:

    `mlcpipe inspect ./my-bundle`

    `mlcpipe inspect ./my-bundle --kernels`

    `mlcpipe inspect ./Qwen3-0.6B --bits-per-weight 4.8 -o recipe.toml`

    `mlcpipe inspect ./Qwen3-30B-A3B --devices vulkan,cpu`
    """
    check_at_least_one(context=context)
    if devices is None:
        alone = {"stages": stages, "device-memory-bytes": device_memory_bytes, "context": context}
        for name, value in alone.items():
            if value is not None:
                raise UsageError(f"--{name} has no effect", expected="--devices", found="none")
    else:
        from mlcpipe.cli.inspect_stages import print_plan

        others = (kernels, params, method, bits_per_weight, bits_text, output, target != DEFAULT_TARGET)
        print_plan(model, devices, stages, quantization, device_memory_bytes, context, others, as_json=as_json)
        return
    bundle = local_path(model)
    if bundle is None or not is_bundle(bundle):
        if kernels or params:
            raise UsageError(
                f"--{'kernels' if kernels else 'params'} is for bundles", found=model, next_step="compile it first"
            )
        asked = Asked(model, target, quantization, method, bits_per_weight, bits_text, output, as_json)
        inspect_checkpoint(asked)
        return
    if any((quantization, method, bits_per_weight, bits_text, output)):
        raise UsageError("the weights of a bundle are stored already", where=bundle, next_step="give the checkpoint")
    from mlcpipe.bundle import read_manifest

    manifest = read_manifest(bundle, check_abi=False)
    if as_json:
        print_json(manifest.model_dump(mode="json"))
        return
    console = stdout_console()
    from mlcpipe.bundle.stages import read_parts

    parts = read_parts(bundle, manifest, check_abi=False)
    for part in parts if kernels or params else ():
        if manifest.stages:
            say(console, part.folder.name)
        if kernels:
            _print_kernels(console, part.manifest)
        if params:
            _print_params(console, part.manifest)
    if not kernels and not params and manifest.stages:
        from mlcpipe.cli.inspect_stages import print_stages

        print_rows(console, _overview(bundle, manifest))
        print_stages(console, manifest, parts)
    elif not kernels and not params:
        _print_overview(console, bundle, manifest)


def _print_overview(console: Console, bundle: Path, manifest: Manifest) -> None:
    print_rows(console, _overview(bundle, manifest))
    _print_variants(console, manifest)
    _print_memory(console, manifest)
    counts = Counter(kernel.rule for kernel in manifest.kernels)
    rules = ", ".join(f"{rule} {count}" for rule, count in counts.most_common())
    names = len({kernel.name for kernel in manifest.kernels})
    say(console, f"\n{names} kernels by rule, variants apart: {rules or 'none'}  (--kernels shows each)")
    tuned = len({kernel.name for kernel in manifest.kernels if kernel.records})
    if tuned:
        say(console, f"{tuned} of them use tuning records")
    say(console, f"{len(manifest.params)} parameters  (--params shows each and its sources)")


def _overview(bundle: Path, manifest: Manifest) -> list[tuple[str, str]]:
    from mlcpipe.bundle import abi_hash
    from mlcpipe.bundle.origin import origin_of

    model, target = manifest.model, manifest.target
    usable = "fits this installation" if manifest.abi == abi_hash() else "made for other versions: compile it again"
    return [
        ("bundle", f"{bundle} ({byte_size(sum(info.bytes for info in manifest.files.values()))})"),
        ("model", f"{model.model_type}: {model.num_layers} layers, width {model.hidden_size}, "
                  f"vocabulary {model.vocab_size}"),
        ("context", f"{model.context_length} tokens, prefill by {model.prefill_chunk}"),
        ("quantization", f"{manifest.quantization}{_schemes(manifest)}, layout {manifest.weight_layout}, "
                         f"activations {model.dtype}, KV cache {model.kv_dtype}"),
        *([("embeddings", _embedding(model.embedding))] if model.embedding else []),
        *([("speech", _speech(model.speech))] if model.speech else []),
        *([("draft head", _draft_head(model))] if model.has_draft_head else []),
        ("target", f"{target.name}: {target.triple}"),
        ("made by", f"mlcpipe {manifest.mlcpipe_version}, linked by {manifest.linker.name} "
                    f"{manifest.linker.version}, {manifest.created}"),
        ("interface", f"{manifest.abi[:12]}, {usable}"),
        ("checkpoint", manifest.checkpoint_hash),
        ("origin", str(origin_of(bundle))),
        *((f"quality of {kind}", text) for kind, text in quality_lines(manifest)),
        *([("measured", f"against {manifest.quality.reference} in {manifest.quality.reference_quantization} on "
                        f"{manifest.quality.text}, variant {manifest.quality.variant}")] if manifest.quality else []),
    ]  # fmt: skip


def _speech(info: SpeechInfo) -> str:
    """What the model hears."""
    known = f"{len(info.languages)} languages, translates to English" if info.languages else "one language"
    return f"windows of {info.rows / 50:g} s, {info.mels} bands; {known}"


def _embedding(info: EmbeddingInfo) -> str:
    """What the model makes of texts."""
    if info.task == "rerank":
        return "a score of a query and a document"
    prompts = f", prompts {', '.join(sorted(info.prompts))}" if info.prompts else ""
    length = ", of length 1" if info.normalize else ""
    return f"{info.dimensions} numbers, pooling {info.pooling}{length}{prompts}"


def _draft_head(model: ModelInfo) -> str:
    """The draft head for the server."""
    if model.assistant is not None:
        return "an assistant, which reads the model's KV cache"
    if model.eagle is None:
        return f"{model.draft_heads} Medusa heads"
    return f"one layer, {byte_size(model.eagle.page_bytes // PAGE)} of KV cache a token"


def _schemes(manifest: Manifest) -> str:
    """The number of arrays per scheme, if there are others than the bundle's own."""
    counts = Counter(param.scheme for param in manifest.params if param.scheme)
    kept = ", ".join(f"{scheme} {count}" for scheme, count in counts.most_common())
    return f" (arrays of {kept})" if counts.keys() - {manifest.quantization} else ""


def _print_variants(console: Console, manifest: Manifest) -> None:
    """Every variant of the kernels, best first, and whether this machine runs it, or which library has it."""
    from mlcpipe.runtime.variants import variant_status
    from mlcpipe.support.env import env

    say(console, "\nvariants of the kernels, best first")
    libraries = any(variant.library for variant in manifest.target.variants)
    table = new_table("variant", "code", "library" if libraries else "on this machine", "needs")
    for variant, words in variant_status(manifest.target, env().cpu_variant):
        place = words
        if variant.library:
            place = f"{variant.library.path}: {variant.library.dtype}, KV cache {variant.library.kv_dtype}"
        size = f"of {variant.subgroup_size}" if variant.subgroup_size else ""
        needs = " ".join([*variant.features, size]).strip() or "nothing"
        table.add_row(*map(cell, (variant.name, byte_size(variant.bytes), place, needs)))
    console.print(table)


def _print_memory(console: Console, manifest: Manifest) -> None:
    from mlcpipe.bundle.memory import one_sequence, running_bytes

    plan, context = manifest.memory_plan, manifest.model.context_length
    states, running = one_sequence(manifest, context).nbytes(manifest.states), running_bytes(manifest)
    largest = sorted(plan.workspace_bytes.items(), key=lambda item: item[1], reverse=True)
    say(console, "\nmemory plan")
    print_rows(
        console,
        [
            ("weights", byte_size(plan.weights_bytes)),
            *([("tables in the mapped file", byte_size(plan.host_bytes))] if plan.host_bytes else []),
            *((f"{count} layers of {kind}", words) for (kind, words), count in _kinds(manifest).items()),
            ("states of a full context", byte_size(states)),
            *((f"workspace of {name}", byte_size(size)) for name, size in largest if size >= 1024),
            ("other memory of a run (upper bound)", byte_size(running)),
            ("at most", byte_size(plan.weights_bytes + states + running)),
        ],
    )


def _kinds(manifest: Manifest) -> Counter[tuple[str, str]]:
    """How many states of each kind there are: (what they keep, how much)."""
    kinds: Counter[tuple[str, str]] = Counter()
    for state in manifest.states:
        names = " and ".join(dict.fromkeys(part.name for part in state.parts))
        if state.kind == "slot":
            kinds[names, f"{byte_size(state.unit_bytes)} a sequence"] += len(state.layers)
        else:
            window = f" of the last {state.window} tokens" if state.window else ""
            kinds[names + window, f"{byte_size(state.unit_bytes // PAGE)} a token"] += len(state.layers)
    return kinds


def _print_kernels(console: Console, manifest: Manifest) -> None:
    table = new_table("kernel", "op", "rule", "reason", "variants", "tuning record", whole="kernel")
    count = len(manifest.target.variants)
    for kernel in manifest.kernels:
        variants = "all" if len(kernel.variants) == count else " ".join(kernel.variants)
        values = (kernel.name, kernel.op, kernel.rule, kernel.reason, variants, "; ".join(kernel.records))
        table.add_row(*map(cell, values))
    console.print(table)


def _print_params(console: Console, manifest: Manifest) -> None:
    table = new_table("parameter", "shape", "dtype", "scheme", "from")
    for param in manifest.params:
        shape = " x ".join(map(str, param.shape))
        table.add_row(*map(cell, (param.name, shape, param.dtype, param.scheme or "", ", ".join(param.sources))))
    console.print(table)
