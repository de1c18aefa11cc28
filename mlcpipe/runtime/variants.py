"""Variants in a compiled library: how they are named, and which one this machine runs."""

from __future__ import annotations

from typing import Any

from mlcpipe.bundle.manifest import TargetInfo, VariantInfo
from mlcpipe.errors import BundleError, TargetError, UsageError
from mlcpipe.host import cpu_features


def prefix(variant: str) -> str:
    """What symbols of a variant start with; those of the last variant have no prefix."""
    return f"mlcpipe_{variant}_"


def marker(variant: str) -> str:
    """Name of the function that marks a VM executable as that of a variant; it returns its argument."""
    return f"_mlcpipe_variant_{variant}"


def missing_features(variant: VariantInfo) -> list[str]:
    """The features of a variant that this machine lacks."""
    here = cpu_features.host_features()
    return [feature for feature in variant.features if feature not in here]


def choose(target: TargetInfo, wanted: str | None) -> VariantInfo:
    """The variant to run here: `wanted` by MLCPIPE_CPU_VARIANT, or the first that this machine can run.

    Raises TargetError when the library is for another architecture or none of its variants can run, UsageError when
    `wanted` is not among them or cannot run.
    """
    names = ", ".join(variant.name for variant in target.variants)
    if wanted is None:
        best = next((variant for variant in target.variants if not missing_features(variant)), None)
        if best is None:
            least = target.variants[-1]
            raise TargetError(
                "the bundle was made for a CPU with more instructions",
                expected=f"this CPU to have {', '.join(missing_features(least)[:6])}",
                found=f"variants {names}",
                next_step="compile the model again with --target cpu",
            )
        return best
    chosen = next((variant for variant in target.variants if variant.name == wanted), None)
    if chosen is None:
        raise UsageError(
            "MLCPIPE_CPU_VARIANT names no variant of the bundle", expected=names, found=repr(wanted)[:80],
            next_step="unset it, or name one of these",
        )  # fmt: skip
    if missing := missing_features(chosen):
        raise UsageError(
            f"MLCPIPE_CPU_VARIANT asks for {wanted}, which this CPU cannot run",
            expected=f"a CPU with {', '.join(missing[:6])}",
            found="a CPU without",
            next_step="unset it: the best variant is chosen automatically",
        )
    return chosen


def variant_status(target: TargetInfo, wanted: str | None) -> list[tuple[VariantInfo, str]]:
    """Each variant with a short text: whether it runs here, or why not."""
    if cpu_features.architecture_of(target.triple) != cpu_features.architecture():
        return [(variant, f"is for {target.triple}") for variant in target.variants]
    best = next((v.name for v in target.variants if not missing_features(v)), None)
    runs = best if wanted is None else wanted
    status = []
    for variant in target.variants:
        missing = missing_features(variant)
        if missing:
            status.append(f"lacks {' '.join(missing)}")
        else:
            status.append("runs" if variant.name == runs else "can run")
    return list(zip(target.variants, status))


def executable_of(module: Any, variant: str) -> Any:
    """The VM's executable of a variant in a loaded library. Raises BundleError when there is none."""
    name = marker(variant)
    for candidate in (module, *module.imports):
        if candidate.kind == "relax.VMExecutable" and candidate["has_function"](name):
            return candidate
    raise BundleError("the compiled library lacks a variant", expected=variant, next_step="compile the model again")


def function_of(module: Any, executable: Any, variant: str, name: str) -> Any:
    """A PrimFunc of a variant, or None."""
    symbol = name if executable is module else prefix(variant) + name
    return module.get_function(symbol, True)
