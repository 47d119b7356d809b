"""The arithmetic of rows: pooling lookups into the embedding block, gradients per row, their sum over lanes, row optimizers.

Two implementations of one interface with the same bits (docs/definitions.md, A step's arithmetic): compiled loops for rows in CPU memory, and
torch operations for rows on any device. Floating-point data are torch tensors; index arrays are NumPy arrays, which may be read-only views of
mapped files. `W` is the width of the widest row; columns beyond a row's own width are never read into a result.
"""

from __future__ import annotations

import os
from typing import Protocol

import numba as nb
import numpy as np
import torch
from torch import Tensor

from foreload.cache.rows.layout import ROW_OPTIMIZERS
from foreload.cache.rows.staging import put_rows, take_rows
from foreload.pipelines.base.prefetch import prefetch
from foreload.pipelines.base.simd import (
    COLUMNS,
    add,
    copy,
    descend,
    eight_sums_of_squares,
)
from foreload.pipelines.errors import SettingError
from foreload.trainer.compute.layouts import MEAN, BlockLayout, UpdateRules

SGD, ADAGRAD, ROWWISE_ADAGRAD = (ROW_OPTIMIZERS.index(name) for name in ("sgd", "adagrad", "rowwise_adagrad"))
EPSILON = np.float32(1e-8)
_ONE = np.uint64(1)
_AHEAD = 16  # rows that are asked for early: they lie at random in a partition
_LINE = 16  # float32 values in a cache line
# Division by zero gives inf or nan as in torch, instead of an exception that also keeps LLVM from vectorising.
_compile = nb.njit(nogil=True, cache=True, error_model="numpy")


class Kernels(Protocol):
    """What a training step does with rows, wherever they live."""

    def take_rows(self, rows: Tensor, places: np.ndarray, out: Tensor) -> None:
        """out[i] = rows[places[i]]. rows float32 [n, W]; places int32 [m]; out float32 [m, W]."""

    def put_rows(self, rows: Tensor, places: np.ndarray, values: Tensor) -> None:
        """rows[places[i]] = values[i]; places int32 [m] without repetition."""

    def gather_block(
        self,
        rows: Tensor,
        index: np.ndarray,
        offsets: np.ndarray | None,
        layout: BlockLayout,
        block: Tensor,
        places: np.ndarray | None = None,
    ) -> None:
        """Fill the embedding block [b, F, W] from local rows: those in rows float32 [n, W], or of them the ones at `places`.

        index: int32 [lookups], local rows; offsets: int32 [b*F + 1] into index, or None where every feature has one value; places: int32
        [local rows] into rows, or None where rows are the local rows themselves.
        """

    def row_gradients(
        self, gradient: Tensor, index: np.ndarray, offsets: np.ndarray | None, layout: BlockLayout, out: Tensor
    ) -> None:
        """Sum the block's gradient [b, F, W] per local row, in the order of lookups from the first: out [n, W]."""

    def add_part(self, total: Tensor, users: np.ndarray, lane: int, part: Tensor) -> None:
        """Add a lane's gradients of the owned rows it uses; call for the lanes in ascending order.

        total: float32 [U, W], rows set by the first lane that uses them; users: uint64 [U], bit v: lane v uses the row;
        part: float32 [rows with the lane's bit, W], in the order of the owner's list.
        """

    def apply(
        self, weights: Tensor, state: Tensor, slots: np.ndarray, tables: np.ndarray, gradient: Tensor, rules: UpdateRules
    ) -> None:
        """One update of each row weights[slots[i]] by gradient[i], by the rule of its table.

        weights: float32 [slots, W]; state: float32 [slots, S]; slots: int32 [U] without repetition; tables: int16 [U]; gradient: float32 [U, W].
        """


@_compile
def _gather_equal(rows: np.ndarray, index: np.ndarray, block: np.ndarray) -> None:
    """Where rows of all tables are equally wide: block float32 [lookups, W]."""
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
    """`_gather_equal` of rows[places], which lie at random."""
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
    out[:] = np.float32(-0.0)  # -0 + x = x for every x, so each sum starts from its first term
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


