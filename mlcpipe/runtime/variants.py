"""Variants in a compiled library: how they are named, and which one this machine runs."""

from __future__ import annotations

from typing import Any

from mlcpipe import cpu_features
from mlcpipe.bundle.manifest import TargetInfo, VariantInfo
from mlcpipe.errors import BundleError, TargetError, UsageError


def prefix(variant: str) -> str:
    """What symbols of a variant begin with, except those of the last one."""
    return f"mlcpipe_{variant}_"


def marker(variant: str) -> str:
    """The function by which an executable of the VM says what variant it is; it returns its argument."""
    return f"_mlcpipe_variant_{variant}"


def lacking(variant: VariantInfo) -> list[str]:
    """The features of a variant that this machine has not."""
    here = cpu_features.host_features()
    return [feature for feature in variant.features if feature not in here]


def choose(target: TargetInfo, wanted: str | None) -> VariantInfo:
    """The variant to run here: `wanted` by MLCPIPE_CPU_VARIANT, or the first that this machine can.

    Raises TargetError when the library is for another architecture or none of its variants can run, UsageError when
    `wanted` is not among them or cannot run.
    """
    names = ", ".join(variant.name for variant in target.variants)
    if wanted is None:
        found = next((variant for variant in target.variants if not lacking(variant)), None)
        if found is None:
            least = target.variants[-1]
            raise TargetError(
                "the bundle was made for a CPU with more instructions",
                expected=f"this CPU to have {', '.join(lacking(least)[:6])}",
                found=f"variants {names}",
                next_step="compile the model again with --target cpu",
            )
        return found
    chosen = next((variant for variant in target.variants if variant.name == wanted), None)
    if chosen is None:
        raise UsageError(
            "MLCPIPE_CPU_VARIANT names no variant of the bundle", expected=names, found=repr(wanted)[:80],
            next_step="unset it, or name one of these",
        )  # fmt: skip
    if missing := lacking(chosen):
        raise UsageError(
            f"MLCPIPE_CPU_VARIANT asks for {wanted}, which this CPU cannot run",
            expected=f"a CPU with {', '.join(missing[:6])}",
            found="a CPU without",
            next_step="unset it: the best variant is chosen by itself",
        )
    return chosen


def standing(target: TargetInfo, wanted: str | None) -> list[tuple[VariantInfo, str]]:
    """Each variant and, for people, whether it runs here and why not."""
    if cpu_features.architecture_of(target.triple) != cpu_features.architecture():
        return [(variant, f"is for {target.triple}") for variant in target.variants]
    best = next((v.name for v in target.variants if not lacking(v)), None)
    runs = best if wanted is None else wanted
    words = []
    for variant in target.variants:
        missing = lacking(variant)
        if missing:
            words.append(f"lacks {' '.join(missing)}")
        else:
            words.append("runs" if variant.name == runs else "can run")
    return list(zip(target.variants, words))


def executable_of(module: Any, variant: str) -> Any:
    """The VM's executable of a variant in a loaded library. Raises BundleError when there is none."""
    name = marker(variant)
    for one in (module, *module.imports):
        if one.kind == "relax.VMExecutable" and one["has_function"](name):
            return one
    raise BundleError("the compiled library lacks a variant", expected=variant, next_step="compile the model again")


def function_of(module: Any, executable: Any, variant: str, name: str) -> Any:
    """A PrimFunc of a variant, or None."""
    symbol = name if executable is module else prefix(variant) + name
    return module.get_function(symbol, True)
