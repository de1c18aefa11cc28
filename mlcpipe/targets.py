"""Targets: `<name>.toml` files, data and no code, that say what a device is and which kernels suit it."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlcpipe import cpu_features
from mlcpipe.errors import TargetError
from mlcpipe.resources import targets_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 1 << 16
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_KEYS = {
    "description": str,
    "kernels": str,
    "activation_dtype": str,
    "weight_layout": str,
    "link": str,
    "tuned": str,
    "device": str,
    "features": list,
    "companions": list,
    "architectures": list,
    "vendor": int,
    "tvm": dict,
    "limits": dict,
    "schedule": dict,
}
_VARIANT_KEYS = {"name": str, "arch": str, "mcpu": str, "mattr": list, "features": list, "schedule": dict}
_VARIANT_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")

Knobs = Mapping[str, int | str]


@dataclass(frozen=True)
class Variant:
    """One level of instructions that the kernels are compiled for.

    `features` are Linux's names of all instructions beyond the architecture's base that the code may use
    (`cpu_features`), `mcpu` and `mattr` are LLVM's. `schedule` is the target's with the variant's own on top.
    """

    name: str
    arch: str
    mcpu: str
    mattr: tuple[str, ...]
    features: tuple[str, ...]
    schedule: Knobs


@dataclass(frozen=True)
class Target:
    """Facts of one device, as its file states them, `base` merged in. `variants`: of all architectures, best first.

    `features` are what the code needs of a GPU beyond what every one has (of a CPU, its variants say). `companions` are
    targets, best first, whose code runs on the same weights and needs more features: `--quantization auto` compiles
    for them, too, into the same bundle. `architectures` are those of one kind of device that the bundle has machine
    code for, where its compiler makes any. `kernels` is a folder of `tir_schedules`. `tuned` names the file of tuning
    records: the target's own name, or that of a target whose kernels it shares; `device` is whose records `compile`
    takes where it cannot see the device. `vendor` made the GPUs that it is for (PCI's number, or Khronos'); 0: any.
    """

    name: str
    description: str
    kernels: str
    activation_dtype: str
    weight_layout: str
    link: str
    tvm: Mapping[str, Any]
    limits: Mapping[str, int]
    schedule: Knobs
    tuned: str = ""
    device: str = ""
    features: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    vendor: int = 0
    variants: tuple[Variant, ...] = ()


def target_names() -> list[str]:
    """The targets that come with mlcpipe."""
    return sorted(path.stem for path in targets_path().glob("*.toml"))


def load_target(name: str) -> Target:
    """The target of that name, or of the user's own `./board.toml`.

    Raises TargetError for an unknown name or a file that is not a whole description.
    """
    path = Path(name) if name.endswith(".toml") else targets_path() / f"{name}.toml"
    if name.startswith("opencl") and not name.endswith(".toml"):
        raise TargetError(
            "there is no OpenCL runtime here: GPUs of phones run models through Vulkan",
            found=name[:40],
            next_step="compile with --target adreno, mali or vulkan",
        )
    if not name.endswith(".toml") and (not _NAME.fullmatch(name) or not path.is_file()):
        raise TargetError(
            "unknown target",
            expected=f"{', '.join(target_names())} or a path to a .toml file",
            found=name,
            next_step="see `mlcpipe doctor`",
        )
    return _target(path.stem, _merged(path, depth=0), path)


def suited_target(vendor: int, limits: Mapping[str, Any]) -> str:
    """The Vulkan target that suits a device best, by its maker and what it grants (see `runtime.vulkan.Device`).

    Those with products by cooperative matrices are for the user to name: no GPU has run them yet.
    """
    found = (t.name for t in map(load_target, target_names()) if _suits(t, vendor, limits))
    return next((name for name in found if not load_target(name).schedule.get("matrix_rows")), "vulkan")


def matrix_target(vendor: int, limits: Mapping[str, Any], features: Collection[str]) -> str:
    """The Vulkan target with products by cooperative matrices that a device can run, "" if none."""
    for target in map(load_target, target_names()):
        shape = "x".join(str(target.schedule.get(f"matrix_{key}", 0)) for key in ("rows", "columns", "depth"))
        if _suits(target, vendor, limits) and f"cooperativeMatrix{shape}" in features:
            return target.name
    return ""


def _suits(target: Target, vendor: int, limits: Mapping[str, Any]) -> bool:
    """Whether a target is for a maker's devices, and one grants what it takes."""
    if not target.vendor or target.vendor != vendor:
        return False
    lanes, need = int(target.schedule.get("subgroup", 0)), target.limits
    sizes = limits["min_subgroup_size"] <= lanes <= limits["max_subgroup_size"]
    enough = all(
        limits[theirs] >= need[ours]
        for theirs, ours in (
            ("max_threads", "max_invocations"),
            ("max_shared_memory_bytes", "max_shared_bytes"),
            ("max_buffer_bytes", "max_binding_bytes"),
        )
    )
    return enough and (not lanes or bool(sizes and limits["can_require_subgroup_size"]))


