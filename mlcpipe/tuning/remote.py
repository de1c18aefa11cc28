"""Measures CPU kernels on a board with nothing but Linux and ssh: neither Python nor TVM nor mlcpipe.

For each candidate a static program is linked here, of the default, the candidate, their arguments and
`mlcpipe/native/timing.c`. It is sent to the board over ssh, compares the outputs there, times both in turn, prints the
numbers and is removed. So a board needs nothing installed, and at worst it can return wrong times to this machine. In
contrast, a server of TVM's RPC can run any program on its client.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tvm_ffi
from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, ValidationError
from tvm import tirx

from mlcpipe.compiler.backends.cpu import kernel_module
from mlcpipe.compiler.link import POOL, find_linux_linker
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.host.cpu_features import architecture_of
from mlcpipe.support.json_files import OnlyKnown
from mlcpipe.support.resources import native_path
from mlcpipe.targets import Target, Variant, triple
from mlcpipe.tuning import ssh
from mlcpipe.tuning.inputs import Inputs, Value
from mlcpipe.tuning.measure import COLD_CACHES, HALF_S, UNKNOWN_CACHE, check_outputs, scheduled

_MAX_COPIES, _MAX_BYTES = 256, COLD_CACHES * UNKNOWN_CACHE
_MAX_SENT_BYTES = (1 << 20) + 64  # of a tensor, which repeats them; not a power of two, unlike row lengths
# Leaves no files behind, even if the connection ends early: then `p` is stopped by its own alarm.
_RUN = (
    'd=$(mktemp -d) && trap "rm -rf \\"$d\\"" EXIT && trap "exit 1" HUP INT TERM && '
    'cat >"$d/p" && chmod 700 "$d/p" && "$d/p"'
)
_RUN_S, _SEND_S = 190, 30.0
_DLPACK_CODES = {"i": 0, "u": 1, "f": 2}

_Seconds = Annotated[float, Field(gt=0, le=_RUN_S, allow_inf_nan=False)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Answer(OnlyKnown, BaseModel):
    """The program's output: the largest difference and number of each output; seconds of each pair."""

    model_config = ConfigDict(strict=True, extra="forbid")

    apart: Annotated[list[Annotated[tuple[_Number, _Number], Strict(False)]], FailFast()]  # JSON has no tuples
    pairs: Annotated[list[Annotated[tuple[_Seconds, _Seconds], Strict(False)]], FailFast()]


class Bench:
    """One row range of one kernel on a board, like `measure.Bench`."""

    def __init__(
        self, host: str, target: Target, variant: Variant, rule: str, func: tirx.PrimFunc, inputs: Inputs
    ) -> None:
        self._host, self._target, self._variant, self._rule, self._func = host, target, variant, rule, func
        self._inputs, self.nbytes = inputs, inputs.nbytes
        arch = architecture_of(triple(target))
        linker = find_linux_linker(arch)
        if linker is None:
            gcc = f"{arch.replace('_', '-')}-linux-gnu-gcc"
            raise CompileError(f"no linker for Linux on {arch}", expected=f"{gcc}, or ziglang",
                               next_step="pip install 'mlcpipe[zig]'")  # fmt: skip
        self._linker = linker
        for output in (inputs.values[i] for i in inputs.outputs):
            if not isinstance(output, np.ndarray) or output.dtype != np.float32:
                raise TargetError("a board compares only float32 outputs", where=target.name)

    def pairs(self, choice: Mapping[str, int], count: int) -> list[tuple[float, float]]:
        """As `measure.Bench.pairs`. Raises TargetError for any other answer of the board."""
        with tempfile.TemporaryDirectory(prefix="mlcpipe-tune-") as folder:
            program = self._program(choice, count, Path(folder))
            text = ssh.run(self._host, _RUN, _RUN_S + _SEND_S, program)
        answer = parse(text, self._host, len(self._inputs.outputs), count)
        check_outputs(answer.apart)
        return answer.pairs

    def close(self) -> None:
        """Nothing to close: the board keeps no files."""

    def _program(self, choice: Mapping[str, int], count: int, folder: Path) -> Path:
        knobs = {"kernel_default": {}, "kernel_candidate": choice}
        schedule = self._variant.schedule
        kernels = {n: scheduled(self._target, self._rule, self._func, {**schedule, **k}) for n, k in knobs.items()}
        program, objects = folder / "program", folder / "kernels.o"
        kernel_module(self._target, self._variant, kernels).write_to_file(str(objects), "o")
        table, content = arguments_of(self._inputs, count)
        (folder / "arguments.h").write_text(table, encoding="utf-8")
        sources = [native_path() / "timing.c", POOL, objects]
        self._linker.program(sources, [folder, *tvm_ffi.libinfo.include_paths()], program)
        with program.open("ab") as file:
            file.write(content)
        return program


def parse(text: str, host: str, outputs: int, count: int) -> Answer:
    """The last line of a board's output. Raises TargetError unless it has all requested numbers."""
    try:
        answer = Answer.model_validate_json(text.rstrip().rpartition("\n")[2])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TargetError("the board answers no times", where=host, found=first["msg"][:200]) from None
    if (len(answer.apart), len(answer.pairs)) != (outputs, count):
        raise TargetError("the board answers other times", where=host, expected=f"{count} pairs, {outputs} outputs",
                          found=f"{len(answer.pairs)} pairs, {len(answer.apart)} outputs")  # fmt: skip
    return answer


def arguments_of(inputs: Inputs, pairs: int) -> tuple[str, bytes]:
    """`arguments.h` of `timing.c`, and the bytes that follow the program."""
    contents: list[bytes] = []
    rows = [_argument(value, i in inputs.outputs, contents) for i, value in enumerate(inputs.values)]
    content = b"".join(contents)
    copies = max(1, min(_MAX_BYTES // max(inputs.nbytes, 1), _MAX_COPIES)) if inputs.cold else 1
    numbers: dict[str, int] = {
        "ARGUMENTS": len(rows), "COPIES": copies, "PAIRS": pairs, "HALF_NS": round(HALF_S * 1e9), "LIMIT_S": _RUN_S,
        "CONTENT_BYTES": len(content),
    }  # fmt: skip
    named = ", ".join(f"{name} = {number}" for name, number in numbers.items())
    return f"enum {{ {named} }};\nstatic Argument arguments[ARGUMENTS] = {{\n{''.join(rows)}}};\n", content


def _argument(value: Value, output: bool, contents: list[bytes]) -> str:
    """A row of the table; the beginning of its tensor is added to `contents`."""
    if isinstance(value, int):
        return f"  {{.value = {{.type_index = kTVMFFIInt, .v_int64 = {value}}}}},\n"
    if isinstance(value, float):
        return f"  {{.value = {{.type_index = kTVMFFIFloat, .v_float64 = {value!r}}}}},\n"
    contents.append(value.tobytes()[:_MAX_SENT_BYTES])
    fields: dict[str, Any] = {
        "value": "{.type_index = kTVMFFIDLTensorPtr}",
        "dtype": f"{{{_DLPACK_CODES[value.dtype.kind]}, {8 * value.dtype.itemsize}, 1}}",
        "ndim": value.ndim, "shape": f"{{{', '.join(map(str, value.shape))}}}", "nbytes": value.nbytes,
        "period": len(contents[-1]), "output": int(output),
    }  # fmt: skip
    return f"  {{{', '.join(f'.{name} = {text}' for name, text in fields.items())}}},\n"
