"""DLRM (Naumov et al. 2019, arXiv:1906.00091): dense values and embeddings, the dot products of all pairs, and two MLPs.

A sample's vectors are the bottom MLP's output (`low`; none without dense values) and its embeddings. Compiled sums run over k, the column, ascending,
in fused multiply-add; MKL's products have the same bits where it follows AVX2,STRICT, which it does not on AMD, in 2.5 x the time (measured).
Products of fewer than SMALL multiplications are left to torch, whose own loop for them runs over k ascending too, without fused multiply-add. So the
bits are those of docs/definitions.md on every processor, and which of the two runs depends on the shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foreload.base.compiled import nb
from foreload.base.intrinsics import copy
from foreload.trainer.errors import ModelError
from foreload.trainer.models.spec import (
    ModelSpec,
    mlp,
    sizes,
    stacked,
)

_FLOAT = ir.FloatType()
_EIGHT = ir.VectorType(_FLOAT, 8)

SMALL = 400  # as in torch, whose products of fewer multiplications do not go to MKL
_ROWS, _COLUMNS = (
    4,
    16,
)  # of a block of products: eight vectors of running sums, enough to hide how long one fused multiply-add takes


@intrinsic
def _block(
    typing_context: Any,
    a: Any,
    a_place: Any,
    a_stride: Any,
    b: Any,
    b_place: Any,
    b_stride: Any,
    count: Any,
    out: Any,
    place: Any,
) -> Any:
    """out[r, c] = sum over k < count of a[r, k] * b[k, c], r < 4, c < 16, k ascending from 0, in fused multiply-add.

    Arrays are contiguous float32 and counted flat: a_place, b_place and place are where a[0, 0], b[0, 0] and out[0, 0] stand, the strides lead from a
    row to the next; out is [4, 16].
    """
    whole = types.int64
    signature = types.void(a, whole, whole, b, whole, whole, whole, out, whole)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_place, a_stride, b, b_place, b_stride, count, out, place = arguments
        a, b, out = (
            context.make_array(signature.args[k])(context, builder, array).data for k, array in ((0, a), (3, b), (7, out))
        )
        fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_EIGHT, [_EIGHT] * 3), "llvm.fma.v8f32")

        def number(value: int) -> Any:
            return ir.Constant(ir.IntType(64), value)

        def eight(data: Any, at: Any) -> Any:  # a pointer to eight values
            return builder.bitcast(builder.gep(data, [at]), ir.PointerType(_EIGHT))

        nothing = ir.Constant(_EIGHT, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
        sums = [
            [cgutils.alloca_once_value(builder, ir.Constant(_EIGHT, [0.0] * 8)) for _ in range(0, _COLUMNS, 8)]
            for _ in range(_ROWS)
        ]
        for s in (s for row in sums for s in row):
            builder.store(ir.Constant(_EIGHT, [0.0] * 8), s)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(b_place, builder.mul(loop.index, b_stride))
            values = [builder.load(eight(b, builder.add(at, number(c))), align=4) for c in range(0, _COLUMNS, 8)]
            for r, row in enumerate(sums):
                one = builder.load(
                    builder.gep(a, [builder.add(builder.add(a_place, loop.index), builder.mul(a_stride, number(r)))])
                )
                factor = builder.insert_element(nothing, one, ir.Constant(ir.IntType(32), 0))
                factor = builder.shuffle_vector(factor, nothing, everywhere)
                for s, value in zip(row, values, strict=True):
                    builder.store(builder.call(fused, [factor, value, builder.load(s)]), s)
        for r, row in enumerate(sums):
            for c, s in enumerate(row):
                builder.store(builder.load(s), eight(out, builder.add(place, number(_COLUMNS * r + 8 * c))), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _transpose(typing_context: Any, source: Any, place: Any, stride: Any, target: Any, to: Any, to_stride: Any) -> Any:
    """target[c, r] = source[r, c] for r, c < 8: contiguous float32 arrays, counted flat from their places."""
    whole = types.int64
    signature = types.void(source, whole, whole, target, whole, whole)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = (context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 3))

        def row(data: Any, place: Any, stride: Any, r: int) -> Any:
            at = builder.add(place, builder.mul(stride, ir.Constant(ir.IntType(64), r)))
            return builder.bitcast(builder.gep(data, [at]), ir.PointerType(_EIGHT))

        rows = [builder.load(row(source, arguments[1], arguments[2], r), align=4) for r in range(8)]
        kind = ir.VectorType(ir.IntType(32), 8)
        low, high = (ir.Constant(kind, [k for j in range(4) for k in (start + j, 8 + start + j)]) for start in (0, 4))
        for _ in range(3):  # the values of rows r and r + 4 in turn, three times over, transpose
            rows = [builder.shuffle_vector(rows[r], rows[r + 4], half) for r in range(4) for half in (low, high)]
        for r in range(8):
            builder.store(rows[r], row(target, arguments[4], arguments[5], r), align=4)
        return context.get_dummy_value()

    return signature, generate


@nb.njit(nogil=True, cache=True)
def _padded(count, block):  # type: ignore[no-untyped-def]
    """count rounded up to a multiple of block."""
    return -(-count // block) * block


@nb.njit(nogil=True, cache=True)
def _collect(low, vectors, s, own):  # type: ignore[no-untyped-def]
    """Copy the vectors of sample s into the first rows of own, low first; what own has beyond them stays."""
    stride = np.uint64(own.shape[1])
    flat = own.reshape(-1)
    for c in range(low.shape[1]):
        flat[c] = low[s, c]
    start = stride if low.shape[1] else np.uint64(0)
    for i in range(vectors.shape[1]):
        for c in range(vectors.shape[2]):
            flat[start + np.uint64(c)] = vectors[s, i, c]
        start += stride


@nb.njit(nogil=True, cache=True)
def _forward(low, vectors, out, width):  # type: ignore[no-untyped-def]
    """out: [b * width + 16] for [b, width], width = L + pairs: low [b, L], then the dot products; L is 0 where there is none.

    Rows of products are written 16 values at a time, each over what the one before wrote beyond its end; hence the 16 at the end.
    """
    samples, count, columns = vectors.shape
    n = count + (1 if low.shape[1] else 0)
    stride, padded = _padded(n, _COLUMNS), _padded(columns, 8)
    own = np.zeros((stride, padded), np.float32)
    turned = np.zeros((padded, stride), np.float32)
    dots = np.empty((stride // _COLUMNS, _ROWS, _COLUMNS), np.float32)
    size = _ROWS * _COLUMNS
    for s in range(samples):
        _collect(low, vectors, s, own)
        for c in range(0, padded, 8):
            for i in range(0, n, 8):
                _transpose(own, i * padded + c, padded, turned, c * stride + i, stride)
        place = s * width
        for c in range(low.shape[1]):
            out[np.uint64(place + c)] = low[s, c]
        place += low.shape[1]
        for i in range(0, n, _ROWS):
            for chunk in range((i + _ROWS - 2) // _COLUMNS + 1):
                _block(own, i * padded, padded, turned, chunk * _COLUMNS, stride, columns, dots, chunk * size)
            for r in range(min(_ROWS, n - i)):
                for chunk in range(_padded(i + r, _COLUMNS) // _COLUMNS):
                    copy(dots, chunk * size + r * _COLUMNS, out, place + chunk * _COLUMNS)
                place += i + r


@nb.njit(nogil=True, cache=True)
def _backward(low, vectors, gradient, low_gradient, vectors_gradient):  # type: ignore[no-untyped-def]
    """Fill the gradients of low [b, L] and vectors [b, F, D] from that of the output, gradient [b, L + pairs].

    Per sample: the pairs' gradients as a symmetric matrix [n, n], zeros on its diagonal, times the vectors [n, D]; low's own share of the output is
    added behind that.
    """
    samples, count, columns = vectors.shape
    first = 1 if low.shape[1] else 0
    n = count + first
    stride = _padded(columns, _COLUMNS)
    own = np.zeros((n, stride), np.float32)
    pairs = np.zeros((_padded(n, _ROWS), n), np.float32)
    flat = pairs.reshape(-1)
    products = np.empty((_ROWS, _COLUMNS), np.float32)
    for s in range(samples):
        _collect(low, vectors, s, own)
        place = np.uint64(low.shape[1])
        for i in range(1, n):
            at, mirrored = np.uint64(i * n), np.uint64(i)
            for _ in range(i):
                value = gradient[s, place]
                flat[at] = value
                flat[mirrored] = value
                place += np.uint64(1)
                at += np.uint64(1)
                mirrored += np.uint64(n)
        for i in range(0, n, _ROWS):
            for start in range(0, columns, _COLUMNS):
                _block(pairs, i * n, n, own, start, stride, n, products, 0)
                for r in range(min(_ROWS, n - i)):
                    if i + r < first:
                        for c in range(min(_COLUMNS, columns - start)):
                            at = np.uint64(start + c)
                            low_gradient[s, at] = gradient[s, at] + products[r, c]
                    else:
                        row = np.uint64(i + r - first)
                        for c in range(min(_COLUMNS, columns - start)):
                            vectors_gradient[s, row, np.uint64(start + c)] = products[r, c]


class PairwiseDots(torch.autograd.Function):
    """low [b, D] (or [b, 0] for none) and vectors [b, F, D] to [b, D + pairs]: low, then the dot products of all pairs of low and the vectors.

    Pair (i, j < i) is the (i*(i-1)/2 + j)-th product, low being vector 0 where there is one. float32, contiguous, on the CPU.
    """

    @staticmethod
    def forward(ctx: Any, low: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(low, vectors)
        n = vectors.shape[1] + bool(low.shape[1])
        width = low.shape[1] + n * (n - 1) // 2
        out = torch.empty(len(low) * width + _COLUMNS)
        _forward(low.detach().numpy(), vectors.detach().numpy(), out.numpy(), width)
        return out[: len(low) * width].view(len(low), width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        low, vectors = ctx.saved_tensors
        gradients = torch.empty_like(low), torch.empty_like(vectors)
        arrays = (t.detach().numpy() for t in (low, vectors, gradient.contiguous(), *gradients))
        _backward(*arrays)
        return gradients


class TorchPairwiseDots(torch.autograd.Function):
    """The dot products of all pairs of vectors, on any device: [b, n, D] -> [b, n*(n-1)/2].

    Its backward is one product with a symmetric matrix, where autograd would make two products and add column by column.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, places)
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        vectors, places = ctx.saved_tensors
        b, n, _ = vectors.shape
        # One column more, of zeros, for the diagonal.
        symmetric = torch.nn.functional.pad(gradient, (0, 1)).index_select(1, places).view(b, n, n)
        return torch.bmm(symmetric, vectors), None, None