def _merged(path: Path, depth: int) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TargetError("target file is too large", where=path, expected=f"at most {MAX_BYTES} bytes")
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TargetError("target file cannot be read", where=path, found=error) from error
    base = values.pop("base", None)
    if base is None:
        return values
    if depth > 8 or not isinstance(base, str) or not _NAME.fullmatch(base):
        raise TargetError("target has an unusable base", where=path, expected="the name of another target", found=base)
    merged = _merged(targets_path() / f"{base}.toml", depth + 1)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merged[key] | value if both else value
    return merged


def _target(name: str, values: dict[str, Any], path: Path) -> Target:
    values = {"features": [], "companions": [], "architectures": [], "vendor": 0, "tuned": name, "device": "", **values}
    entries = values.pop("variants", [])
    _check(values, _KEYS, "target file", path)
    for key in ("features", "companions", "architectures"):
        if not all(isinstance(word, str) and _NAME.fullmatch(word) for word in values[key]):
            raise TargetError(f"target file {key}", where=path, expected="names", found=repr(values[key])[:80])
        values[key] = tuple(values[key])
    if not _NAME.fullmatch(values["tuned"]):
        raise TargetError("target file tuned", where=path, expected="a name", found=repr(values["tuned"])[:80])
    if values["features"] and entries:
        raise TargetError("target file features", where=path, expected="those of its variants", found="its own")
    if values["link"] == "wasm" and ("subgroups" in values["features"]) != bool(values["schedule"].get("subgroup")):
        raise TargetError(
            "target file schedule.subgroup", where=path, expected="a size, and subgroups among the features",
            found=f"subgroup = {values['schedule'].get('subgroup', 0)}, features {list(values['features'])}"[:200],
        )  # fmt: skip
    for key, value in values["limits"].items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TargetError(f"target file limits.{key}", where=path, expected="a positive integer", found=repr(value))
    _check_knobs(values["schedule"], "schedule", path)
    if not isinstance(entries, list):
        raise TargetError("target file variants", where=path, expected="[[variants]]", found=repr(entries)[:80])
    variants = tuple(_variant(entry, values["schedule"], path) for entry in entries)
    names = [(variant.arch, variant.name) for variant in variants]
    if len(set(names)) < len(names):
        raise TargetError("target file has two variants of one name", where=path, found=", ".join(n for _, n in names))
    return Target(name=name, variants=variants, **values)


def _check(values: Mapping[str, Any], keys: Mapping[str, type], what: str, path: Path) -> None:
    """Every key of `keys` with its type, and no other. Raises TargetError."""
    unknown = sorted(set(values) - set(keys))
    if unknown:
        raise TargetError(f"{what} has an unknown key", where=path, expected=", ".join(keys), found=", ".join(unknown))
    for key, kind in keys.items():
        if not isinstance(values.get(key), kind):
            raise TargetError(f"{what} lacks {key}", where=path, expected=kind.__name__, found=repr(values.get(key)))


def _check_knobs(knobs: Mapping[str, Any], table: str, path: Path) -> None:
    for key, value in knobs.items():
        good = value >= 0 if isinstance(value, int) else isinstance(value, str) and value
        if not good or isinstance(value, bool):
            raise TargetError(
                f"target file {table}.{key}", where=path, expected="an integer >= 0 or a word", found=repr(value)
            )


def _variant(entry: Any, schedule: Mapping[str, Any], path: Path) -> Variant:
    if not isinstance(entry, dict):
        raise TargetError("target file variants", where=path, expected="tables", found=repr(entry)[:80])
    _check(entry, _VARIANT_KEYS, f"variant {str(entry.get('name'))[:40]!r}", path)
    name, arch, features = entry["name"], entry["arch"], entry["features"]
    known = cpu_features.LLVM_NAMES.get(arch)
    if not _VARIANT_NAME.fullmatch(name):
        raise TargetError("variant has an unusable name", where=path, expected="a-z, 0-9 and _", found=repr(name)[:80])
    if known is None:
        raise TargetError(
            f"variant {name} arch", where=path, expected=" or ".join(cpu_features.LLVM_NAMES), found=repr(arch)[:80]
        )
    strange = [feature for feature in features if feature not in known]
    if strange:
        raise TargetError(
            f"variant {name} needs a feature that is unknown", where=path, expected=", ".join(known), found=strange[0]
        )
    if not all(isinstance(word, str) and word[:1] in ("+", "-") for word in entry["mattr"]):
        raise TargetError(f"variant {name} mattr", where=path, expected="words that begin with + or -")
    _check_knobs(entry["schedule"], f"variant {name} schedule", path)
    return Variant(name, arch, entry["mcpu"], tuple(entry["mattr"]), tuple(features), {**schedule, **entry["schedule"]})


def host_variants(target: Target) -> list[Variant]:
    """The variants of this machine's architecture, best first, as the target's file has them."""
    return [variant for variant in target.variants if variant.arch == cpu_features.architecture()]