@_compile
def _sum_of_squares(g: np.ndarray, i: int, start: int, end: int, p: np.ndarray) -> np.float32:
    """Q of docs/definitions.md over g[i, start:end]; p: float32 [8], scratch."""
    blocks = (end - start) // 8
    place = np.int64(i) * g.shape[1] + start
    if (end - start) % 8 == 0:
        return eight_sums_of_squares(g, place, blocks)
    p[:] = np.float32(0)
    for c in range(end - start):
        p[c % 8] = p[c % 8] + g[i, start + c] * g[i, start + c]
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


@_compile
def _apply(
    weights: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    tables: np.ndarray,
    gradient: np.ndarray,
    kinds: np.ndarray,
    rates: np.ndarray,
    widths: np.ndarray,
    parts: np.ndarray,
    part_offsets: np.ndarray,
) -> None:
    columns, state_columns, last = weights.shape[1], state.shape[1], slots.size - 1
    scratch = np.empty(8, np.float32)
    # Whole arrays are indexed, not rows cut out of them: a view of a row would count references for every row.
    for i in range(slots.size):
        ahead = np.int64(slots[min(i + _AHEAD, last)])
        for j in range(0, columns, _LINE):
            prefetch(weights, ahead * columns + j)
        for j in range(0, state_columns, _LINE):
            prefetch(state, ahead * state_columns + j)
        r, k = np.int64(slots[i]), tables[i]
        kind, lr, width = kinds[k], rates[k], np.int64(widths[k])
        if kind == SGD:
            for j in range(width):
                weights[r, j] = weights[r, j] - lr * gradient[i, j]
        elif kind == ADAGRAD:
            for j in range(width):
                g = gradient[i, j]
                s = state[r, j] + g * g
                state[r, j] = s
                weights[r, j] = weights[r, j] - (lr * g) / (np.sqrt(s) + EPSILON)
        elif part_offsets[k + 1] == part_offsets[k] + 1:
            s = state[r, 0] + _sum_of_squares(gradient, i, 0, width, scratch) / np.float32(width)
            state[r, 0] = s
            root = np.sqrt(s) + EPSILON
            vectors = width // COLUMNS * COLUMNS
            for j in range(0, vectors, COLUMNS):
                descend(gradient, i * columns + j, lr, root, weights, r * columns + j)
            for j in range(vectors, width):
                c = np.uint64(j)
                weights[r, c] = weights[r, c] - (lr * gradient[i, c]) / root
        else:
            start = 0
            for p in range(part_offsets[k], part_offsets[k + 1]):
                end = start + parts[p]
                own = p - part_offsets[k]
                s = state[r, own] + _sum_of_squares(gradient, i, start, end, scratch) / np.float32(parts[p])
                state[r, own] = s
                root = np.sqrt(s) + EPSILON
                for j in range(start, end):
                    weights[r, j] = weights[r, j] - (lr * gradient[i, j]) / root
                start = end


