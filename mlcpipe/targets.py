"""Targets: `<name>.toml` files that describe a device and the kernels that suit it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from mlcpipe.errors import TargetError, last_line
from mlcpipe.host import cpu_features
from mlcpipe.support.closest import closest
from mlcpipe.support.json_files import Items, OnlyKnown, Table, invalid
from mlcpipe.support.resources import targets_path
from mlcpipe.support.toml_files import read_toml

MAX_BYTES = 1 << 16
_NEXT = "docs/targets/boards.md has one that works"
# Knobs that kernels divide by, or count with.
_COUNTS = (
    "lanes", "gemm_rows", "gemm_blocks", "gemm_depth", "int8_rows", "int8_tail_rows", "int8_blocks", "int8_depth",
    "int8_gemv_streams",
)  # fmt: skip
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")

Knobs = Mapping[str, int | str]


def _knob(value: object) -> object:
    if isinstance(value, bool) or not (value >= 0 if isinstance(value, int) else isinstance(value, str) and value):
        raise ValueError("an integer >= 0 or a name")
    return value


def _arch(value: str) -> str:
    if value not in cpu_features.LLVM_NAMES:
        raise ValueError(" or ".join(", ".join(cpu_features.LLVM_NAMES).rsplit(", ", 1)))
    return value


_Word = Annotated[str, Field(pattern=rf"^{_NAME.pattern}$")]
_Words = Items[_Word]
_VariantName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
_Attributes = Items[Annotated[str, Field(pattern=r"^[+-]")]]
_Arch = Annotated[str, AfterValidator(_arch)]
_Knobs = Table[str, Annotated[int | str, BeforeValidator(_knob)]]
_Limits = Table[str, Annotated[int, Field(ge=1, strict=True)]]
_CONFIG = ConfigDict(extra="forbid")  # not strict, which rejects a dict for a dataclass


@dataclass(frozen=True)
class Variant(OnlyKnown):
    """One level of instructions that the kernels are compiled for.

    `features` are Linux's names of all instruction sets beyond the architecture's base that the code may use
    (`cpu_features`); `mcpu` and `mattr` are LLVM's. `schedule` is the target's, overridden by the variant's.
    """

    __pydantic_config__ = _CONFIG

    name: _VariantName
    arch: _Arch
    mcpu: str
    mattr: _Attributes
    features: _Words
    schedule: _Knobs


@dataclass(frozen=True)
class Target(OnlyKnown):
    """One target file with `base` merged in. `variants` cover all architectures, best first.

    `backend` is a module of `mlcpipe/compiler/backends`, `kernels` a folder of `tir_schedules`. `features` are required
    of a GPU beyond what every GPU has (CPU variants list their own). `companions` are targets, best first, that use the
    same weights and need more features: `--quantization auto` also compiles for them, into the same bundle.
    `architectures` lists the GPU architectures that get machine code. `archive`: a static library, for a program or
    app; of a GPU it is the only one.
    `tuned` names the file of tuning records: by default the target's name, or that of a target with the same kernels.
    `device` is the device whose records `compile` uses when it cannot detect one. `kv_cache`: the runtime's own pages,
    or TVM's cache, which WebLLM brings along, for models that it serves (`export.fitted_target`). Sampling functions
    are those that the cache's owner calls.
    `kv_cache_dtype` is what auto means for `compile`, where the kernels support it for the model.
    `vendor` is the PCI or Khronos vendor ID of the supported GPUs; 0: any.
    """

    __pydantic_config__ = _CONFIG

    name: str
    description: str
    kernels: _Word
    activation_dtype: _Word
    weight_layout: _Word
    backend: _Word
    tvm: Mapping[str, Any]
    limits: _Limits
    schedule: _Knobs
    tuned: _Word
    device: str = ""
    features: _Words = ()
    companions: _Words = ()
    architectures: _Words = ()
    kv_cache: Literal["pages", "tvm"] = "pages"
    kv_cache_dtype: Literal["auto", "f32", "f16", "q8", "q4"] = "auto"
    vendor: Annotated[int, Field(ge=0, strict=True)] = 0
    archive: Annotated[bool, Field(strict=True)] = False
    variants: Items[Variant] = ()

    @property
    def own_pages(self) -> bool:
        """Whether the runtime owns the KV cache's pages."""
        return self.kv_cache == "pages"

    @property
    def in_browsers(self) -> bool:
        """Whether its libraries are WebAssembly, which the chat page runs."""
        return str(self.tvm.get("host", {}).get("mtriple")).startswith("wasm")

    @property
    def gathers_rows(self) -> bool:
        """Whether hosts give functions the rows of tables by token, not the tables: a GPU would need a copy of them.

        The chat page copies them.
        """
        return self.own_pages and self.kernels != "cpu" and not self.in_browsers