def compiled_variants(target: Target) -> tuple[Variant, ...]:
    """What a compile for `target` makes, best first: all variants of its architecture, or one for the CPU it names.

    A target without variants counts as one of the target's own name. Raises TargetError for an architecture without
    variants, and for a variant whose code may use an instruction that its features do not name.
    """
    arch, mcpu = cpu_features.architecture_of(triple(target)), target.tvm.get("mcpu")
    if not target.variants:
        mattr = tuple(target.tvm.get("mattr", ()))
        return (Variant(target.name, arch, mcpu or "", mattr, target.features, target.schedule),)
    variants = [variant for variant in target.variants if variant.arch == arch]
    if not variants:
        raise TargetError("target has no variant for the architecture", where=target.name, found=triple(target))
    if mcpu is not None:
        return (_tuned(target, variants, str(mcpu)),)
    for variant in variants:
        missing = _instructions(target, variant) - _covered(variant)
        if missing:
            raise TargetError(
                f"variant {variant.name} does not name all its features",
                where=target.name,
                expected=f"features for LLVM's {', '.join(sorted(missing))}",
                found=", ".join(variant.features),
            )
    return tuple(variants)


def _tuned(target: Target, variants: list[Variant], mcpu: str) -> Variant:
    """The best variant that a CPU runs, tuned to it; `native` is this machine's as the system shows it."""
    known, features = cpu_features.LLVM_NAMES[variants[0].arch], cpu_features.host_features()
    asked = tuple(target.tvm.get("mattr", ()))
    if mcpu == "native":
        if variants[0].arch != cpu_features.architecture():
            raise TargetError(
                "native means this machine's CPU", where=target.name, expected=cpu_features.architecture(),
                found=triple(target), next_step="name an mcpu",
            )  # fmt: skip
        import tvm

        mcpu = tvm.target.codegen.llvm_get_system_cpu()
        asked = (*(f"+{word}" for name in sorted(features) for word in known[name]), *asked)
    bare = replace(variants[-1], mcpu=mcpu, mattr=asked)
    has = _features(target, bare)
    if target.tvm["mcpu"] != "native":
        features = frozenset(name for name, words in known.items() if set(words) <= has)
    best = next(variant for variant in variants if features.issuperset(variant.features))
    tuned = replace(best, mcpu=mcpu, mattr=(*asked, *best.mattr), features=tuple(f for f in known if f in features))
    # What LLVM's table says of the CPU beyond what the machine shows, or what `cpu_features` cannot ask for.
    excess = sorted(_instructions(target, tuned) - _covered(tuned))
    return replace(tuned, mattr=(*tuned.mattr, *(f"-{word}" for word in excess)))


# Of LLVM's features, those that are instructions: the rest tunes code and says nothing about what can run.
_INSTRUCTIONS = re.compile(
    r"(sse|ssse|avx|amx|fma|xop|tbm|f16c|bmi|popcnt|lzcnt|movbe|aes|vaes|pclmul|vpclmul|gfni|adx|sha|cmov|mmx|crc32"
    r"|sm3|sm4|movdir|cmpccxadd|prfchw|egpr|push2pop2|ppx|ndd|ccmp|nf|cf|zu|cx16|sahf|movrs"
    r"|neon|fp-armv8|dotprod|i8mm|fullfp16|fp16fml|bf16|sve|sme|lse|crc|rdm|rcpc|jsconv|complxnum|fptoint|flagm|mops"
    r"|cssc|faminmax|fp8|lut)[a-z0-9._-]*"
)


def _features(target: Target, variant: Variant) -> set[str]:
    import tvm

    return {str(feature) for feature in tvm.target.codegen.llvm_get_cpu_features(tvm_target(target, variant))}


def host_instruction_sets() -> set[str]:
    """LLVM's names of the instructions that programs may use on this machine."""
    known = cpu_features.LLVM_NAMES.get(cpu_features.architecture(), {})
    return {word for feature in cpu_features.host_features() for word in known[feature]}


def _instructions(target: Target, variant: Variant) -> set[str]:
    """LLVM's names of the instructions beyond the architecture's base that code for a variant may use."""
    base = replace(variant, mcpu="x86-64" if variant.arch == "x86_64" else "generic", mattr=())
    extra = _features(target, variant) - _features(target, base)
    return {feature for feature in extra if _INSTRUCTIONS.fullmatch(feature)}


def _covered(variant: Variant) -> set[str]:
    known = cpu_features.LLVM_NAMES[variant.arch]
    return {word for feature in variant.features for word in known[feature]}


def triple(target: Target) -> str:
    """Operating system and architecture that a target's code is for, as LLVM writes them."""
    import tvm

    host = target.tvm.get("host", {})
    return str(target.tvm.get("mtriple") or host.get("mtriple") or tvm.target.codegen.llvm_get_system_triple())


def tvm_target(target: Target, variant: Variant) -> Any:
    """The `tvm.target.Target` of a variant. Raises TargetError with what TVM says of it."""
    import tvm

    options = dict(target.tvm)
    if options.get("kind") == "llvm":
        options |= {"mcpu": variant.mcpu, "mattr": list(variant.mattr), "mtriple": triple(target)}
    try:
        return tvm.target.Target(options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TargetError(
            "TVM refuses the target", where=target.name, found=str(error).strip().splitlines()[-1]
        ) from error
