"""Lets NVIDIA GPUs since Hopper start a decode kernel while the previous one ends.

Its workgroups become resident as others exit, and wait for earlier launches before they access shared buffers: CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization". A decode step has hundreds of kernels of a few
microseconds each. Prefill kernels launch as usual: on an H200 prompts took a third longer with overlap.
"""

from __future__ import annotations

import re

import tvm
from tvm import tirx

from mlcpipe.passes.lowering import KernelModule

_HOPPER = 90
_TAGS = "tirx.kernel_launch_params"
_OVERLAPS = "tirx.use_programtic_dependent_launch"  # TVM's spelling
_OF_PROMPTS = re.compile(r"_many\d*_kernel")  # of functions that `mark_prompt_rows` named


def overlap_launches(state: KernelModule) -> KernelModule:
    """Only for targets all of whose GPUs support it: a target's architecture is its oldest one."""
    arch = re.fullmatch(r"sm_(\d+)\w?", str(state.tvm_target.attrs.get("arch", "")))
    if not arch or int(arch[1]) < _HOPPER:
        return state
    functions = {
        gv: func if _TAGS not in func.attrs or _OF_PROMPTS.search(gv.name_hint) else _overlapping(func)
        for gv, func in state.mod.functions.items()
    }
    return state.with_mod(tvm.IRModule(functions, attrs=state.mod.attrs))


def _overlapping(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    wait = tirx.Evaluate(tirx.call_extern("int32", "mlcpipe.wait_for_earlier"))
    body = tirx.SeqStmt([wait, kernel.body])
    return kernel.with_body(body).with_attr(_TAGS, [_OVERLAPS, *kernel.attrs[_TAGS]])
