"""Targets: `<name>.toml` files, data and no code, that say what a device is and which kernels suit it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "tvm": dict,
    "limits": dict,
    "schedule": dict,
}


@dataclass(frozen=True)
class Target:
    """Facts of one device, as its file states them, `base` merged in."""

    name: str
    description: str
    kernels: str
    activation_dtype: str
    weight_layout: str
    link: str
    tvm: Mapping[str, Any]
    limits: Mapping[str, int]
    schedule: Mapping[str, int]


def target_names() -> list[str]:
    """The targets that come with mlcpipe."""
    return sorted(path.stem for path in targets_path().glob("*.toml"))


def load_target(name: str) -> Target:
    """The target of that name, or of the user's own `./board.toml`.

    Raises TargetError for an unknown name or a file that is not a whole description.
    """
    path = Path(name) if name.endswith(".toml") else targets_path() / f"{name}.toml"
    if not name.endswith(".toml") and (not _NAME.fullmatch(name) or not path.is_file()):
        raise TargetError(
            "unknown target",
            expected=f"{', '.join(target_names())} or a path to a .toml file",
            found=name,
            next_step="see `mlcpipe doctor`",
        )
    return _target(path.stem, _merged(path, depth=0), path)


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
    unknown = sorted(set(values) - set(_KEYS))
    if unknown:
        raise TargetError(
            "target file has an unknown key", where=path, expected=", ".join(_KEYS), found=", ".join(unknown)
        )
    for key, kind in _KEYS.items():
        if not isinstance(values.get(key), kind):
            raise TargetError(
                f"target file lacks {key}", where=path, expected=kind.__name__, found=repr(values.get(key))
            )
    for table in ("limits", "schedule"):
        for key, value in values[table].items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TargetError(
                    f"target file {table}.{key}", where=path, expected="a positive integer", found=repr(value)
                )
    return Target(name=name, **values)


def tvm_target(target: Target) -> Any:
    """The `tvm.target.Target` of a target; `native` becomes this machine's CPU and triple."""
    import tvm

    options = dict(target.tvm)
    if options.get("mcpu") == "native":
        options["mcpu"] = tvm.target.codegen.llvm_get_system_cpu()
        options.setdefault("mtriple", tvm.target.codegen.llvm_get_system_triple())
    try:
        return tvm.target.Target(options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TargetError(
            "TVM refuses the target", where=target.name, found=str(error).strip().splitlines()[-1]
        ) from error


# Of LLVM's features, those that are instructions: the rest tunes code and says nothing about what can run.
_INSTRUCTIONS = re.compile(
    r"(sse|ssse|avx|amx|fma|f16c|bmi|popcnt|lzcnt|movbe|aes|vaes|pclmul|vpclmul|gfni|adx|sha|cmov|mmx"
    r"|neon|fp-armv8|dotprod|i8mm|fullfp16|bf16|sve|sme|lse|crc|rdm|rcpc|jsconv|complxnum)[a-z0-9._-]*"
)


def instruction_sets(target: Any) -> set[str]:
    """The instruction sets, by LLVM's names, that code for a `tvm.target.Target` of kind llvm may use."""
    import tvm

    features = {str(feature) for feature in tvm.target.codegen.llvm_get_cpu_features(target)}
    return {feature for feature in features if _INSTRUCTIONS.fullmatch(feature)}


def host_instruction_sets() -> set[str]:
    """The instruction sets of this machine's CPU."""
    import tvm

    return instruction_sets(tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()}))