def target_names() -> list[str]:
    """The targets that ship with mlcpipe."""
    return sorted(path.stem for path in targets_path().glob("*.toml"))


def load_targets(backend: str) -> list[Target]:
    """The targets for a backend that ship with mlcpipe."""
    return [target for target in map(load_target, target_names()) if target.backend == backend]


def load_target(name: str) -> Target:
    """The target with that name, or from the user's own `./board.toml`.

    Raises TargetError for an unknown name or an incomplete file.
    """
    path = Path(name) if name.endswith(".toml") else targets_path() / f"{name}.toml"
    if not name.endswith(".toml") and (not _NAME.fullmatch(name) or not path.is_file()):
        raise TargetError(
            "unknown target",
            expected=closest(name, target_names(), _elsewhere(), "one such as cpu, vulkan or webgpu"),
            found=name,
            next_step="`mlcpipe doctor` lists all targets; a board.toml of your own is one, too",
        )
    return _target(path.stem, _merged(path, depth=0), path)


def _elsewhere() -> dict[str, str]:
    """What people call devices elsewhere -> targets here."""
    content = json.loads((targets_path() / "elsewhere.json").read_text(encoding="utf-8"))
    return {word: here for here, words in content.items() for word in words}


def _merged(path: Path, depth: int) -> dict[str, Any]:
    values = read_toml(path, MAX_BYTES, TargetError, "target file", _NEXT)
    base = values.pop("base", None)
    if base is None:
        return values
    if depth > 8 or not isinstance(base, str) or not _NAME.fullmatch(base):
        raise TargetError("target has an invalid base", where=path, expected="the name of another target", found=base)
    merged = _merged(targets_path() / f"{base}.toml", depth + 1)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merged[key] | value if both else value
    return merged


def _target(name: str, values: dict[str, Any], path: Path) -> Target:
    if "name" in values:
        raise TargetError("target file has an unknown key", where=path, found="name", next_step=_NEXT)
    try:
        target = TypeAdapter(Target).validate_python({"tuned": name, **values, "name": name})
    except ValidationError as error:
        raise invalid(error, TargetError, "target file", path) from None
    if target.features and target.variants:
        raise TargetError("target file features", where=path, expected="none, or no variants", found="both")
    if not target.own_pages and not target.in_browsers:
        raise TargetError("only browsers bring TVM's KV cache", where=path, expected='kv_cache = "pages"', found="tvm")
    names = [(variant.arch, variant.name) for variant in target.variants]
    if len(set(names)) < len(names):
        raise TargetError("target file has duplicate variants", where=path, found=", ".join(n for _, n in names))
    for variant in target.variants:
        known = cpu_features.LLVM_NAMES[variant.arch]
        if unknown := [feature for feature in variant.features if feature not in known]:
            raise TargetError(
                f"variant {variant.name} needs an unknown feature", where=path, expected=", ".join(known),
                found=unknown[0],
            )  # fmt: skip
    for schedule in (target.schedule, *(variant.schedule for variant in target.variants)):
        for name, value in schedule.items():
            if name.partition(".")[0] in _COUNTS and not (isinstance(value, int) and value >= 1):
                raise TargetError(f"knob {name}", where=path, expected="an integer >= 1", found=value)
    overlaid = (replace(v, schedule={**target.schedule, **v.schedule}) for v in target.variants)
    return replace(target, variants=tuple(overlaid))


def host_variants(target: Target) -> list[Variant]:
    """The variants for this machine's architecture, best first, as in the target's file."""
    return [variant for variant in target.variants if variant.arch == cpu_features.architecture()]


def compiled_variants(target: Target) -> tuple[Variant, ...]:
    """The variants to compile for `target`, best first: all of its architecture, or one for the CPU it names.

    A target without variants gets one with the target's name. Raises TargetError for an architecture without
    variants, and for a variant whose code may use an instruction that its features do not list.
    """
    arch, mcpu = cpu_features.architecture_of(triple(target)), target.tvm.get("mcpu")
    if not target.variants:
        mattr = tuple(target.tvm.get("mattr", ()))
        return (Variant(target.name, arch, mcpu or "", mattr, target.features, target.schedule),)
    variants = [variant for variant in target.variants if variant.arch == arch]
    if not variants:
        raise TargetError("target has no variant for this architecture", where=target.name, found=triple(target))
    if mcpu is not None:
        return (_tuned_variant(target, variants, str(mcpu)),)
    for variant in variants:
        missing = _instructions(target, variant) - _covered(variant)
        if missing:
            raise TargetError(
                f"variant {variant.name} does not list all its features",
                where=target.name,
                expected=f"features for LLVM's {', '.join(sorted(missing))}",
                found=", ".join(variant.features),
            )
    return tuple(variants)