def with_pairwise_dots(low: Tensor, vectors: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
    """low [b, D] (or [b, 0] for none) and, behind it, the dot products of all pairs of low and vectors [b, F, D]: as PairwiseDots gives them.

    n: the vectors, low included. pairs: int64 [n*(n-1)/2], where each pair stands in a flat matrix [n, n]; places: int64 [n*n], which pair stands at
    each place of it, and on the diagonal n*(n-1)/2, behind the last one.
    """
    n = vectors.shape[1] + bool(low.shape[1])
    # A program that `foreload export --format torch` traces is to run without foreload.
    if vectors.device.type == "cpu" and n * n * vectors.shape[2] >= SMALL and not torch.compiler.is_compiling():
        return PairwiseDots.apply(low, vectors)
    if low.shape[1]:
        vectors = torch.cat([low.unsqueeze(1), vectors], 1)
    return torch.cat([low, TorchPairwiseDots.apply(vectors, pairs, places)], 1)


_FEW_PRODUCTS = 3  # of features alone: of three


def little_to_interact(spec: ModelSpec) -> str | None:
    """What there is to say of data for which DLRM is hardly a model: its top MLP sees dot products of embeddings, and no embedding itself."""
    vectors = len(spec.features) + (spec.dense_width > 0)
    products = vectors * (vectors - 1) // 2
    if products > _FEW_PRODUCTS or (spec.dense_width and products > 1):
        return None
    beside = " and the dense values" if spec.dense_width else ""
    return (
        f"dlrm learns from {products} dot product{'s' * (products != 1)}{beside} here, and from no embedding itself; deepfm, dcn and wide_deep do: "
        "--model deepfm"
    )


class DLRM(nn.Module):
    """Options: bottom, sizes of the MLP on dense values (the last must be D; default 64-D); top, of that on its output and the dots (ends in 1).

    Buffers, as `with_pairwise_dots` takes them: pairs int64 [n*(n-1)/2], places int64 [n*n], n the features and, if there are dense values, one more.
    """

    pairs: Tensor
    places: Tensor

    def __init__(self, spec: ModelSpec, *, bottom: str | Sequence[int] = "", top: str | Sequence[int] = "64-32-1") -> None:
        super().__init__()
        spec.one_output("dlrm")
        self.spec = spec
        dimension = spec.equal_dimension("dlrm")
        bottom_sizes = sizes("dlrm: bottom", bottom) or (64, dimension)
        top_sizes = sizes("dlrm: top", top)
        if bottom_sizes[-1] != dimension:
            raise ModelError(
                f"dlrm: the last size of bottom must be the dimension of the embeddings, {dimension}; got {bottom_sizes[-1]}"
            )
        if top_sizes[-1:] != (1,):
            raise ModelError(f"dlrm: the last size of top must be 1, the logit; got {top!r}")
        vectors = len(spec.features) + bool(spec.dense_width)
        if vectors < 2:
            raise ModelError(
                "dlrm: there must be two features, or dense values, for a dot product; got 1 feature alone; use deepfm"
            )
        rows, columns = torch.tril_indices(vectors, vectors, -1)
        places = torch.full((vectors, vectors), len(rows))
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows))
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        self.register_buffer("places", places.flatten(), persistent=False)
        self.bottom = mlp(spec.dense_width, bottom_sizes, last_relu=True) if spec.dense_width else None
        self.top = mlp(len(rows) + (dimension if spec.dense_width else 0), top_sizes, last_relu=False)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """dense [b, n]; embeddings: per feature [b, D]. Returns logits [b]."""
        vectors = stacked(embeddings, self.spec)
        low = dense[:, :0] if self.bottom is None else self.bottom(dense)
        return self.top(with_pairwise_dots(low, vectors, self.pairs, self.places)).squeeze(1)
