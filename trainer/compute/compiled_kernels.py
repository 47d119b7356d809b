"""`Kernels` for rows in CPU memory: loops compiled by numba, which release the GIL.

Rows lie at random in a partition, so each loop over them asks for the rows to come; and whole arrays are indexed, not rows cut out of them, since
a view of each row would count references. The order of every sum is part of the result (docs/definitions.md, A step's arithmetic).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from foreload.base.compiled import nb
from foreload.base.prefetch import prefetch
from foreload.base.simd import COLUMNS, add, copy
from foreload.cache.rows.staging import put_rows, take_rows
from foreload.trainer.compute.compiled_updates import update_rows, update_rows_rowwise
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.layouts import MEAN, Lookups, UpdateRules

_ONE = np.uint64(1)
_AHEAD = 16  # lookups, or rows, that prefetching is ahead of their use
_LINE = 16  # float32 values in a cache line
# Division by zero gives inf or nan as in torch, instead of an exception that also keeps LLVM from vectorising.
_compile = nb.njit(nogil=True, cache=True, error_model="numpy")


@_compile
def _gather_equal(rows: np.ndarray, index: np.ndarray, block: np.ndarray) -> None:
    """block[l] = rows[index[l]], where rows of all features are as wide as the block: float32 [lookups, W].

    Before: rows is contiguous and has the block's width, so row r begins at value r * W of the flat array. After: every row of the block is written;
    whole vectors of COLUMNS first, then the columns that are left.
    """
    columns = block.shape[1]
    vectors = columns // COLUMNS * COLUMNS
    for l in range(index.size):
        place = np.int64(index[l])
        for j in range(0, vectors, COLUMNS):
            copy(rows, place * columns + j, block, l * columns + j)
        for j in range(vectors, columns):
            block[l, np.uint64(j)] = rows[place, np.uint64(j)]


@_compile
def _gather_through(rows: np.ndarray, places: np.ndarray, index: np.ndarray, block: np.ndarray) -> None:
    """`_gather_equal` of rows[places], which lie at random: block[l] = rows[places[index[l]]].

    Before and after are the same; the row of the lookup _AHEAD further on is prefetched meanwhile, which changes nothing but the time.
    """
    columns, last = block.shape[1], index.size - 1
    vectors = columns // COLUMNS * COLUMNS
    for l in range(index.size):
        ahead = np.int64(places[index[min(l + _AHEAD, last)]]) * columns
        for j in range(0, columns, _LINE):
            prefetch(rows, ahead + j)
        place = np.int64(places[index[l]])
        for j in range(0, vectors, COLUMNS):
            copy(rows, place * columns + j, block, l * columns + j)
        for j in range(vectors, columns):
            block[l, np.uint64(j)] = rows[place, np.uint64(j)]


@_compile
def _gather_single(rows: np.ndarray, index: np.ndarray, widths: np.ndarray, block: np.ndarray) -> None:
    """`_gather_equal` where features' rows differ in width: block [b, F, W], one lookup per sample and feature, by sample and then feature.

    Before: index has b * F entries. After: block[i, f] is the row's own columns, and zeros beyond them, whatever the row holds there.
    """
    features, columns = block.shape[1], block.shape[2]
    for i in range(block.shape[0]):
        for f in range(features):
            source, target, width = rows[index[i * features + f]], block[i, f], widths[f]
            for j in range(width):
                target[j] = source[j]
            for j in range(width, columns):
                target[j] = np.float32(0)


@_compile
def _gather_bags(
    rows: np.ndarray, index: np.ndarray, offsets: np.ndarray, widths: np.ndarray, pooling: np.ndarray, block: np.ndarray
) -> None:
    """`_gather_single` for bags: block[i, f] is the sum of the bag's rows, from the first on, divided by their number where pooling is MEAN.

    Before: offsets, of b * F + 1 entries, ascend from 0; a bag may be empty, and may name a row twice. After: a bag of one row is that row bit for
    bit (it is copied, not added to zero), an empty one is zeros, and so are the columns beyond a table's width.
    """
    features, columns = block.shape[1], block.shape[2]
    for i in range(block.shape[0]):
        for f in range(features):
            start, end = offsets[i * features + f], offsets[i * features + f + 1]
            target, width = block[i, f], widths[f] if end > start else 0
            if end > start:
                source = rows[index[start]]
                for j in range(width):
                    target[j] = source[j]
            for l in range(start + 1, end):
                source = rows[index[l]]
                for j in range(width):
                    target[j] = target[j] + source[j]
            if pooling[f] == MEAN and end > start + 1:
                count = np.float32(end - start)
                for j in range(width):
                    target[j] = target[j] / count
            for j in range(width, columns):
                target[j] = np.float32(0)


@_compile
def _scatter_single(gradient: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """out[index[l]] += gradient[l], over the lookups in their order.

    Before: gradient is contiguous float32 [lookups, W], out [n, W]. After: out[r] is the sum of the terms of row r from the first lookup on: out
    begins at -0, and -0 + x is x for every x, so the first term needs no case of its own.
    """
    out[:] = np.float32(-0.0)
    columns = out.shape[1]
    vectors = columns // COLUMNS * COLUMNS
    for l in range(index.size):
        place = np.int64(index[l])
        for j in range(0, vectors, COLUMNS):
            add(gradient, l * columns + j, out, place * columns + j)
        for j in range(vectors, columns):
            c = np.uint64(j)
            out[place, c] = out[place, c] + gradient[l, c]


@_compile
def _scatter_bags(gradient: np.ndarray, index: np.ndarray, offsets: np.ndarray, pooling: np.ndarray, out: np.ndarray) -> None:
    """`_scatter_single` for bags: every row of a bag gets the bag's gradient, divided by the bag's length where pooling is MEAN.

    Before: gradient is float32 [b * F, W], one row a bag. After: as `_scatter_single` leaves it, a row that stands twice in a bag having
    two terms. The division comes before the sum, as in backward of a mean.
    """
    out[:] = np.float32(-0.0)
    features = pooling.size
    for bag in range(gradient.shape[0]):
        start, end = offsets[bag], offsets[bag + 1]
        source, count = gradient[bag], np.float32(end - start)
        mean = pooling[bag % features] == MEAN
        for l in range(start, end):
            target = out[index[l]]
            if mean:
                for j in range(target.size):
                    target[j] = target[j] + source[j] / count
            else:
                for j in range(target.size):
                    target[j] = target[j] + source[j]


@_compile
def _add_part(total: np.ndarray, users: np.ndarray, lane: np.uint64, part: np.ndarray) -> None:
    """Add the part of one lane to the owner's sums; `part` has the rows whose mask has the lane's bit, in the order of the owner's list.

    Before: total[i] holds the sum over the lanes below that use row i, or anything where none does. After: over the lanes up to this one. Which
    of the two a row is follows from the bits below the lane's own, so the first part is copied and no row was set to zero for it.
    """
    bit, columns = _ONE << lane, total.shape[1]
    place = 0
    for i in range(users.size):
        if users[i] & bit:
            if users[i] & (bit - _ONE):
                for j in range(columns):
                    total[i, j] = total[i, j] + part[place, j]
            else:
                for j in range(columns):
                    total[i, j] = part[place, j]
            place += 1


class CompiledKernels(Kernels):
    """`Kernels` for rows in CPU memory."""

    def take_rows(self, rows: Tensor, places: np.ndarray, out: Tensor) -> None:
        take_rows(rows.numpy(), places, out.numpy())

    def put_rows(self, rows: Tensor, places: np.ndarray, values: Tensor) -> None:
        put_rows(values.numpy(), places, rows.numpy())

    def gather_block(self, rows: Tensor, lookups: Lookups, block: Tensor, places: np.ndarray | None = None) -> None:
        index, offsets, layout = lookups.index, lookups.offsets, lookups.layout
        # detach: the block is usually a leaf that already requires its gradient
        values = block.detach().numpy()
        if offsets is None and layout.equal and places is not None:
            _gather_through(rows.numpy(), places, index, values.reshape(-1, layout.width))
            return
        if places is not None:
            index = places[index]
        if offsets is None and layout.equal:
            _gather_equal(rows.numpy(), index, values.reshape(-1, layout.width))
        elif offsets is None:
            _gather_single(rows.numpy(), index, layout.widths, values)
        else:
            _gather_bags(rows.numpy(), index, offsets, layout.widths, layout.pooling, values)

    def row_gradients(self, gradient: Tensor, lookups: Lookups, out: Tensor) -> None:
        values = gradient.contiguous().flatten(0, 1).numpy()
        if lookups.offsets is None:
            _scatter_single(values, lookups.index, out.numpy())
        else:
            _scatter_bags(values, lookups.index, lookups.offsets, lookups.layout.pooling, out.numpy())

    def add_part(self, total: Tensor, users: np.ndarray, lane: int, part: Tensor) -> None:
        _add_part(total.numpy(), users, np.uint64(lane), part.numpy())

    def apply(
        self,
        weights: Tensor,
        state: Tensor,
        slots: np.ndarray,
        tables: np.ndarray,
        gradient: Tensor,
        rules: UpdateRules,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        empty = weights[:0], state[:0]
        kept_weights, kept_state = empty if before is None else before
        kept = kept_weights.numpy(), kept_state.numpy()
        rows = weights.numpy(), state.numpy(), slots, tables, gradient.numpy()
        if rules.rowwise and rules.width % COLUMNS == 0:
            update_rows_rowwise(*rows, rules, kept)
        else:
            update_rows(*rows, rules, kept, True if rules.two_a_weight else None)
