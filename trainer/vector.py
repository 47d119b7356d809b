"""Vector instructions inside numba kernels where its loops become none: sums whose order is given as eight running sums."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FLOAT = ir.FloatType()
_EIGHT = ir.VectorType(_FLOAT, 8)


@intrinsic
def eight_sums_of_squares(typing_context: Any, array: Any, place: Any, blocks: Any) -> Any:
    """Eight sums p[j] of x[j]^2, x[j+8]^2, ... in order, from 0, where x is `array` counted flat from `place`, 8 * blocks long; added up as
    ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7)). array: contiguous float32."""
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