def _tuned_variant(target: Target, variants: list[Variant], mcpu: str) -> Variant:
    """The best variant that a CPU runs, tuned for it; `native` is this machine's CPU."""
    known, features = cpu_features.LLVM_NAMES[variants[0].arch], cpu_features.host_features()
    mattr = tuple(target.tvm.get("mattr", ()))
    if mcpu == "native":
        if variants[0].arch != cpu_features.architecture():
            raise TargetError(
                "native means this machine's CPU", where=target.name, expected=cpu_features.architecture(),
                found=triple(target), next_step="set an mcpu",
            )  # fmt: skip
        import tvm

        mcpu = tvm.target.codegen.llvm_get_system_cpu()
        mattr = (*(f"+{word}" for name in sorted(features) for word in known[name]), *mattr)
    bare = replace(variants[-1], mcpu=mcpu, mattr=mattr)
    has = _features(target, bare)
    if target.tvm["mcpu"] != "native":
        features = frozenset(name for name, words in known.items() if set(words) <= has)
    best = next(variant for variant in variants if features.issuperset(variant.features))
    tuned = replace(best, mcpu=mcpu, mattr=(*mattr, *best.mattr), features=tuple(f for f in known if f in features))
    # Features in LLVM's table for this CPU that the system does not report or `cpu_features` cannot detect.
    excess = sorted(_instructions(target, tuned) - _covered(tuned))
    return replace(tuned, mattr=(*tuned.mattr, *(f"-{word}" for word in excess)))


# LLVM's features that are instruction sets; the others only tune code.
_INSTRUCTIONS = re.compile(
    r"(sse|ssse|avx|amx|fma|xop|tbm|f16c|bmi|popcnt|lzcnt|movbe|aes|vaes|pclmul|vpclmul|gfni|adx|sha|cmov|mmx|crc32"
    r"|sm3|sm4|movdir|cmpccxadd|prfchw|egpr|push2pop2|ppx|ndd|ccmp|nf|cf|zu|cx16|sahf|movrs"
    r"|neon|fp-armv8|dotprod|i8mm|fullfp16|fp16fml|bf16|sve|sme|lse|crc|rdm|rcpc|jsconv|complxnum|fptoint|flagm|mops"
    r"|cssc|faminmax|fp8|lut|zv)[a-z0-9._-]*|v"
)


def _features(target: Target, variant: Variant) -> set[str]:
    import tvm

    return {str(feature) for feature in tvm.target.codegen.llvm_get_cpu_features(tvm_target(target, variant))}


def host_instruction_sets() -> set[str]:
    """LLVM's names of the instruction sets that programs may use on this machine."""
    known = cpu_features.LLVM_NAMES.get(cpu_features.architecture(), {})
    return {word for feature in cpu_features.host_features() for word in known[feature]}


def _instructions(target: Target, variant: Variant) -> set[str]:
    """LLVM's names of the instruction sets beyond the architecture's base that a variant's code may use."""
    mcpu, mattr = cpu_features.BASE[variant.arch]
    base = replace(variant, mcpu=mcpu, mattr=mattr)
    extra = _features(target, variant) - _features(target, base)
    return {feature for feature in extra if _INSTRUCTIONS.fullmatch(feature)}


def _covered(variant: Variant) -> set[str]:
    known = cpu_features.LLVM_NAMES[variant.arch]
    return {word for feature in variant.features for word in known[feature]}


def triple(target: Target) -> str:
    """Operating system and architecture of a target's code, as LLVM writes them."""
    import tvm

    host = target.tvm.get("host", {})
    return str(target.tvm.get("mtriple") or host.get("mtriple") or tvm.target.codegen.llvm_get_system_triple())


def tvm_target(target: Target, variant: Variant) -> Any:
    """The `tvm.target.Target` of a variant. Raises TargetError with TVM's reason."""
    import tvm

    options = dict(target.tvm)
    if options.get("kind") == "llvm":
        options |= {"mcpu": variant.mcpu, "mattr": list(variant.mattr), "mtriple": triple(target)}
    try:
        return tvm.target.Target(options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TargetError("TVM rejects the target", where=target.name, found=last_line(error)) from error
