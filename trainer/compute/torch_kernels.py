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

    def _long(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

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
        torch.index_select(rows, 0, self._long(places), out=out)

    def put_rows(self, rows: Tensor, places: np.ndarray, values: Tensor) -> None:
        rows.index_copy_(0, self._long(places), values)

    def gather_block(self, rows: Tensor, lookups: Lookups, block: Tensor, places: np.ndarray | None = None) -> None:
        offsets, layout = lookups.offsets, lookups.layout
        index = lookups.index if places is None else places[lookups.index]
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

    def row_gradients(self, gradient: Tensor, lookups: Lookups, out: Tensor) -> None:
        index, offsets, layout = lookups.index, lookups.offsets, lookups.layout
        values, places = gradient.flatten(0, 1), self._long(index)
        if offsets is not None:
            lengths = self._long(np.diff(offsets))
            mean = torch.from_numpy(layout.pooling == MEAN).to(self.device).repeat(gradient.shape[0])
            values = values / torch.where(mean & (lengths > 0), lengths, 1).to(torch.float32)[:, None]
            values = values.repeat_interleave(lengths, dim=0, output_size=index.size)
        # The sort is stable, so that the terms of a row stay in the order of lookups.
        order = torch.sort(places, stable=True).indices
        counts = self._long(np.bincount(index, minlength=out.shape[0]))
        out.copy_(self._segment_sum(values.index_select(0, order), counts))

    def add_part(self, total: Tensor, users: np.ndarray, lane: int, part: Tensor) -> None:
        used = np.flatnonzero((users >> np.uint64(lane)) & _ONE)
        places = self._long(used)
        # A row that no lower lane uses may hold anything, so its first part replaces the contents.
        first = torch.from_numpy(users[used] & np.uint64((1 << lane) - 1) == 0).to(self.device)
        total.index_copy_(0, places, torch.where(first[:, None], part, total.index_select(0, places) + part))

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
        if before is not None:
            for source, kept in zip((weights, state), before, strict=True):
                kept.copy_(source.index_select(0, self._long(slots)))
        for k in np.unique(tables):
            rows = np.flatnonzero(tables == k)
            places, width = self._long(slots[rows]), int(rules.widths[k])
            w, s = weights.index_select(0, places), state.index_select(0, places)
            self._update(w, s, gradient.index_select(0, self._long(rows))[:, :width], int(k), rules)
            weights.index_copy_(0, places, w)
            state.index_copy_(0, places, s)

    def _update(self, w: Tensor, s: Tensor, g: Tensor, k: int, rules: UpdateRules) -> None:
        """Update copies of rows of table k in place.

        Python scalars would be float64, so rates and constants are float32 tensors.

        Args:
            w: the weights, float32 [n, W].
            s: the states, float32 [n, S].
            g: the gradients, float32 [n, width of the table].
        """
        lr, c = (torch.from_numpy(values[k : k + 1].copy()).to(self.device) for values in (rules.rates, rules.constants))
        lr, c = lr[0], c[0]
        kind, width = rules.kinds[k], g.shape[1]
        if kind == SGD:
            w[:, :width] -= lr * g
        elif kind == ADAGRAD:
            s[:, :width] = c[DECAY] * s[:, :width] + g * g
            w[:, :width] -= (lr * g) / (_root(s[:, :width]) + c[EPSILON])
        elif kind == ADAM:
            _adam(w[:, :width], s[:, :width], s[:, width : 2 * width], g, lr, c)
        elif kind == FTRL:
            if rules.rates[k] > 0:
                _ftrl(w[:, :width], s[:, :width], s[:, width : 2 * width], g, lr, c)
        elif kind == ROWWISE_ADAGRAD:
            start = 0
            for own, columns in enumerate(rules.parts[rules.part_offsets[k] : rules.part_offsets[k + 1]].tolist()):
                part = g[:, start : start + columns]
                mean = _sums_of_squares(part) / torch.tensor(np.float32(columns), device=self.device)
                s[:, own] = c[DECAY] * s[:, own] + mean
                w[:, start : start + columns] -= (lr * part) / (_root(s[:, own]) + c[EPSILON])[:, None]
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
        lr: the learning rate, corrected for the step.
        c: the constants.
    """
    m.copy_(c[FIRST] * m + c[FIRST + 1] * g)
    v.copy_(c[SECOND] * v + c[SECOND + 1] * (g * g))
    w -= (lr * m) / (_root(v) * c[ROOT] + c[EPSILON])


def _ftrl(w: Tensor, z: Tensor, n: Tensor, g: Tensor, lr: Tensor, c: Tensor) -> None:
    """Run FTRL-Proximal in place.

    Args:
        w: the weights, [n, width], as all the others.
        z: the state z.
        n: the state n.
        g: the gradients.
        lr: the learning rate, above 0.
        c: the constants.
    """
    now = n + g * g
    root = _root(now)
    sigma = (root - _root(n)) / lr
    z.copy_(z + (g - sigma * w))
    n.copy_(now)
    changed = (torch.copysign(c[L1], z) - z) / ((c[BETA] + root) / lr + c[L2])
    w.copy_(torch.where(z.abs() <= c[L1], 0.0, changed))


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
