"""`mlcpipe inspect`: what is in a bundle, and why it is as it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import JsonOption, bundle_folder
from mlcpipe.cli.quality import quality_lines
from mlcpipe.cli.terminal import cell, new_table, print_json, print_rows, say, stdout_console
from mlcpipe.defaults import KEEP
from mlcpipe.host.finding import byte_size

if TYPE_CHECKING:
    from rich.console import Console

    from mlcpipe.bundle import Manifest


def inspect_command(
    bundle: Annotated[Path, typer.Argument(help="A compiled model's folder.", parser=bundle_folder, metavar="bundle")],
    kernels: Annotated[bool, typer.Option("--kernels", help="Every kernel: its schedule rule and the reason.")] = False,
    params: Annotated[bool, typer.Option("--params", help="Every parameter and the tensors it comes from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a bundle: model, target, memory plan, kernels and where the weights come from.

    It only reads the manifest, so it also shows bundles of other versions and for other machines.

    Examples:

    `mlcpipe inspect ./my-bundle`

    `mlcpipe inspect ./my-bundle --kernels`
    """
    from mlcpipe.bundle import read_manifest

    manifest = read_manifest(bundle, check_abi=False)
    if as_json:
        print_json(manifest.model_dump(mode="json"))
        return
    console = stdout_console()
    if kernels:
        _print_kernels(console, manifest)
    if params:
        _print_params(console, manifest)
    if not kernels and not params:
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
    usable = "fits this installation" if manifest.abi == abi_hash() else "made for other versions: compile anew"
    window = f", sliding window {model.sliding_window}" if model.sliding_window else ""
    return [
        ("bundle", f"{bundle} ({byte_size(sum(info.bytes for info in manifest.files.values()))})"),
        ("model", f"{model.model_type}: {model.num_layers} layers, width {model.hidden_size}, "
                  f"{model.num_attention_heads} heads ({model.num_key_value_heads} for keys), "
                  f"vocabulary {model.vocab_size}"),
        ("context", f"{model.context_length} tokens{window}, prefill by {model.prefill_chunk}"),
        ("quantization", f"{manifest.quantization}{_schemes(manifest)}, layout {manifest.weight_layout}, "
                         f"activations {model.dtype}, KV cache {model.kv_dtype}"),
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


def _schemes(manifest: Manifest) -> str:
    """How many arrays each scheme has, where every weight has its own; else nothing."""
    counts = Counter(param.scheme for param in manifest.params if param.scheme)
    kept = ", ".join(f"{scheme} {count}" for scheme, count in counts.most_common())
    return f" (arrays of {kept})" if manifest.quantization == KEEP else ""


def _print_variants(console: Console, manifest: Manifest) -> None:
    """Every variant of the kernels, best first, and whether this machine runs it, or which library has it."""
    from mlcpipe.env import env
    from mlcpipe.runtime.variants import variant_status

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
    plan, context = manifest.memory_plan, manifest.model.context_length
    full = plan.kv_bytes_per_token * context
    largest = sorted(plan.workspace_bytes.items(), key=lambda item: item[1], reverse=True)
    say(console, "\nmemory plan")
    print_rows(
        console,
        [
            ("weights", byte_size(plan.weights_bytes)),
            (
                "KV cache",
                f"{byte_size(plan.kv_bytes_per_token)} a token, {byte_size(full)} when the context is full",
            ),
            *((f"workspace of {name}", byte_size(size)) for name, size in largest if size >= 1024),
            ("a run besides, at most", byte_size(manifest.running_bytes)),
            ("at most", byte_size(plan.weights_bytes + full + manifest.running_bytes)),
        ],
    )


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
