"""Cooperative matrices: a subgroup shares them. `tir_schedules.gpu.device_calls.Matrix` numbers them.

SPV_KHR_cooperative_matrix (https://github.khronos.org/SPIRV-Registry/extensions/KHR/SPV_KHR_cooperative_matrix.html)
requires Vulkan's memory model (SPV_KHR_vulkan_memory_model). In that model an access is private unless its operands say
otherwise, and barriers must make memory available and visible. A matrix is a variable of the function; drivers keep it
in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcpipe.compiler.backends.spirv.emitter import Emitter
from mlcpipe.compiler.backends.spirv.memory import Memory
from mlcpipe.compiler.backends.spirv.module import Module, instruction
from mlcpipe.compiler.backends.spirv.opcodes import Capability, Layout, Op, Scope, Storage, Use
from mlcpipe.compiler.backends.spirv.types import FLOAT32, UINT32, DType, Unsupported

MATRIX = "mlcpipe.matrix_"  # prefix of the calls
_FACTS = 4  # integers that describe a matrix in a call: number, use, rows, columns
_DTYPES = {Use.MatrixA: DType("float", 16), Use.MatrixB: DType("float", 16), Use.Accumulator: FLOAT32}


def declare_matrices(module: Module) -> None:
    """Request matrices and their memory model. Comes before any code: loads and stores depend on the model."""
    module.capabilities |= {Capability.CooperativeMatrixKHR, Capability.VulkanMemoryModel}
    module.extensions |= {"SPV_KHR_cooperative_matrix", "SPV_KHR_vulkan_memory_model"}


class Matrices:
    """A kernel's matrices. `features`: the shapes of its products, as the Vulkan plugin names them."""

    def __init__(self, emitter: Emitter, memory: Memory) -> None:
        self._emitter = emitter
        self._memory = memory
        self._variables: dict[int, tuple[tuple[int, ...], int]] = {}  # number -> (use, rows and columns; variable)
        self._features: set[str] = set()

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(sorted(self._features))

    def call(self, name: str, numbers: Sequence[int], address: tuple[int, tuple[int, ...]] | None) -> None:
        """Emit a call. `numbers`: its integers; `address`: pointer and memory operands of a load or store."""
        emitter, facts, rest = self._emitter, tuple(numbers[:_FACTS]), numbers[_FACTS:]
        type_id, variable = self._type(facts), self._variable(facts)
        if name == "clear":
            zero = emitter.types.constant(_DTYPES[facts[1]], 0.0)
            emitter.emit(Op.Store, variable, emitter.module.constant(Op.ConstantComposite, type_id, zero))
        elif name == "multiply" and len(rest) == 2 * _FACTS:
            self._multiply(facts, tuple(rest[:_FACTS]), tuple(rest[_FACTS:]))
        elif name == "load" and address is not None and len(rest) == 2:
            layout = self._number(Layout.ColumnMajor if rest[1] else Layout.RowMajor)
            stride = self._number(rest[0])
            loaded = emitter.result(Op.CooperativeMatrixLoadKHR, type_id, address[0], layout, stride, *address[1])
            emitter.emit(Op.Store, variable, loaded)
        elif name == "store" and address is not None and len(rest) == 1:
            matrix, layout = emitter.result(Op.Load, type_id, variable), self._number(Layout.RowMajor)
            stride = self._number(rest[0])
            emitter.emit(Op.CooperativeMatrixStoreKHR, address[0], matrix, layout, stride, *address[1])
        else:
            raise Unsupported(f"call of {MATRIX}{name}")

    def _multiply(self, total: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> None:
        (_, _, rows, columns), depth = total, left[3]
        if left[1:] != (Use.MatrixA, rows, depth) or right[1:] != (Use.MatrixB, depth, columns):
            raise Unsupported(f"a product of matrices {left} and {right} in {total}")
        emitter, type_id, variable = self._emitter, self._type(total), self._variable(total)
        factors = [emitter.result(Op.Load, self._type(facts), self._variable(facts)) for facts in (left, right)]
        before = emitter.result(Op.Load, type_id, variable)
        emitter.emit(Op.Store, variable, emitter.result(Op.CooperativeMatrixMulAddKHR, type_id, *factors, before))
        self._features.add(f"cooperativeMatrix{rows}x{columns}x{depth}")

    def _type(self, facts: tuple[int, ...]) -> int:
        _, use, rows, columns = facts
        component, sizes = self._emitter.types.id(_DTYPES[use]), [self._number(x) for x in (rows, columns)]
        scope = self._number(Scope.Subgroup)
        return self._emitter.module.declare(Op.TypeCooperativeMatrixKHR, component, scope, *sizes, self._number(use))

    def _variable(self, facts: tuple[int, ...]) -> int:
        number, shape = facts[0], facts[1:]
        known = self._variables.get(number)
        if known is None:
            module = self._emitter.module
            variable = module.new_id()
            pointer = module.pointer(Storage.Function, self._type(facts))
            instruction(self._memory.local, Op.Variable, (pointer, variable, Storage.Function))
            module.name(variable, f"matrix{number}")
            known = self._variables[number] = shape, variable
        if known[0] != shape:
            raise Unsupported(f"matrix {number} as {shape} and as {known[0]}")
        return known[1]

    def _number(self, value: int) -> int:
        return self._emitter.types.constant(UINT32, value)
