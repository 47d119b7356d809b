"""DLRM (Naumov et al. 2019, arXiv:1906.00091).

A bottom MLP on the dense values, the dot products of all pairs of vectors, and a top MLP.

The vectors of a sample are its embeddings and, if there are dense values, the bottom MLP's output
(`low`). The compiled kernels sum over k, the column, in ascending order, with fused multiply-add.
MKL's products have the same bits where MKL follows AVX2,STRICT, but take 2.5 x the time (measured).
On AMD, MKL does not follow it. Products of fewer than SMALL multiplications are left to torch. Its
own loop for them also runs over k in ascending order, without fused multiply-add. So the bits are
those of docs/definitions.md on every processor, and the shapes alone decide which of the two runs.
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
    draw_weights,
    mlp,
    sizes,
    stacked,
)

_FLOAT = ir.FloatType()
_EIGHT = ir.VectorType(_FLOAT, 8)

# The limit is torch's: it does not pass products of fewer multiplications to MKL.
SMALL = 400
# The size of a block of products. Its running sums fill eight vectors, which is enough to hide the
# latency of a fused multiply-add.
_ROWS, _COLUMNS = 4, 16


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
    """Compute a block of products: out[r, c] = sum over k < count of a[r, k] * b[k, c].

    r < 4 and c < 16. The sum starts at 0 and runs over k in ascending order, with fused
    multiply-add.

    Args:
        a: contiguous float32, indexed flat, as are b and out.
        a_place: the flat index of a[0, 0].
        a_stride: the distance between two rows of a.
        b_place: the flat index of b[0, 0].
        b_stride: the distance between two rows of b.
        out: the result, [4, 16].
        place: the flat index of out[0, 0].
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

        def eight(data: Any, at: Any) -> Any:
            # Returns a pointer to eight values.
            return builder.bitcast(builder.gep(data, [at]), ir.PointerType(_EIGHT))

        nothing = ir.Constant(_EIGHT, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
        sums = [
            [cgutils.alloca_once_value(builder, ir.Constant(_EIGHT, [0.0] * 8)) for _ in range(0, _COLUMNS, 8)]
            for _ in range(_ROWS)
        ]
        for s in (s for row in sums for s in row):
            builder.store(ir.Constant(_EIGHT, [0.0] * 8), s)
        # For each k: load row k of b, broadcast a[r, k], and add their product to the sums of row
        # r.
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
    """Transpose 8 x 8 values: target[c, r] = source[r, c] for r, c < 8.

    Both arrays are contiguous float32 and indexed flat, from `place` in the source and `to` in the
    target.
    """
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
        # Interleaving the values of rows r and r + 4 three times transposes the tile.
        for _ in range(3):
            rows = [builder.shuffle_vector(rows[r], rows[r + 4], half) for r in range(4) for half in (low, high)]
        for r in range(8):
            builder.store(rows[r], row(target, arguments[4], arguments[5], r), align=4)
        return context.get_dummy_value()

    return signature, generate


@nb.njit(nogil=True, cache=True)
def _padded(count, block):  # type: ignore[no-untyped-def]
    """Return count rounded up to a multiple of block."""
    return -(-count // block) * block


@nb.njit(nogil=True, cache=True)
def _collect(low, vectors, s, own):  # type: ignore[no-untyped-def]
    """Copy the vectors of sample s into the first rows of own, low first.

    The other values of own are left unchanged.
    """
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
    """Fill out with [b, width]: low [b, L], then the dot products of all pairs.

    width is L + pairs. L is 0 if there are no dense values. out has b * width + 16 values: a row of
    products is written 16 values at a time, and the next row overwrites the values beyond its end.
    """
    samples, count, columns = vectors.shape
    n = count + (1 if low.shape[1] else 0)
    stride, padded = _padded(n, _COLUMNS), _padded(columns, 8)
    # The padding of `own` is never written, so it stays zero for all samples.
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
            # Row i + r has the products with vectors 0 to i + r - 1, so the last row of the block
            # needs columns 0 to i + 2.
            for chunk in range((i + _ROWS - 2) // _COLUMNS + 1):
                _block(own, i * padded, padded, turned, chunk * _COLUMNS, stride, columns, dots, chunk * size)
            for r in range(min(_ROWS, n - i)):
                for chunk in range(_padded(i + r, _COLUMNS) // _COLUMNS):
                    copy(dots, chunk * size + r * _COLUMNS, out, place + chunk * _COLUMNS)
                place += i + r


@nb.njit(nogil=True, cache=True)
def _backward(low, vectors, gradient, low_gradient, vectors_gradient):  # type: ignore[no-untyped-def]
    """Fill the gradients of low and vectors from the gradient of the output.

    The gradients are low_gradient [b, L], vectors_gradient [b, F, D], and gradient [b, L + pairs].
    For each sample, the gradients of the pairs form a symmetric matrix [n, n] with a zero diagonal.
    It is multiplied by the vectors [n, D]. The output also contains low itself, so the gradient of
    that part is added to low's gradient last.
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
        # Fill both triangles of the symmetric matrix. Its diagonal stays zero.
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
    """Maps low [b, D] and vectors [b, F, D] to [b, D + pairs].

    The result is low, then the dot products of all pairs of low and the vectors. low is [b, 0] if
    there are no dense values. Otherwise it is vector 0. Pair (i, j < i) is product i*(i-1)/2 + j.
    Tensors are float32, contiguous, and on the CPU.
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

    Its backward is one product with a symmetric matrix. Autograd would compute two products and add
    column by column.
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
        # The added column of zeros is the source of the diagonal.
        symmetric = torch.nn.functional.pad(gradient, (0, 1)).index_select(1, places).view(b, n, n)
        return torch.bmm(symmetric, vectors), None, None


def with_pairwise_dots(low: Tensor, vectors: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
    """Return low, then the dot products of all pairs of low and vectors, as PairwiseDots does.

    n is the number of vectors, including low.

    Args:
        low: float32 [b, D], or [b, 0] if there are no dense values.
        vectors: float32 [b, F, D].
        pairs: int64 [n*(n-1)/2], the place of each pair in a flat matrix [n, n].
        places: int64 [n*n], the pair at each place of that matrix. On the diagonal it is n*(n-1)/2,
            one behind the last pair.
    """
    n = vectors.shape[1] + bool(low.shape[1])
    # A program that `foreload export --format torch` traces must run without foreload, so it cannot
    # use the compiled kernels.
    if vectors.device.type == "cpu" and n * n * vectors.shape[2] >= SMALL and not torch.compiler.is_compiling():
        return PairwiseDots.apply(low, vectors)
    if low.shape[1]:
        vectors = torch.cat([low.unsqueeze(1), vectors], 1)
    return torch.cat([low, TorchPairwiseDots.apply(vectors, pairs, places)], 1)


# Three features without dense values have three products.
_FEW_PRODUCTS = 3


def little_to_interact(spec: ModelSpec) -> str | None:
    """Return a warning if the data give DLRM few dot products to learn from, else None.

    The top MLP of DLRM sees only dot products of embeddings, and no embedding itself.
    """
    vectors = len(spec.features) + (spec.dense_width > 0)
    products = vectors * (vectors - 1) // 2
    if products > _FEW_PRODUCTS or (spec.dense_width and products > 1):
        return None
    beside = " and the dense values" if spec.dense_width else ""
    return (
        f"dlrm learns from {products} dot product{'s' * (products != 1)}{beside} here, not from the embeddings themselves; "
        "deepfm, dcn and wide_deep do: "
        "--model deepfm"
    )


class DLRM(nn.Module):
    """DLRM as a model.

    Args:
        spec: the inputs. All features must have the same dimension D.
        bottom: the sizes of the MLP on the dense values. The last size must be D. The default is
            64-D.
        top: the sizes of the MLP on the output of the bottom MLP and the dot products. The last
            size must be 1.
        init_std: the standard deviation of the linear layers' weights, with biases of zero. If 0,
            they begin as PyTorch's do.

    Attributes:
        pairs: a buffer, int64 [n*(n-1)/2], as `with_pairwise_dots` takes it. n is the number of
            features, plus one if there are dense values.
        places: a buffer, int64 [n*n], as `with_pairwise_dots` takes it.
    """

    pairs: Tensor
    places: Tensor

    def __init__(
        self, spec: ModelSpec, *, bottom: str | Sequence[int] = "", top: str | Sequence[int] = "64-32-1", init_std: float = 0.0
    ) -> None:
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
                "dlrm: needs two features, or one and dense values, for a dot product; got 1 feature alone; use deepfm"
            )
        rows, columns = torch.tril_indices(vectors, vectors, -1)
        places = torch.full((vectors, vectors), len(rows))
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows))
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        self.register_buffer("places", places.flatten(), persistent=False)
        self.bottom = mlp(spec.dense_width, bottom_sizes, last_relu=True) if spec.dense_width else None
        self.top = mlp(len(rows) + (dimension if spec.dense_width else 0), top_sizes, last_relu=False)
        draw_weights(self, "dlrm", init_std)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [b].

        Args:
            dense: float32 [b, n].
            embeddings: per feature [b, D].
        """
        vectors = stacked(embeddings, self.spec)
        low = dense[:, :0] if self.bottom is None else self.bottom(dense)
        return self.top(with_pairwise_dots(low, vectors, self.pairs, self.places)).squeeze(1)
