"""The tuning tasks of a model: its kernels, the row ranges of each, and how often they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx

from mlcpipe.bundle import MANIFEST, read_manifest
from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.checkpoint import MAX_CONFIG_BYTES
from mlcpipe.compiler.export import (
    context_length,
    export,
    fitted_target,
    kept_formats,
    output_of,
    prefill_chunk,
    prepare_model,
)
from mlcpipe.devices.support.threads import use_threads
from mlcpipe.errors import CheckpointError, UsageError
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.recipe import MIXED, load_recipe
from mlcpipe.support.defaults import DEFAULT_QUANTIZATION, KEEP
from mlcpipe.support.json_files import read_json_object
from mlcpipe.targets import Target, Variant
from mlcpipe.tuned.kernels import kernel_hash, kernel_name, spaces_of
from mlcpipe.tuned.records import Record
from mlcpipe.weights.native_formats import keep, planned
from tir_schedules.op import Op, op_of
from tir_schedules.paged import ATTENTION
from tir_schedules.space import Space

_ROW_KINDS = ("cpu.int8_matmul", "cpu.matmul")
_ATTEND = "vm.builtin.attention_kv_cache_attention_with_fused_qkv"


@dataclass(frozen=True)
class Model:
    """The model properties that its kernels depend on. Kept weights have the formats of the checkpoint."""

    config: Mapping[str, Any]
    quantization: str
    kv_cache_dtype: str = "auto"
    context: int | None = None
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class Task:
    """One row range of one kernel.

    `uses`: calls of the kernel in the function with that many rows; a sampling kernel is called once.
    """

    kernel: str
    name: str
    rule: str
    func: tirx.PrimFunc
    space: Space
    uses: int

    @property
    def key(self) -> tuple[str, str, str]:
        """The task's key in records and logs."""
        return (self.kernel, self.rule, self.space.bucket)

    def is_of(self, record: Record) -> bool:
        return self.key == (record.kernel, record.rule, record.bucket)

    @property
    def facts(self) -> dict[str, int]:
        """The sizes of the kernel."""
        op = op_of(self.func)
        assert op is not None
        return {name: value for name, value in op.facts.items() if isinstance(value, int)}

    @property
    def work(self) -> int:
        """Approximate multiplications of all calls for a token or a prompt, to order tasks."""
        facts, rows = self.facts, self.space.rows
        if "head_dim" in facts:
            per_call = 2 * rows * (self.space.keys or rows) * facts["num_heads"] * facts["head_dim"]
        else:
            per_call = rows * facts.get("n", 1) * facts.get("k", 1) * facts.get("size", 1) * facts.get("vocab", 1)
        return per_call * self.uses


def model_of(path: Path, quantization: str | None) -> Model:
    """The model of a bundle, in its own quantization, or of a checkpoint folder or GGUF file, by default the usual one.

    Raises BundleError, CheckpointError or ConfigError.
    """
    if path.is_file():
        checkpoint = open_checkpoint(path)
        return Model(checkpoint.config, checkpoint.quantization(quantization), checkpoint=checkpoint)
    config = read_json_object(path / "config.json", limit=MAX_CONFIG_BYTES, error=CheckpointError)
    if not (path / MANIFEST).is_file():
        return Model(config, quantization or DEFAULT_QUANTIZATION)
    manifest = read_manifest(path, check_abi=False)
    short_names = {"float32": "f32", "float16": "f16"}
    kv = short_names.get(manifest.model.kv_dtype, manifest.model.kv_dtype)
    return Model(config, manifest.quantization, kv, manifest.model.context_length)


def lower(model: Model, target: Target) -> Lowering:
    """The model's unscheduled kernels, as in `compile`. Raises UsageError for bundles that lack information."""
    if model.quantization == KEEP and model.checkpoint is None:
        raise UsageError("kernels of kept weights are tuned from their GGUF file", next_step="give the file")
    if model.quantization.startswith(MIXED):
        raise UsageError(
            "kernels of a recipe are tuned from its checkpoint", next_step="give that, and the recipe as --quantization"
        )
    use_threads()
    recipe = load_recipe(model.quantization)
    target = fitted_target(model.config, target, model.kv_cache_dtype)
    module = prepare_model(model.config, target, recipe.scheme, model.kv_cache_dtype)
    context = context_length(module, target, model.context)
    state = export(module, target, recipe.scheme, prefill_chunk(module, target, context))
    formats = kept_formats(target)
    if model.checkpoint is not None and model.quantization == KEEP:
        weights = keep(state.weights, model.checkpoint, target, formats)
    else:
        weights = planned(state.weights, recipe, target, formats, output_of(module))
    state = replace(state, weights=weights)
    return pipeline.run(state, *pipeline.SHARED)


def tasks_of(state: Lowering, variant: Variant) -> list[Task]:
    """All tunable tasks, each kernel once."""
    scheduled = pipeline.run(replace(state, variant=variant), pipeline.SCHEDULE)
    calls = {gv.name_hint: _calls(func) for gv, func in state.mod.functions.items() if isinstance(func, relax.Function)}
    tasks: dict[tuple[str, str, str], Task] = {}
    for report in scheduled.kernels:
        func = state.mod[report.name]
        op = op_of(func)
        if op is None:
            continue
        for space in spaces_of(state.target, report.rule, op, variant.schedule):
            caller = calls.get(op.kind) or calls[_caller(report.rule, op, space)]
            uses = caller[_ATTEND if op.kind in ATTENTION else report.name]
            task = Task(kernel_hash(func, op), kernel_name(op), report.rule, func, space, uses)
            known = tasks.get(task.key)
            tasks[task.key] = task if known is None else replace(known, uses=known.uses + uses)
    return [task for task in tasks.values() if task.uses]


def _caller(rule: str, op: Op, space: Space) -> str:
    """The function that calls a kernel with a range's rows: on CPUs a matmul's few rows are decode rows."""
    few = rule in _ROW_KINDS and not op.many_rows
    return "decode" if few or space.rows == 1 else "prefill"


def _calls(func: relax.Function) -> Counter[str]:
    """How often a function calls each PrimFunc and each TVM function."""
    counts: Counter[str] = Counter()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call):
            called = (expr.op, *expr.args)
            counts.update(callee.name_hint for callee in called if isinstance(callee, tvm.ir.GlobalVar))
            counts.update(str(callee.global_symbol) for callee in called if isinstance(callee, relax.ExternFunc))

    relax.analysis.post_order_visit(func.body, visit)
    return counts