@_compile
def _apply_rowwise(
    weights: np.ndarray, state: np.ndarray, slots: np.ndarray, tables: np.ndarray, gradient: np.ndarray, rates: np.ndarray
) -> None:
    """`_apply` where every table has rows of one part, as wide as the partition and a multiple of COLUMNS, under row-wise Adagrad.

    Without the other cases in its way it takes less than half the time.
    """
    columns, last = weights.shape[1], slots.size - 1
    for i in range(slots.size):
        ahead = np.int64(slots[min(i + _AHEAD, last)])
        for j in range(0, columns, _LINE):
            prefetch(weights, ahead * columns + j)
        prefetch(state, ahead)
        r = np.int64(slots[i])
        s = state[r, 0] + eight_sums_of_squares(gradient, i * columns, columns // 8) / np.float32(columns)
        state[r, 0] = s
        root = np.sqrt(s) + EPSILON
        for j in range(0, columns, COLUMNS):
            descend(gradient, i * columns + j, rates[tables[i]], root, weights, r * columns + j)


class CompiledKernels:
    """Kernels for rows in CPU memory, compiled by numba; they release the GIL."""

    def take_rows(self, rows: Tensor, places: np.ndarray, out: Tensor) -> None:
        take_rows(rows.numpy(), places, out.numpy())

    def put_rows(self, rows: Tensor, places: np.ndarray, values: Tensor) -> None:
        put_rows(values.numpy(), places, rows.numpy())

    def gather_block(
        self,
        rows: Tensor,
        index: np.ndarray,
        offsets: np.ndarray | None,
        layout: BlockLayout,
        block: Tensor,
        places: np.ndarray | None = None,
    ) -> None:
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

    def row_gradients(
        self, gradient: Tensor, index: np.ndarray, offsets: np.ndarray | None, layout: BlockLayout, out: Tensor
    ) -> None:
        values = gradient.contiguous().flatten(0, 1).numpy()
        if offsets is None:
            _scatter_single(values, index, out.numpy())
        else:
            _scatter_bags(values, index, offsets, layout.pooling, out.numpy())

    def add_part(self, total: Tensor, users: np.ndarray, lane: int, part: Tensor) -> None:
        _add_part(total.numpy(), users, np.uint64(lane), part.numpy())

    def apply(
        self, weights: Tensor, state: Tensor, slots: np.ndarray, tables: np.ndarray, gradient: Tensor, rules: UpdateRules
    ) -> None:
        if rules.rowwise and rules.width % COLUMNS == 0:
            _apply_rowwise(weights.numpy(), state.numpy(), slots, tables, gradient.numpy(), rules.rates)
            return
        _apply(
            weights.numpy(),
            state.numpy(),
            slots,
            tables,
            gradient.numpy(),
            rules.kinds,
            rules.rates,
            rules.widths,
            rules.parts,
            rules.part_offsets,
        )


class TorchKernels:
    """Kernels of torch operations, for rows on a CUDA device; on the CPU they serve to compare bits.

    No operation here fuses a product with a sum, and sums over rows run in a fixed order (`segment_reduce`: one thread a sum).
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def _long(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def _segment_sum(self, values: Tensor, lengths: Tensor) -> Tensor:
        # -0 + x = x for every x, so each sum starts from its first term
        return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, initial=-0.0, unsafe=True)

    def take_rows(self, rows: Tensor, places: np.ndarray, out: Tensor) -> None:
        torch.index_select(rows, 0, self._long(places), out=out)

    def put_rows(self, rows: Tensor, places: np.ndarray, values: Tensor) -> None:
        rows.index_copy_(0, self._long(places), values)

    def gather_block(
        self,
        rows: Tensor,
        index: np.ndarray,
        offsets: np.ndarray | None,
        layout: BlockLayout,
        block: Tensor,
        places: np.ndarray | None = None,
    ) -> None:
        if places is not None:
            index = places[index]
        b, features, width = block.shape
        looked_up = rows.index_select(0, self._long(index))
        if offsets is not None:
            lengths = self._long(np.diff(offsets))
            looked_up = self._segment_sum(looked_up, lengths)
            mean = torch.from_numpy(layout.pooling == MEAN).to(self.device).repeat(b)
            looked_up = looked_up / torch.where(mean & (lengths > 0), lengths, 1).to(torch.float32)[:, None]
            looked_up[lengths == 0] = 0.0
        beyond = torch.arange(width, device=self.device) >= self._long(layout.widths)[:, None]
        block.detach().copy_(looked_up.view(b, features, width).masked_fill(beyond, 0.0))

    def row_gradients(
        self, gradient: Tensor, index: np.ndarray, offsets: np.ndarray | None, layout: BlockLayout, out: Tensor
    ) -> None:
        values, places = gradient.flatten(0, 1), self._long(index)
        if offsets is not None:
            lengths = self._long(np.diff(offsets))
            mean = torch.from_numpy(layout.pooling == MEAN).to(self.device).repeat(gradient.shape[0])
            values = values / torch.where(mean & (lengths > 0), lengths, 1).to(torch.float32)[:, None]
            values = values.repeat_interleave(lengths, dim=0, output_size=index.size)
        order = torch.sort(places, stable=True).indices
        counts = self._long(np.bincount(index, minlength=out.shape[0]))
        out.copy_(self._segment_sum(values.index_select(0, order), counts))

    def add_part(self, total: Tensor, users: np.ndarray, lane: int, part: Tensor) -> None:
        mine = np.flatnonzero((users >> np.uint64(lane)) & _ONE)
        places = self._long(mine)
        first = torch.from_numpy(users[mine] & np.uint64((1 << lane) - 1) == 0).to(self.device)
        total.index_copy_(0, places, torch.where(first[:, None], part, total.index_select(0, places) + part))

    def apply(
        self, weights: Tensor, state: Tensor, slots: np.ndarray, tables: np.ndarray, gradient: Tensor, rules: UpdateRules
    ) -> None:
        for k in np.unique(tables):
            rows = np.flatnonzero(tables == k)
            places, width = self._long(slots[rows]), int(rules.widths[k])
            w, s = weights.index_select(0, places), state.index_select(0, places)
            self._update(w, s, gradient.index_select(0, self._long(rows))[:, :width], int(k), rules)
            weights.index_copy_(0, places, w)
            state.index_copy_(0, places, s)

    def _update(self, w: Tensor, s: Tensor, g: Tensor, k: int, rules: UpdateRules) -> None:
        """Update copies of rows of one table in place; python scalars would be float64, so constants are float32 tensors."""
        lr = torch.tensor(rules.rates[k], device=self.device)
        epsilon = torch.tensor(EPSILON, device=self.device)
        width = g.shape[1]
        if rules.kinds[k] == SGD:
            w[:, :width] -= lr * g
        elif rules.kinds[k] == ADAGRAD:
            s[:, :width] += g * g
            w[:, :width] -= (lr * g) / (_root(s[:, :width]) + epsilon)
        elif rules.kinds[k] == ROWWISE_ADAGRAD:
            start = 0
            for own, columns in enumerate(rules.parts[rules.part_offsets[k] : rules.part_offsets[k + 1]].tolist()):
                part = g[:, start : start + columns]
                s[:, own] += _sums_of_squares(part) / torch.tensor(np.float32(columns), device=self.device)
                w[:, start : start + columns] -= (lr * part) / (_root(s[:, own]) + epsilon)[:, None]
                start += columns


def _root(s: Tensor) -> Tensor:
    """The correctly rounded square root, which torch's float32 one is not on the CPU (MKL); rounding twice is harmless here."""
    return torch.sqrt(s.to(torch.float64)).to(torch.float32)


def _sums_of_squares(g: Tensor) -> Tensor:
    """Q of every row of g [n, columns]: float32 [n]."""
    squares = torch.nn.functional.pad(g * g, (0, -g.shape[1] % 8)).unflatten(1, (-1, 8))
    p = squares[:, 0]
    for c in range(1, squares.shape[1]):
        p = p + squares[:, c]
    p = p[:, :4] + p[:, 4:]
    p = p[:, :2] + p[:, 2:]
    return p[:, 0] + p[:, 1]


def kernels_for(device: str, variant: str | None = None) -> Kernels:
    """The kernels for rows on a device: compiled on "cpu", torch elsewhere.

    variant, or else the environment's FORELOAD_KERNELS, chooses between "compiled" and "torch" on the CPU. Raises SettingError.
    """
    variant = variant or os.environ.get("FORELOAD_KERNELS") or ("compiled" if device == "cpu" else "torch")
    if variant == "torch":
        return TorchKernels(device)
    if variant == "compiled" and device == "cpu":
        return CompiledKernels()
    raise SettingError(f"FORELOAD_KERNELS: must be torch, or compiled on the CPU; got {variant!r} on {device}; unset it")
