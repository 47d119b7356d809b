"""`Kernels` of torch operations, for rows on a CUDA device.

On the CPU they serve to compare bits. No operation here fuses a product with a sum, and sums over
rows run in a fixed order (`segment_reduce`: one thread per sum). Before and after each operation
are as `Kernels` says. Where a loop would go from row to row, rows are sorted or cut into segments
first.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foreload.cache.rows.device_copies import put_distinct, upload
from foreload.trainer.compute.kernels import Kernels
from foreload.trainer.compute.layouts import MEAN, BlockLayout, Lookups, UpdateRules
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
    ROWWISE_ADAGRAD,
    SECOND,
    SGD,
)

_ONE = np.uint64(1)


class TorchKernels(Kernels):
    """`Kernels` for rows on `device`, which is one of torch's names (cpu, cuda, cuda:0)."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def _places(self, places: np.ndarray) -> Tensor:
        return upload(places, self.device, torch.int64)

    def _segment_sum(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the sums of consecutive rows, in order.

        Args:
            values: float32 [sum of lengths, W].
            lengths: int64 [segments].

        Returns:
            float32 [segments, W], with -0 for an empty segment.
        """
        # -0 + x = x for every x, so each sum starts from its first term.
        return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, initial=-0.0, unsafe=True)

    def take_rows(self, rows: Tensor, places: np.ndarray, out: Tensor) -> None:
        torch.index_select(rows, 0, self._places(places), out=out)

    def put_rows(self, rows: Tensor, places: np.ndarray, values: Tensor) -> None:
        put_distinct(rows, self._places(places), values)

    def gather_block(self, rows: Tensor, lookups: Lookups, block: Tensor, places: np.ndarray | None = None) -> None:
        layout, out = lookups.layout, block.detach()
        b, features, width = block.shape
        index = self._places(lookups.index)
        if places is not None:
            index = self._places(places).index_select(0, index)
        if lookups.offsets is None and layout.equal:
            torch.index_select(rows, 0, index, out=out.view(len(index), width))
            return
        looked_up = rows.index_select(0, index)
        if lookups.offsets is not None:
            lengths = self._places(np.diff(lookups.offsets))
            looked_up = self._segment_sum(looked_up, lengths) / self._divisors(layout, lengths)
            looked_up[lengths == 0] = 0.0
        beyond = torch.arange(width, device=self.device) >= self._places(layout.widths)[:, None]
        out.copy_(looked_up.view(b, features, width).masked_fill(beyond, 0.0))

    def _divisors(self, layout: BlockLayout, lengths: Tensor) -> Tensor:
        """Return what each bag's sum is divided by, float32 [bags, 1], by the bags' lengths."""
        mean = upload(layout.pooling == MEAN, self.device, torch.bool).repeat(lengths.numel() // layout.pooling.size)
        return torch.where(mean & (lengths > 0), lengths, 1).to(torch.float32)[:, None]

    def row_gradients(self, gradient: Tensor, lookups: Lookups, out: Tensor) -> None:
        offsets, values = lookups.offsets, gradient.flatten(0, 1)
        if offsets is not None:
            lengths = self._places(np.diff(offsets))
            values = values / self._divisors(lookups.layout, lengths)
            values = values.repeat_interleave(lengths, dim=0, output_size=lookups.index.size)
        # The sort is stable, so that the terms of a row stay in the order of lookups.
        rows, order = torch.sort(upload(lookups.index, self.device, torch.int32), stable=True)
        bounds = torch.searchsorted(rows, torch.arange(out.shape[0] + 1, dtype=torch.int32, device=self.device))
        out.copy_(self._segment_sum(values.index_select(0, order), torch.diff(bounds)))

    def add_part(self, total: Tensor, users: np.ndarray, lane: int, part: Tensor) -> None:
        used = np.flatnonzero((users >> np.uint64(lane)) & _ONE)
        places = self._places(used)
        # A row that no lower lane uses may hold anything, so its first part replaces the contents.
        first = upload(users[used] & np.uint64((1 << lane) - 1) == 0, self.device, torch.bool)
        put_distinct(total, places, torch.where(first[:, None], part, total.index_select(0, places) + part))

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
        places = self._places(slots)
        w, s = weights.index_select(0, places), state.index_select(0, places)
        if before is not None:
            before[0].copy_(w)
            before[1].copy_(s)
        groups = _tables_alike(rules)
        by_table = upload(np.vstack([rules.rates, rules.constants.T]), self.device)
        by_row = by_table.index_select(1, self._places(tables))
        rates, constants = by_row[0], by_row[1:]
        if rules.penalised.any():
            penalty = (gradient + constants[PENALTY_L2][:, None] * w) + constants[PENALTY_L1][:, None] * torch.sign(w)
            columns = self._places(rules.penalised[tables])[:, None]
            gradient = torch.where(torch.arange(w.shape[1], device=self.device) < columns, penalty, gradient)
        if len(groups) == 1:
            _update(w, s, gradient, rates, constants, rules, groups[0][0])
        else:
            group_of = np.empty(len(rules.kinds), np.int64)
            for number, alike in enumerate(groups):
                group_of[alike] = number
            group_of_row = group_of[tables]
            for number, alike in enumerate(groups):
                rows = self._places(np.flatnonzero(group_of_row == number))
                own_w, own_s = w.index_select(0, rows), s.index_select(0, rows)
                own = gradient.index_select(0, rows), rates.index_select(0, rows), constants.index_select(1, rows)
                _update(own_w, own_s, *own, rules, alike[0])
                put_distinct(w, rows, own_w)
                put_distinct(s, rows, own_s)
        put_distinct(weights, places, w)
        put_distinct(state, places, s)


def _tables_alike(rules: UpdateRules) -> list[list[int]]:
    """Return the tables in groups: those of a group have the same optimizer and the same parts."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for k, kind in enumerate(rules.kinds.tolist()):
        parts = rules.parts[rules.part_offsets[k] : rules.part_offsets[k + 1]].tolist()
        groups.setdefault((kind, *parts), []).append(k)
    return list(groups.values())


def _update(w: Tensor, s: Tensor, g: Tensor, rates: Tensor, constants: Tensor, rules: UpdateRules, k: int) -> None:
    """Update copies of rows in place. All their tables have the optimizer and the parts of table k.

    Python scalars would be float64, so rates and constants are float32 tensors.

    Args:
        w: the weights, float32 [n, W].
        s: the states, float32 [n, S].
        g: the gradients, float32 [n, W].
        rates: the learning rate of each row's table, float32 [n].
        constants: the other constants of each row's table, float32 [CONSTANTS, n].
    """
    kind, width = rules.kinds[k], int(rules.widths[k])
    lr, c, g = rates[:, None], constants[:, :, None], g[:, :width]
    if kind == SGD:
        w[:, :width] -= lr * g
    elif kind == ADAGRAD:
        s[:, :width] = c[DECAY] * s[:, :width] + g * g
        w[:, :width] -= (lr * g) / (_root(s[:, :width]) + c[EPSILON])
    elif kind == ADAM:
        _adam(w[:, :width], s[:, :width], s[:, width : 2 * width], g, lr, c)
    elif kind == FTRL:
        _ftrl(w[:, :width], s[:, :width], s[:, width : 2 * width], g, lr, c)
    elif kind == ROWWISE_ADAGRAD:
        start = 0
        for own, columns in enumerate(rules.parts[rules.part_offsets[k] : rules.part_offsets[k + 1]].tolist()):
            part, total = g[:, start : start + columns], s[:, own : own + 1]
            # As a tensor, since torch multiplies by a scalar's inverse on CUDA.
            mean = _sums_of_squares(part)[:, None] / torch.full((), float(columns), device=w.device)
            total.copy_(c[DECAY] * total + mean)
            w[:, start : start + columns] -= (lr * part) / (_root(total) + c[EPSILON])
            start += columns
    else:
        raise AssertionError(f"row optimizer {kind} has no update")


def _adam(w: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: Tensor, c: Tensor) -> None:
    """Run Adam in place.

    Args:
        w: the weights, [n, width], as all the others.
        m: the first moments.
        v: the second moments.
        g: the gradients.
        lr: the learning rate of each row, corrected for the step, [n, 1].
        c: the constants of each row, [CONSTANTS, n, 1].
    """
    m.copy_(c[FIRST] * m + c[FIRST + 1] * g)
    v.copy_(c[SECOND] * v + c[SECOND + 1] * (g * g))
    w -= (lr * m) / (_root(v) * c[ROOT] + c[EPSILON])


def _ftrl(w: Tensor, z: Tensor, n: Tensor, g: Tensor, lr: Tensor, c: Tensor) -> None:
    """Run FTRL-Proximal in place. Rows whose rate is 0 stay as they are.

    Args:
        w: the weights, [n, width], as all the others.
        z: the state z.
        n: the state n.
        g: the gradients.
        lr: the learning rate of each row, [n, 1].
        c: the constants of each row, [CONSTANTS, n, 1].
    """
    now = n + g * g
    root = _root(now)
    sigma = (root - _root(n)) / lr
    moved = z + (g - sigma * w)
    changed = (torch.copysign(c[L1], moved) - moved) / ((c[BETA] + root) / lr + c[L2])
    learns = lr > 0
    w.copy_(torch.where(learns, torch.where(moved.abs() <= c[L1], 0.0, changed), w))
    z.copy_(torch.where(learns, moved, z))
    n.copy_(torch.where(learns, now, n))


def _root(s: Tensor) -> Tensor:
    """Return the correctly rounded float32 square root.

    torch's float32 root is not correctly rounded on the CPU (MKL). Rounding twice, to float64 and
    then to float32, gives the correct result, since float64 has more than twice the digits.
    """
    return torch.sqrt(s.to(torch.float64)).to(torch.float32)


def _sums_of_squares(g: Tensor) -> Tensor:
    """Return Q of every row of g [n, columns]: float32 [n]."""
    squares = torch.nn.functional.pad(g * g, (0, -g.shape[1] % 8)).unflatten(1, (-1, 8))
    p = squares[:, 0]
    for c in range(1, squares.shape[1]):
        p = p + squares[:, c]
    p = p[:, :4] + p[:, 4:]
    p = p[:, :2] + p[:, 2:]
    return p[:, 0] + p[:, 1]
