"""Prefetching inside numba kernels: the oracle touches millions of rows at random, and waits for memory only if it does not ask early."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context: Any, array: Any, place: Any) -> Any:
    """Ask for the cache line of element `place` of a contiguous array, counted flat; any place is harmless."""
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
        builder.call(function, [address, int32(0), int32(3), int32(1)])  # to read, kept in all levels, data
        return context.get_dummy_value()

    return signature, generate
