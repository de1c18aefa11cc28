"""Tunable kernels: stable hashes, readable names, and scheduling with chosen knobs."""

from __future__ import annotations

import hashlib
import importlib
import json
from typing import Any

from tvm import tirx

from mlcpipe.targets import Target
from tir_schedules.op import Op, op_of
from tir_schedules.paged import ATTENTION
from tir_schedules.rule import Declined, Knobs, Rules, rules_in
from tir_schedules.space import Space
from tir_schedules.step import ATTEND


def kernel_hash(func: tirx.PrimFunc, op: Op) -> str:
    """16 hex digits that identify a tagged function by its operation, facts, shapes and dtypes.

    SHA-256 of JSON: the same in every process and TVM version. Variable names and the body do not count.
    """
    described = [op.kind, dict(op.facts), [[list(map(_dimension, shape)), dtype] for shape, dtype in parameters(func)]]
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parameters(func: tirx.PrimFunc) -> list[tuple[tuple[Any, ...], str]]:
    """Shape and dtype of each parameter; scalars have the shape ()."""
    return [(tuple(getattr(param.ty, "shape", ())), str(param.ty.dtype)) for param in func.params]


def _dimension(size: Any) -> int | None:
    return int(size) if isinstance(size, (int, tirx.IntImm)) else None


def kernel_name(op: Op) -> str:
    """A readable name: operation and sizes, such as "matmul 2048x8192 int4"."""
    facts = op.facts
    if op.kind in (*ATTENTION, *ATTEND):
        size = "{num_heads}x{head_dim} on {num_kv_heads} {dtype}".format(**facts)
        return f"attention {op.kind.removeprefix('kv_cache_')} {size}"
    size = f" {facts['n']}x{facts['k']}" if "n" in facts and "k" in facts else ""
    size += "".join(f" {facts[name]}" for name in ("size", "vocab") if name in facts)
    width = f" int{facts['bits']}" if facts.get("bits") else f" {facts['dtype']}" if "dtype" in facts else ""
    more = "".join(f" {facts[name]}" for name in ("activation", "rows") if name in facts)
    return f"{op.kind}{size}{width}{more}"


def rules_of(target: Target) -> Rules:
    """The rules of a target's kernels, in the order in which they are tried."""
    return rules_in(target.kernels)


def spaces_of(target: Target, rule: str, op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """The design spaces of a rule for an operation."""
    spaces = importlib.import_module(f"tir_schedules.{target.kernels}.spaces").SPACES
    rule_spaces: tuple[Space, ...] = spaces[rule](op, knobs) if rule in spaces else ()
    return rule_spaces


def apply_rule(target: Target, rule: str, func: tirx.PrimFunc, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """The function scheduled by one rule, or why it declined."""
    rules = {one.name: one.rule for one in rules_of(target)}
    return rules[rule](func, op_of(func), knobs)
