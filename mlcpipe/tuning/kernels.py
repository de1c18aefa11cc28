"""Kernels that can be tuned: what they are called in every process, and what a choice of knobs makes of them."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

from tvm import tirx

from mlcpipe.targets import Knobs, Target
from tir_schedules.op import Declined, Op, op_of
from tir_schedules.paged import ATTENTION
from tir_schedules.space import Space


def kernel_hash(func: tirx.PrimFunc, op: Op) -> str:
    """16 hex digits of what a tagged function computes and on what: its operation, facts, shapes and dtypes.

    SHA-256 of JSON, so that it is the same in every process and with every version of TVM; names of variables and
    how the body is written do not count.
    """
    described = [op.kind, dict(op.facts), [[list(map(_dimension, shape)), dtype] for shape, dtype in parameters(func)]]
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parameters(func: tirx.PrimFunc) -> list[tuple[tuple[Any, ...], str]]:
    """Shape and dtype of everything that a function takes; numbers have the shape ()."""
    return [(tuple(getattr(param.ty, "shape", ())), str(param.ty.dtype)) for param in func.params]


def _dimension(size: Any) -> int | None:
    return int(size) if isinstance(size, (int, tirx.IntImm)) else None


def kernel_name(op: Op) -> str:
    """What a kernel is, for people: operation and sizes, such as "matmul 2048x8192 int4"."""
    facts = op.facts
    if op.kind in ATTENTION:
        size = "{num_heads}x{head_dim} on {num_kv_heads} {dtype}".format(**facts)
        return f"attention {op.kind.removeprefix('kv_cache_')} {size}"
    size = f" {facts['n']}x{facts['k']}" if "n" in facts and "k" in facts else ""
    size += "".join(f" {facts[name]}" for name in ("size", "vocab") if name in facts)
    width = f" int{facts['bits']}" if facts.get("bits") else f" {facts['dtype']}" if "dtype" in facts else ""
    more = "".join(f" {facts[name]}" for name in ("activation",) if name in facts)
    return f"{op.kind}{size}{width}{more}"


def rules_of(target: Target) -> Any:
    """The rules of a target's kernels, in their order: name, operations, rule."""
    return importlib.import_module(f"tir_schedules.{target.kernels}.rules").RULES


def spaces_of(target: Target, rule: str, op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """What a rule can choose for an operation."""
    spaces = importlib.import_module(f"tir_schedules.{target.kernels}.spaces").SPACES
    found: tuple[Space, ...] = spaces[rule](op, knobs) if rule in spaces else ()
    return found


def ruled(target: Target, rule: str, func: tirx.PrimFunc, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """What one rule makes of a function."""
    found: Mapping[str, Any] = {name: make for name, _, make in rules_of(target)}
    made: tirx.PrimFunc | Declined = found[rule](func, op_of(func), knobs)
    return made
