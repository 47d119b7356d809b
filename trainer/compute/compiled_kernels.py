"""`Kernels` for rows in CPU memory: loops compiled by numba, which release the GIL.

Rows lie at random in a partition, so each loop over them prefetches rows. Loops index whole arrays
and do not take views of rows, since each view would count references. The order of every sum is
part of the result (docs/definitions.md, A step's arithmetic).

One function goes over the rows of an update and calls the update of each row's table. It branches
once per row, never in the loops over a row's columns.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from foreload.base.compiled import nb
from foreload.base.intrinsics import COLUMNS, add, copy, descend, eight_sums_of_squares, prefetch
from foreload.cache.rows.staging import put_rows, take_rows
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.layouts import MEAN, Lookups, UpdateRules
from foreload.trainer.compute.row_optimizers import (
    ADAGRAD,
    ADAM,
    BETA,
    DECAY,
    EPSILON,
    FIRST,
    FTRL,
    L1,
    L2,
    PENALTY_L1,
    PENALTY_L2,
    ROOT,
    SECOND,
    SGD,
)

_AHEAD = 16  # rows by which prefetching is ahead of their use
_LINE = 16  # float32 values in a cache line
# Division by zero gives inf or nan as in torch. By default it would raise an exception, which also
# keeps LLVM from vectorising.
_compile = nb.njit(nogil=True, cache=True, error_model="numpy")


@_compile
def _sum_of_squares(g: np.ndarray, i: int, start: int, end: int, p: np.ndarray) -> np.float32:
    """Return Q of docs/definitions.md over g[i, start:end].

    There are eight sums: the square of column c of these columns goes into sum c % 8. The sums are
    then added in pairs.

    Before: `p` is float32 [8] of scratch, with any contents.

    After: `p` may have changed, `g` has not. If the columns are whole eights, the sums are the
    lanes of one vector: the same additions in the same order.
    """
    blocks = (end - start) // 8
    place = np.int64(i) * g.shape[1] + start
    if (end - start) % 8 == 0:
        return eight_sums_of_squares(g, place, blocks)
    p[:] = np.float32(0)
    for c in range(end - start):
        p[c % 8] = p[c % 8] + g[i, start + c] * g[i, start + c]
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


@_compile
def _keep(rows: np.ndarray, place: np.int64, kept: np.ndarray, at: int) -> None:
    """Set `kept[at] = rows[place]`, if `kept` has that many rows.

    A `kept` without rows keeps nothing.
    """
    if at < kept.shape[0]:
        for j in range(rows.shape[1]):
            kept[at, j] = rows[place, j]


@_compile
def _penalise(weights: np.ndarray, slots: np.ndarray, tables: np.ndarray, gradient: np.ndarray, rules: UpdateRules) -> None:
    """Add the penalties of each row `weights[slots[i]]` to `gradient[i]`, where its table has any.

    After: `gradient[i]` is (g + l2 * w) + l1 * sign(w) in the columns of the embedding, each
    operation rounded, and as before in all others.
    """
    constants, penalised, last = rules.constants, rules.penalised, slots.size - 1
    for i in range(slots.size):
        ahead = min(i + _AHEAD, last)
        for j in range(0, penalised[tables[ahead]], _LINE):
            prefetch(weights, np.int64(slots[ahead]) * weights.shape[1] + j)
        r, k = np.int64(slots[i]), tables[i]
        l1, l2 = constants[k, PENALTY_L1], constants[k, PENALTY_L2]
        for j in range(penalised[k]):
            w = weights[r, j]
            sign = np.float32(w > 0) - np.float32(w < 0)
            gradient[i, j] = (gradient[i, j] + l2 * w) + l1 * sign


@_compile
def _adam(
    weights: np.ndarray,
    state: np.ndarray,
    r: np.int64,
    gradient: np.ndarray,
    i: int,
    width: int,
    lr: np.float32,
    c: np.ndarray,
    k: int,
) -> None:
    """Update a row by Adam.

    The state has the first moments in its first `width` columns and the second moments behind them.
    `lr` is corrected for the step.
    """
    epsilon, root = c[k, EPSILON], c[k, ROOT]
    first, less_first, second, less_second = c[k, FIRST], c[k, FIRST + 1], c[k, SECOND], c[k, SECOND + 1]
    for j in range(width):
        g = gradient[i, j]
        m = first * state[r, j] + less_first * g
        v = second * state[r, width + j] + less_second * (g * g)
        state[r, j], state[r, width + j] = m, v
        weights[r, j] = weights[r, j] - (lr * m) / (np.sqrt(v) * root + epsilon)


@_compile
def _ftrl(
    weights: np.ndarray,
    state: np.ndarray,
    r: np.int64,
    gradient: np.ndarray,
    i: int,
    width: int,
    lr: np.float32,
    c: np.ndarray,
    k: int,
) -> None:
    """Update a row by FTRL-Proximal.

    The state has z in its first `width` columns and n behind it.

    Before: `lr` is above 0.
    """
    l1, l2, beta = c[k, L1], c[k, L2], c[k, BETA]
    for j in range(width):
        g, before = gradient[i, j], state[r, width + j]
        n = before + g * g
        root = np.sqrt(n)
        sigma = (root - np.sqrt(before)) / lr
        z = state[r, j] + (g - sigma * weights[r, j])
        state[r, j], state[r, width + j] = z, n
        moved = (np.copysign(l1, z) - z) / ((beta + root) / lr + l2)
        weights[r, j] = np.float32(0) if abs(z) <= l1 else moved


@_compile
def _two_a_weight(
    kind: int,
    weights: np.ndarray,
    state: np.ndarray,
    r: np.int64,
    gradient: np.ndarray,
    i: int,
    width: int,
    lr: np.float32,
    c: np.ndarray,
    k: int,
) -> bool:
    """Update a row whose optimizer has two numbers of state per weight.

    Returns whether `kind` is such an optimizer. If not, nothing has changed.
    """
    if kind == ADAM:
        _adam(weights, state, r, gradient, i, width, lr, c, k)
    elif kind == FTRL and lr > 0:
        _ftrl(weights, state, r, gradient, i, width, lr, c, k)
    return kind in (ADAM, FTRL)


@_compile
def update_rows(
    weights: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    tables: np.ndarray,
    gradient: np.ndarray,
    rules: UpdateRules,
    before: tuple[np.ndarray, np.ndarray],
    two_a_weight: Literal[True] | None,
) -> None:
    """Update each row `weights[slots[i]]`, `state[slots[i]]` once by `gradient[i]`.

    The rule is that of `tables[i]`.

    Before: slots are distinct, so the order of the rows does not matter.

    After: row-wise Adagrad has divided all columns of a part by the root of the part's one number.
    The other optimizers went through the columns one by one. Columns beyond the table's width were
    neither read nor written.

    Args:
        before: arrays for the old weights and states, as in `_keep`.
        two_a_weight: None if no table is under Adam or FTRL-Proximal. Then this is compiled without
            them, so that they do not slow down the other optimizers.
    """
    kinds, rates, constants, widths = rules.kinds, rules.rates, rules.constants, rules.widths
    parts, part_offsets = rules.parts, rules.part_offsets
    columns, state_columns, last = weights.shape[1], state.shape[1], slots.size - 1
    scratch = np.empty(8, np.float32)
    for i in range(slots.size):
        ahead = np.int64(slots[min(i + _AHEAD, last)])
        for j in range(0, columns, _LINE):
            prefetch(weights, ahead * columns + j)
        for j in range(0, state_columns, _LINE):
            prefetch(state, ahead * state_columns + j)
        r, k = np.int64(slots[i]), tables[i]
        _keep(weights, r, before[0], i)
        _keep(state, r, before[1], i)
        # Everything is looked up once per row, so that the loops over columns have no branches.
        kind, lr, width = kinds[k], rates[k], np.int64(widths[k])
        if two_a_weight is not None and _two_a_weight(kind, weights, state, r, gradient, i, width, lr, constants, k):
            continue
        if kind == SGD:
            for j in range(width):
                weights[r, j] = weights[r, j] - lr * gradient[i, j]
        elif kind == ADAGRAD:
            epsilon, decay = constants[k, EPSILON], constants[k, DECAY]
            for j in range(width):
                g = gradient[i, j]
                s = decay * state[r, j] + g * g
                state[r, j] = s
                weights[r, j] = weights[r, j] - (lr * g) / (np.sqrt(s) + epsilon)
        # Row-wise Adagrad is the rest, with one part or several: a new kind goes above.
        elif part_offsets[k + 1] == part_offsets[k] + 1:
            s = constants[k, DECAY] * state[r, 0] + _sum_of_squares(gradient, i, 0, width, scratch) / np.float32(width)
            state[r, 0] = s
            root, vectors = np.sqrt(s) + constants[k, EPSILON], width // COLUMNS * COLUMNS
            for j in range(0, vectors, COLUMNS):
                descend(gradient, i * columns + j, lr, root, weights, r * columns + j)
            for j in range(vectors, width):
                weights[r, np.uint64(j)] = weights[r, np.uint64(j)] - (lr * gradient[i, np.uint64(j)]) / root
        else:
            start = 0
            for p in range(part_offsets[k], part_offsets[k + 1]):
                end, own = start + parts[p], p - part_offsets[k]
                s = constants[k, DECAY] * state[r, own] + _sum_of_squares(gradient, i, start, end, scratch) / np.float32(parts[p])
                state[r, own] = s
                root = np.sqrt(s) + constants[k, EPSILON]
                for j in range(start, end):
                    weights[r, j] = weights[r, j] - (lr * gradient[i, j]) / root
                start = end


@_compile
def update_rows_rowwise(
    weights: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    tables: np.ndarray,
    gradient: np.ndarray,
    rules: UpdateRules,
    before: tuple[np.ndarray, np.ndarray],
) -> None:
    """Do what `update_rows` does, for tables that are all alike.

    All tables must be under row-wise Adagrad and have rows of one part, as wide as the partition
    and a multiple of COLUMNS. Before and after are as in `update_rows`. Without the other cases,
    this takes less than half the time.
    """
    columns, last = weights.shape[1], slots.size - 1
    rates, constants = rules.rates, rules.constants
    keeps, (weights_before, state_before) = before[0].shape[0] == slots.size, before
    for i in range(slots.size):
        ahead = np.int64(slots[min(i + _AHEAD, last)])
        for j in range(0, columns, _LINE):
            prefetch(weights, ahead * columns + j)
        prefetch(state, ahead)
        r, k = np.int64(slots[i]), tables[i]
        if keeps:
            for j in range(0, columns, COLUMNS):
                copy(weights, r * columns + j, weights_before, i * columns + j)
            state_before[i, 0] = state[r, 0]
        s = constants[k, DECAY] * state[r, 0] + eight_sums_of_squares(gradient, i * columns, columns // 8) / np.float32(columns)
        state[r, 0] = s
        root = np.sqrt(s) + constants[k, EPSILON]
        for j in range(0, columns, COLUMNS):
            descend(gradient, i * columns + j, rates[k], root, weights, r * columns + j)


_ONE = np.uint64(1)


@_compile
def _gather_equal(rows: np.ndarray, index: np.ndarray, block: np.ndarray) -> None:
    """Set `block[l] = rows[index[l]]`, for features whose rows are all as wide as the block.

    Before: `rows` is contiguous and has the block's width, so row r begins at value r * W of the
    flat array. `block` is float32 [lookups, W].

    After: every row of the block is written: first whole vectors of COLUMNS, then the remaining
    columns.
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
    """Set `block[l] = rows[places[index[l]]]`: `_gather_equal` of rows that lie at random.

    Before and after are as in `_gather_equal`. The row of the lookup that is _AHEAD further on is
    prefetched, which affects only the time.
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
    """Fill a block [b, F, W] from rows that differ in width between features.

    There is one lookup per sample and feature, by sample and then feature.

    Before: `index` has b * F entries.

    After: block[i, f] has the row's own columns, and zeros beyond them, whatever the row holds
    there.
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
    """Fill a block [b, F, W] from bags.

    block[i, f] is the sum of the bag's rows, from the first on, divided by their number if the
    pooling is MEAN.

    Before: `offsets` has b * F + 1 entries, which ascend from 0. A bag may be empty, and may name a
    row twice.

    After: a bag of one row is that row bit for bit, since it is copied, not added to zero. An empty
    bag is zeros, and so are the columns beyond a table's width.
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
    """Add `gradient[l]` to `out[index[l]]`, over the lookups in their order.

    Before: `gradient` is contiguous float32 [lookups, W], `out` is [n, W] with any contents.

    After: out[r] is the sum of the terms of row r, from the first lookup on. `out` begins at -0,
    and -0 + x is x for every x, so the first term needs no special case.
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
    """Add each bag's gradient to the rows of the bag.

    If the pooling is MEAN, the gradient is divided by the bag's length.

    Before: `gradient` is float32 [b * F, W], one row per bag.

    After: as `_scatter_single` leaves it. A row that occurs twice in a bag has two terms. The
    division comes before the sum, as in backward of a mean.
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
    """Add the part of one lane to the owner's sums.

    `part` has the rows whose mask has the lane's bit, in the order of the owner's list.

    Before: total[i] has the sum over the lower lanes that use row i, or any contents if none does.

    After: the same holds for the lanes up to this one. The bits below the lane's own say whether a
    lower lane uses the row. So the first part is copied, and no row was set to zero for it.
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
        # The block is usually a leaf that already requires its gradient, hence `detach`.
        values = block.detach().numpy()
        if offsets is None and layout.equal and places is not None:
            _gather_through(rows.numpy(), places, index, values.reshape(len(index), layout.width))
            return
        if places is not None:
            index = places[index]
        if offsets is None and layout.equal:
            _gather_equal(rows.numpy(), index, values.reshape(len(index), layout.width))
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
        # Arrays without rows make the compiled loops keep nothing.
        empty = weights[:0], state[:0]
        kept_weights, kept_state = empty if before is None else before
        kept = kept_weights.numpy(), kept_state.numpy()
        if rules.penalised.any():
            _penalise(weights.numpy(), slots, tables, gradient.numpy(), rules)
        rows = weights.numpy(), state.numpy(), slots, tables, gradient.numpy()
        if rules.rowwise and rules.width % COLUMNS == 0:
            update_rows_rowwise(*rows, rules, kept)
        else:
            update_rows(*rows, rules, kept, True if rules.two_a_weight else None)
