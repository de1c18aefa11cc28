"""What TensorIR may have and models rarely do: right numbers, or a refusal that names the kernel and the construct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as I

from mlcpipe.compiler.backends.spirv.kernel import compile_kernel
from mlcpipe.errors import CompileError
from tests.spirv import harness
from tests.spirv.harness import Array
from tir_schedules.builder import Tensor, function, put
from tir_schedules.gpu.kernel import keep, launch, local

N = 64
Body = Callable[..., None]
_FACTOR = 1_518_500_250
_X = np.random.default_rng(1).integers(-90, 90, N).astype(np.int32)


def _jumps(x: Any, y: Any) -> None:
    """Loops in loops, each left and continued, and an invocation that ends early."""
    with launch(N, 1) as (_bx, _, tx):
        total = local(1, "int32")
        put(total, 0, 0)
        with I.serial(0, 9) as i:
            with I.If(i == 7), I.Then():
                I.evaluate(tirx.break_loop())
            with I.serial(0, x[tx] % 11) as j:
                with I.If(j == i), I.Then():
                    I.evaluate(tirx.continue_loop())
                with I.If(j * i > 20), I.Then():
                    with I.While(total[0] % 5 != 0):
                        put(total, 0, total[0] + 1)
                        with I.If(total[0] % 3 == 0), I.Then():
                            I.evaluate(tirx.break_loop())
                    I.evaluate(tirx.break_loop())
                put(total, 0, total[0] + j)
        put(y, tx, total[0])
        with I.If(total[0] > 40), I.Then():
            I.evaluate(tirx.call_intrin("void", "tirx.thread_return"))
        put(y, tx, 0 - total[0])


def _jumps_reference(x: Array) -> Array:
    def one(limit: int) -> int:
        total = 0
        for i in range(7):
            for j in range(limit % 11):
                if j == i:
                    continue
                if j * i > 20:
                    while total % 5:
                        total += 1
                        if total % 3 == 0:
                            break
                    break
                total += j
        return total if total > 40 else -total

    return np.array([one(int(v)) for v in x], np.int32)


def _offsets(x: Any, y: Any) -> None:
    """Views that begin inside a buffer."""
    with launch(N // 2, 1) as (_bx, _, tx):
        source = I.decl_buffer((N // 2,), "int32", data=x.data, elem_offset=N // 2)
        to = I.decl_buffer((N // 2,), "int32", data=y.data, elem_offset=N // 2)
        put(to, tx, source[tx] + 1)
        put(y, tx, x[tx] - 1)


def _strides(x: Any, y: Any) -> None:
    """y[3 i] = x[63 - i] in vectors of 4, a vector of indices either way."""
    with launch(4, 1) as (_bx, _, tx):
        to = tirx.Ramp(tx * 12, 3, 4)
        I.buffer_store(y, x[tirx.Ramp(N - 1 - tx * 4, -1, 4)], [to])


def _strides_reference(x: Array) -> Array:
    y = np.zeros(N, np.int32)
    y[: 16 * 3 : 3] = x[::-1][:16]
    return y


def _truths(x: Any, y: Any) -> None:
    """Vectors of bool through memory of the invocation."""
    with launch(N // 8, 1) as (_bx, _, tx):
        kept = local(8, "bool")
        run, eight = tirx.Ramp(tx * 8, 1, 8), tirx.Ramp(0, 1, 8)
        I.buffer_store(kept, x[run] > tirx.Broadcast(tirx.const(3, "int32"), 8), [eight])
        I.buffer_store(y, tirx.Not(kept[eight]), [run])


def _fixed_point(x: Any, y: Any) -> None:
    """TVM multiplies in int64 and shifts back."""
    with launch(N, 1) as (_bx, _, tx):
        factor, bits, shift = (tirx.const(value, "int32") for value in (_FACTOR, 31, 3))
        put(y, tx, tirx.q_multiply_shift(x[tx] * 1_000_000, factor, bits, shift))


def _named_product(x: Any, y: Any) -> None:
    """A name for what seems an index and is a number beyond 32 bits."""
    with launch(N, 1) as (_bx, _, tx):
        product = keep(I.cast(x[tx], "int64") * I.cast(x[tx], "int64") * I.int64(1 << 20))
        put(y, tx, I.cast(product // I.int64(1 << 22), "int32") + I.cast(product > I.int64(1 << 31), "int32"))


def _cut_unsigned(x: Any, y: Any) -> None:
    """TVM takes an int32 made of a uint32 for positive."""
    with launch(N, 1) as (_bx, _, tx):
        put(y, tx, tirx.truncdiv(I.cast(I.reinterpret("uint32", x[tx]), "int32"), 8))


# Name -> (body, output from _X)
KERNELS: dict[str, tuple[Body, Array]] = {
    "jumps": (_jumps, _jumps_reference(_X)),
    "offsets": (_offsets, np.concatenate([_X[: N // 2] - 1, _X[N // 2 :] + 1])),
    "strides": (_strides, _strides_reference(_X)),
    "vectors of bool": (_truths, _X <= 3),
    "fixed point": (_fixed_point, ((_X.astype(np.int64) * 8_000_000 * _FACTOR + (1 << 30)) >> 31).astype(np.int32)),
    "a named product": (
        _named_product,
        (_X.astype(np.int64) ** 2 // 4 + (_X.astype(np.int64) ** 2 << 20 > 1 << 31)).astype(np.int32),
    ),
    "cut unsigned": (_cut_unsigned, np.fix(_X / 8).astype(np.int32)),
}


def _kernel(body: Body, output: Array) -> tirx.PrimFunc:
    return function("main", {"x": Tensor((N,), "int32"), "y": Tensor((N,), str(output.dtype))}, body)


@pytest.mark.parametrize("name", KERNELS)
def test_numbers(name: str, device: None) -> None:
    body, expected = KERNELS[name]
    (found,) = harness.run(_kernel(body, expected), [_X, np.zeros_like(expected)], [1])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_floats_that_devices_lack_are_stored_as_integers(dtype: str, device: None) -> None:
    """TVM makes 16- and 8-bit integers of them; a product of 1.5 in float32, rounded back."""
    kinds = pytest.importorskip("ml_dtypes", reason="numpy has no such dtypes without ml_dtypes")

    def body(x: Any, y: Any) -> None:
        with launch(16, 1) as (_bx, _, tx):
            put(y, tx, I.cast(I.cast(x[tx], "float32") * I.float32(1.5), dtype))

    x = (np.arange(16) + 1).astype(getattr(kinds, dtype))
    func = function("main", {"x": Tensor((16,), dtype), "y": Tensor((16,), dtype)}, body)
    (found,) = harness.run(func, [x, np.zeros_like(x)], [1])
    np.testing.assert_array_equal(found, (x.astype(np.float32) * np.float32(1.5)).astype(x.dtype))


# What is refused

_HANDLE = {"x": Tensor((N,), "float32"), "y": Tensor((N,), "float32")}


def _refusal(body: Body) -> str:
    with pytest.raises(CompileError) as found:
        harness.kernels(function("main", _HANDLE, body))
    text = str(found.value)
    assert text.startswith("kernel cannot be written as SPIR-V in main_kernel; found ")
    assert text.endswith("; write its schedule without it") and "\n" not in text
    return text


def _atomic(x: Any, y: Any) -> None:
    with launch(N, 1) as (_bx, _, tx):
        I.evaluate(tirx.call_intrin("float32", "tirx.atomic_add", tirx.address_of(y[0]), x[tx]))


def _pointer(x: Any, y: Any) -> None:
    with launch(4, 1) as (_bx, _, tx):
        moved = tirx.call_intrin("handle", "tirx.handle_add_byte_offset", x.data, 16)
        put(y, tx, I.decl_buffer((8,), "float32", data=moved)[tx])


def _named_pointer(x: Any, y: Any) -> None:
    with launch(4, 1) as (_bx, _, tx):
        put(y, tx, I.decl_buffer((8,), "float32", data=keep(x.data))[tx])


def _int4(x: Any, y: Any) -> None:
    with launch(4, 1) as (_bx, _, tx):
        codes = I.alloc_buffer((8,), "int4", scope="local")
        put(codes, 0, 1)
        put(y, tx, I.cast(codes[0], "float32"))


def _texture(x: Any, y: Any) -> None:
    with launch(4, 1) as (_bx, _, tx):
        put(y, tx, tirx.call_intrin("float32", "tirx.tvm_struct_get", x.data, 0, 1))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_atomic, "call of atomic_add"),
        (_pointer, "memory at tirx.handle_add_byte_offset: pointers have no arithmetic"),
        (_named_pointer, 'a value of type T.handle("float32", "global")'),
        (_int4, "dtype int4"),
        (_texture, "call of tvm_struct_get"),
    ],
    ids=["atomics", "pointers", "named pointers", "int4", "structures"],
)
def test_refusals(body: Body, words: str) -> None:
    assert f"; found {words}; " in _refusal(body)


def _bare(statements: Callable[[Any], None]) -> tirx.PrimFunc:
    """A device function that TVM's passes have not seen, as a later TVM might leave one."""
    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name("main")
        statements(I.match_buffer(I.arg("y", I.handle()), (N,), "int32"))
    return builder.get().with_attr("tirx.kernel_launch_params", [])


def test_a_break_outside_of_loops_is_refused() -> None:
    def statements(y: Any) -> None:
        with launch(4, 1):
            I.evaluate(tirx.break_loop())

    with pytest.raises(CompileError, match="in a_name; found a break or continue outside of loops"):
        compile_kernel(_bare(statements), "a_name")


def test_a_launch_parameter_of_two_sizes_is_refused() -> None:
    def statements(y: Any) -> None:
        with I.launch_thread("threadIdx.x", 4) as tx:
            put(y, tx, 1)
        with I.launch_thread("threadIdx.x", 8) as tx:
            put(y, tx, 2)

    with pytest.raises(CompileError, match="in a_name; found threadIdx.x of two sizes, 4 and 8"):
        compile_kernel(_bare(statements), "a_name")


def test_a_parallel_loop_is_refused() -> None:
    def statements(y: Any) -> None:
        with launch(4, 1) as (_bx, _, tx), I.parallel(0, 4) as i:
            put(y, tx * 4 + i, 1)

    with pytest.raises(CompileError, match="in a_name; found loop of kind parallel"):
        compile_kernel(_bare(statements), "a_name")
