"""Processor instructions for numba kernels: vector instructions over columns, and prefetches.

The vector instructions are for loops over a row's columns that the compiler would not vectorize, or
only with a check of the length at every row. Arrays are indexed as if they were flat: row * columns
+ column.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FLOAT = ir.FloatType()
_EIGHT = ir.VectorType(_FLOAT, 8)
COLUMNS = 16  # float32 values that one `copy`, `add` or `descend` takes


def _at(context: Any, builder: Any, kind: Any, array: Any, place: Any, width: int) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), ir.PointerType(ir.VectorType(_FLOAT, width)))


@intrinsic
def copy(typing_context: Any, source: Any, place: Any, target: Any, to: Any) -> Any:
    """Copy COLUMNS values between contiguous float32 arrays.

    Args:
        place: the flat index of the first value in source.
        to: the flat index of the first value in target.
    """
    signature = types.void(source, types.int64, target, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_at(context, builder, signature.args[0], arguments[0], arguments[1], COLUMNS), align=4)
        builder.store(value, _at(context, builder, signature.args[2], arguments[2], arguments[3], COLUMNS), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add(typing_context: Any, source: Any, place: Any, target: Any, to: Any) -> Any:
    """Add COLUMNS values of a contiguous float32 array to those of another one.

    Args:
        place: the flat index of the first value in source.
        to: the flat index of the first value in target.
    """
    signature = types.void(source, types.int64, target, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_at(context, builder, signature.args[0], arguments[0], arguments[1], COLUMNS), align=4)
        target = _at(context, builder, signature.args[2], arguments[2], arguments[3], COLUMNS)
        builder.store(builder.fadd(builder.load(target, align=4), value), target, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def descend(typing_context: Any, gradient: Any, place: Any, rate: Any, root: Any, weights: Any, to: Any) -> Any:
    """Compute weights = weights - (rate * gradient) / root for COLUMNS values.

    Args:
        gradient: contiguous float32.
        place: the flat index of the first value in gradient.
        rate: float32.
        root: float32.
        weights: contiguous float32, updated.
        to: the flat index of the first value in weights.
    """
    signature = types.void(gradient, types.int64, types.float32, types.float32, weights, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def spread(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), COLUMNS), [0] * COLUMNS)
            return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), everywhere)

        kind = ir.VectorType(_FLOAT, COLUMNS)
        g = builder.load(_at(context, builder, signature.args[0], arguments[0], arguments[1], COLUMNS), align=4)
        change = builder.fdiv(builder.fmul(spread(arguments[2]), g), spread(arguments[3]))
        target = _at(context, builder, signature.args[4], arguments[4], arguments[5], COLUMNS)
        builder.store(builder.fsub(builder.load(target, align=4), change), target, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def eight_sums_of_squares(typing_context: Any, array: Any, place: Any, blocks: Any) -> Any:
    """Return the sum of squares of a part of an array, in a fixed order of additions.

    Eight sums p[j] of x[j]^2, x[j+8]^2, ... are built in order, starting from 0. They are added up
    as ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7)).

    Args:
        array: contiguous float32.
        place: the flat index of x[0].
        blocks: x has 8 * blocks values.

    Returns:
        float32.
    """
    signature = types.float32(array, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        sums = cgutils.alloca_once_value(builder, ir.Constant(_EIGHT, [0.0] * 8))
        with cgutils.for_range(builder, arguments[2]) as loop:
            offset = builder.add(arguments[1], builder.mul(loop.index, ir.Constant(ir.IntType(64), 8)))
            x = builder.load(builder.bitcast(builder.gep(data, [offset]), ir.PointerType(_EIGHT)), align=4)
            builder.store(builder.fadd(builder.load(sums), builder.fmul(x, x)), sums)
        p = builder.load(sums)
        for width in (4, 2, 1):
            lanes = ir.VectorType(ir.IntType(32), width)
            low, high = (ir.Constant(lanes, list(range(start, start + width))) for start in (0, width))
            nothing = ir.Constant(p.type, ir.Undefined)
            p = builder.fadd(builder.shuffle_vector(p, nothing, low), builder.shuffle_vector(p, nothing, high))
        return builder.extract_element(p, ir.Constant(ir.IntType(32), 0))

    return signature, generate


@intrinsic
def prefetch(typing_context: Any, array: Any, place: Any) -> Any:
    """Prefetch the cache line of element `place` of a contiguous array, counted flat.

    Any place is harmless.
    """
    signature = types.void(array, place)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = context.cast(builder, arguments[1], signature.args[1], types.intp)
        byte = ir.PointerType(ir.IntType(8))
        address = builder.bitcast(builder.gep(data, [place]), byte)
        int32 = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        )
        # Prefetch data, for reading, into all cache levels.
        builder.call(function, [address, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return signature, generate
