"""Conversions between dtypes, with TensorIR's semantics."""

from __future__ import annotations

from mlcpipe.compiler.backends.spirv.emitter import Emitter, Value
from mlcpipe.compiler.backends.spirv.opcodes import Op
from mlcpipe.compiler.backends.spirv.types import DType, Unsupported, chunks


def cast(emitter: Emitter, value: Value, to: DType) -> Value:
    """The number in another dtype. A signed source is sign-extended; a narrower integer keeps the low bits."""
    have = value.dtype
    to = to.vector(have.lanes)
    if have == to:
        return value
    if to.kind == "bool":
        wide = _widened(emitter, value)
        op = Op.FUnordNotEqual if have.kind == "float" else Op.INotEqual
        return emitter.each(op, to, wide, emitter.constant(wide.dtype, 0))
    if have.kind == "bool":
        middle = DType(to.kind, max(to.bits, 32), to.lanes)
        number = emitter.select(value, emitter.constant(middle, 1), emitter.constant(middle, 0))
        return cast(emitter, number, to)
    if have.kind == "float":
        return _from_float(emitter, value, to)
    if to.kind == "float":
        wide = _widened(emitter, value)
        narrow = to.bits < 32
        target = DType("float", 32, to.lanes) if narrow else to
        number = emitter.each(Op.ConvertSToF if have.kind == "int" else Op.ConvertUToF, target, wide)
        return cast(emitter, number, to)
    if have.bits != to.bits:
        value = resized(emitter, value, to.bits)
    return value if value.dtype == to else emitter.each(Op.Bitcast, to, value)


def resized(emitter: Emitter, value: Value, bits: int) -> Value:
    """An integer of the same signedness with another width."""
    if value.dtype.bits == bits:
        return value
    op = Op.SConvert if value.dtype.kind == "int" else Op.UConvert
    return emitter.each(op, DType(value.dtype.kind, bits, value.dtype.lanes), value, computed=False)


def _widened(emitter: Emitter, value: Value) -> Value:
    """The number in at least 32 bits: a device may store narrower ones without being able to compute with them."""
    if value.dtype.bits >= 32:
        return value
    if value.dtype.kind == "float":
        return emitter.each(Op.FConvert, DType("float", 32, value.dtype.lanes), value, computed=False)
    return resized(emitter, value, 32)


def _from_float(emitter: Emitter, value: Value, to: DType) -> Value:
    if to.kind == "float":
        return emitter.each(Op.FConvert, to, value, computed=False)
    wide = _widened(emitter, value)
    middle = DType(to.kind, max(to.bits, 32), to.lanes)
    return cast(emitter, emitter.each(Op.ConvertFToS if to.kind == "int" else Op.ConvertFToU, middle, wide), to)


def reinterpret(emitter: Emitter, value: Value, to: DType) -> Value:
    """The same bits in another dtype; lanes may differ, as in int8x4 to uint32."""
    have = value.dtype
    if have == to:
        return value
    if have.bits * have.lanes != to.bits * to.lanes or "bool" in (have.kind, to.kind):
        raise Unsupported(f"reinterpret of {have} as {to}")
    if have.bits == to.bits:
        return emitter.each(Op.Bitcast, to, value)
    if len(value.parts) == len(chunks(to.lanes)) == 1:
        emitter.types.id(have)
        return Value(to, (emitter.pure(Op.Bitcast, emitter.types.id(to), value.id),))
    lanes = emitter.lanes(value)
    if have.bits > to.bits:  # each lane becomes several
        dtype = DType(to.kind, to.bits, have.bits // to.bits)
        pieces = [reinterpret(emitter, Value(have.scalar, (lane,)), dtype) for lane in lanes]
        return emitter.from_lanes(to, [lane for piece in pieces for lane in emitter.lanes(piece)])
    count = to.bits // have.bits
    groups = [emitter.from_lanes(have.vector(count), lanes[i : i + count]) for i in range(0, len(lanes), count)]
    return emitter.from_lanes(to, [reinterpret(emitter, group, to.scalar).id for group in groups])
