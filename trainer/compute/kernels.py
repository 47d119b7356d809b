"""The interface of the kernels, which do the arithmetic of rows.

Kernels pool lookups into the embedding block, sum gradients per row and over lanes, and update
rows. Two implementations have the same bits (docs/definitions.md, A step's arithmetic):
`compiled_kernels`, loops for rows in CPU memory, and `torch_kernels`, torch operations for rows on
any device.

Floating-point data are torch tensors on the kernels' device. Index arrays are NumPy arrays, which
may be read-only views of mapped files. `W` is the width of the widest row of all tables. A bag is
what one sample looks up of one feature. Columns beyond a row's own width never enter a result.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from foreload.trainer.compute.layouts import Lookups, UpdateRules


class Kernels(Protocol):
    """What a training step does with rows, regardless of the device that has them.

    Index arrays must be within bounds: the kernels do not check them.
    """

    def take_rows(self, rows: Tensor, places: np.ndarray, out: Tensor) -> None:
        """Set `out[i] = rows[places[i]]`.

        Args:
            rows: float32 [n, W].
            places: int32 [m], each in 0 .. n-1. Places may repeat.
            out: float32 [m, W].
        """

    def put_rows(self, rows: Tensor, places: np.ndarray, values: Tensor) -> None:
        """Set `rows[places[i]] = values[i]`, and leave the other rows as they are.

        Args:
            rows: float32 [n, W].
            places: int32 [m], without repetition.
            values: float32 [m, W].
        """

    def gather_block(self, rows: Tensor, lookups: Lookups, block: Tensor, places: np.ndarray | None = None) -> None:
        """Fill the embedding block [b, F, W] with the pooled rows of each sample and feature.

        Each entry is the sum of the bag's rows, added from the first on, and divided by their
        number if the pooling is MEAN.

        Before: every index is that of a local row. The contents of the block do not matter.

        After: all of the block is written. It has zeros beyond a table's width and for an empty
        bag. If every feature has one value, the rows are copied bit for bit.

        Args:
            rows: float32 [n, W], which has the local rows.
            block: float32 [b, F, W].
            places: int32 [local rows], the places of the local rows in `rows`. If None, the local
                rows are all of `rows`.
        """

    def row_gradients(self, gradient: Tensor, lookups: Lookups, out: Tensor) -> None:
        """Sum the block's gradient per local row, in the order of lookups from the first.

        Before: the contents of `out` do not matter.

        After: the first term of each sum was taken as it is (-0 stays -0), and the others were
        added to it one by one. A term of a MEAN bag was divided by the bag's length before it was
        added. Columns beyond a row's width hold what the gradient has there, and nothing reads
        them. A row without any lookup is -0.

        Args:
            gradient: float32 [b, F, W].
            out: float32 [local rows, W].
        """

    def add_part(self, total: Tensor, users: np.ndarray, lane: int, part: Tensor) -> None:
        """Add a lane's gradients of the owned rows that it uses.

        The caller goes through the lanes in ascending order.

        Before: for each row, `total` has the sum of the parts of all lower lanes that use it. A row
        that none of them uses may hold anything.

        After: the same holds for the lanes up to this one. So no row needs to be zeroed first, and
        a row's first part is copied bit for bit.

        Args:
            total: float32 [U, W], for the owner's list of rows.
            users: unsigned [U]. Bit v is set if lane v uses the row.
            part: float32 [rows with the lane's bit, W], in the order of the owner's list.
        """

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
        """Update each row `weights[slots[i]]`, `state[slots[i]]` once by `gradient[i]`.

        The rule is that of the row's table, whose penalties are first added to the gradient.

        After: every row in `slots` is one step further within its table's columns. The columns
        beyond them and all other slots are as before.

        Args:
            weights: float32 [slots, W].
            state: float32 [slots, S], S being the widest state.
            slots: int32 [U], without repetition.
            tables: int16 [U], the tables of these rows.
            gradient: float32 [U, W], which may be changed.
            before: float32 [U, W] and [U, S], which receive the old weights and states of these
                rows. If None, these are not kept.
        """
