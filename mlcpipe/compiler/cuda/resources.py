"""What compiled kernels take of a multiprocessor: registers, memory that registers were spilled to, shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The assembler's remarks (ptxas -v), a group of lines a kernel. https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc
_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>[^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """Of a kernel on an architecture: registers of a thread, bytes of its stack and spills, shared bytes of a block."""

    kernel: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def parse_usage(log: str) -> tuple[Usage, ...]:
    """The kernels of a compiler's log with `--ptxas-options=-v`, by name. ValueError: a number is missing."""
    found = []
    begins = [*_ENTRY.finditer(log)]
    for match, end in zip(begins, [*(m.start() for m in begins[1:]), len(log)]):
        words = log[match.end() : end]
        stack, used, shared = _STACK.search(words), _USED.search(words), _SHARED.search(words)
        if stack is None or used is None:
            raise ValueError(f"no resource use of {match['name']}")
        found.append(
            Usage(
                kernel=match["name"],
                architecture=match["architecture"],
                registers=int(used[1]),
                stack_bytes=int(stack[1]),
                spill_bytes=int(stack[2]) + int(stack[3]),
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return tuple(sorted(found, key=lambda usage: usage.kernel))
