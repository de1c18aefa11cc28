"""Resource use of compiled kernels: registers, spilled registers and shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Remarks of the assembler (ptxas -v), several lines per kernel: https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc
_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>[^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """A kernel's resources on an architecture: registers, stack and spill bytes per thread, shared bytes per block."""

    kernel: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def parse_usage(log: str) -> tuple[Usage, ...]:
    """Parse a compiler's log with `--ptxas-options=-v`; kernels are sorted by name. Raises ValueError."""
    usages = []
    begins = [*_ENTRY.finditer(log)]
    for match, end in zip(begins, [*(m.start() for m in begins[1:]), len(log)]):
        remarks = log[match.end() : end]
        stack, used, shared = _STACK.search(remarks), _USED.search(remarks), _SHARED.search(remarks)
        if stack is None or used is None:
            raise ValueError(f"no resource use of {match['name']}")
        usages.append(
            Usage(
                kernel=match["name"],
                architecture=match["architecture"],
                registers=int(used[1]),
                stack_bytes=int(stack[1]),
                spill_bytes=int(stack[2]) + int(stack[3]),
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return tuple(sorted(usages, key=lambda usage: usage.kernel))
