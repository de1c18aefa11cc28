"""Kernels of `tir_schedules/gpu` for Metal, one by one on the emulated device, against numpy.

`python -m tests.metal.schedule_cases RUNTIME FOLDER` runs them all in a process of its own, which the device stays in, and
writes FOLDER/errors.json, a case's last words by its name, "" where there are none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from mlcpipe.compiler import metal
from mlcpipe.compiler.library import own_barriers
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from tests.cuda import test_kernels
from tests.vulkan import schedule_cases, test_matrices, test_sampling
from tests.vulkan.schedule_cases import Array, Product
from tir_schedules.gpu.attention import OF_SUBGROUPS, kv_cache_functions, of_subgroups
from tir_schedules.gpu.kv_pages import AttentionShape
from tir_schedules.gpu.sampling import sampling_functions
from tir_schedules.op import Declined, op_of

from . import emulation


@dataclass(frozen=True)
class Metal:
    """What the target tells the schedules."""

    lanes: int = 32
    shuffled: bool = False

    @property
    def knobs(self) -> Mapping[str, int | str]:
        return load_target("metal").schedule


def _scheduled(shape: AttentionShape, role: str) -> tirx.PrimFunc:
    """A function of the cache as the target's rules make it."""
    func = kv_cache_functions(shape, 1)[role]
    op = op_of(func)
    assert op is not None
    found = of_subgroups(op, load_target("metal").schedule) if op.kind in OF_SUBGROUPS else func
    assert not isinstance(found, Declined), found.reason
    return found


ATTENTION = {**test_kernels.DECODE, **test_kernels.PREFILL}


def _attention(name: str) -> None:
    case = ATTENTION[name]
    func, arguments = case.call
    case.check(_run(func, *arguments))


TARGET = test_matrices.Product(32, 8, 8, 8, 4, 4, 4, buffers=1)
OTHER = test_matrices.Product(32, 8, 8, 8, 2, 2, 4)  # 64 threads, two SIMD groups side by side
CASES: dict[str, Callable[[], None]] = {
    **{name: lambda check=check: check(Metal()) for name, check in schedule_cases.CASES.items()},
    "int8 in float16": lambda: Product("q8f16_1", 160, 128, "float16").check(Metal()),
    **{f"matrices {'-'.join(map(str, case))}": lambda case=case: TARGET.check(*case) for case in test_matrices.CASES},
    "matrices of another shape": lambda: OTHER.check("q4f16_1", 160, 96, False),
    "matrices of another shape, gated": lambda: OTHER.check("q8f16_1", 128, 64, True),
    **{f"attention: {name}": lambda name=name: _attention(name) for name in ATTENTION},
    "draws": lambda: test_sampling.test_the_draw_inverts_the_distribution_function(5003),
    "draws of few": lambda: test_sampling.test_the_draw_inverts_the_distribution_function(16),
    "draws of a large vocabulary": test_sampling.test_a_large_vocabulary,
    "survivors at the edge": test_sampling.test_survivors_are_exact_at_the_edge,
    "equal weights": test_sampling.test_equal_weights_go_by_id,
    "rows with settings of their own": test_sampling.test_rows_have_their_own_settings,
    "greedy": lambda: test_sampling.test_greedy_takes_the_first_of_the_largest(5003),
    "no numbers": test_sampling.test_logits_that_are_no_numbers_give_a_token,
    "penalties and bias": test_sampling.test_penalties_and_bias,
}


def _compiled(functions: Mapping[str, tirx.PrimFunc]) -> Any:
    target = load_target("metal")
    device = {**tvm_target(target, compiled_variants(target)[0]).export(), "host": {"kind": "llvm"}}
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    with own_barriers():
        return tirx.build(tvm.IRModule(named), target=tvm.target.Target(device))


@cache
def _sampling(vocab: int) -> Any:
    made = sampling_functions(vocab)
    return _compiled({name: made[name] for name in ("sample", "apply_penalty_inplace", "apply_logit_bias_inplace")})


def _on_device(array: Array) -> Any:
    return tvm.runtime.tensor(array, tvm.device("metal", 0))


_kept: dict[int, tuple[tirx.PrimFunc, Any]] = {}


def _run(func: tirx.PrimFunc, *arguments: Array | float) -> list[Array]:
    _, module = _kept.setdefault(id(func), (func, None))
    if module is None:
        _kept[id(func)] = func, (module := _compiled({"main": func}))
    values = [a if isinstance(a, (int, float)) else _on_device(a) for a in arguments]
    module["main"](*values)
    return [value.numpy() for value in values if not isinstance(value, (int, float))]


def start(runtime: Path, folder: Path) -> None:
    """From now on the cases of other devices run on the emulated one, in this process."""
    emulation.start(runtime, folder)
    metal.register()
    schedule_cases.run = _run
    test_kernels.scheduled = _scheduled
    test_sampling.functions, test_sampling.on_gpu = _sampling, _on_device


def words(check: Callable[[], None]) -> str:
    """The error of a case, "" if there is none."""
    try:
        check()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip()[-500:] or type(error).__name__
    return ""


if __name__ == "__main__":
    start(Path(sys.argv[1]), Path(sys.argv[2]))
    errors = {name: words(check) for name, check in CASES.items()}
    Path(sys.argv[2], "errors.json").write_text(json.dumps(errors), encoding="utf-8")
