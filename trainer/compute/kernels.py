"""The kernels' interface, the arithmetic of rows: pooling lookups into the embedding block, gradients per row, their sum over lanes, updates.

Two implementations of one interface with the same bits (docs/definitions.md, A step's arithmetic): `compiled_kernels`, loops for rows in CPU
memory, and `torch_kernels`, torch operations for rows on any device. Floating-point data are torch tensors, on the kernels' device; index arrays
are NumPy arrays, which may be read-only views of mapped files. `W` is the width of the widest row of all tables; a bag is what one sample looks
up of one feature. Columns beyond a row's own width are never read into a result.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from foreload.trainer.compute.layouts import Lookups, UpdateRules


class Kernels(Protocol):
    """What a training step does with rows, wherever they live. Index arrays are within bounds; nobody checks them again."""

    def take_rows(self, rows: Tensor, places: np.ndarray, out: Tensor) -> None:
        """out[i] = rows[places[i]]. rows float32 [n, W]; places int32 [m], each in 0 .. n-1, repeated at will; out float32 [m, W]."""

    def put_rows(self, rows: Tensor, places: np.ndarray, values: Tensor) -> None:
        """rows[places[i]] = values[i], the other rows as they were; places int32 [m] without repetition."""

    def gather_block(self, rows: Tensor, lookups: Lookups, block: Tensor, places: np.ndarray | None = None) -> None:
        """Fill the embedding block [b, F, W]: each feature of each sample has its bag's rows, added from the first on, then divided if MEAN.

        The local rows are rows float32 [n, W] or, of them, those at `places` int32 [local rows]. Before: every index is that of a local row; what
        is in the block does not matter. After: all of it is written, zeros beyond a table's width and for an empty bag; where every feature has one
        value the rows are copied bit for bit.
        """

    def row_gradients(self, gradient: Tensor, lookups: Lookups, out: Tensor) -> None:
        """Sum the block's gradient [b, F, W] per local row, in the order of lookups from the first, into out [local rows, W].

        Before: what is in out does not matter. After: the first term of each sum is in it as it was (-0 stays -0), the others were added to it one
        by one; a term of a MEAN bag is divided by the bag's length before it is added. Columns beyond a row's width hold what the gradient has there,
        which nobody reads; a row that no lookup names is -0.
        """

    def add_part(self, total: Tensor, users: np.ndarray, lane: int, part: Tensor) -> None:
        """Add a lane's gradients of the owned rows it uses; to be called for the lanes in ascending order.

        total: float32 [U, W]; users: unsigned [U], bit v: lane v uses the row; part: float32 [rows with the lane's bit, W], in the order of the
        owner's list, which has all U. Before: of each lane below this one that uses a row, total has its part; a row that none of them uses may hold
        anything. After: the same of the lanes up to this one; so no row needs to be zero first, and the first part is there bit for bit.
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
        """One update of each row weights[slots[i]] and state[slots[i]] by gradient[i], by the rule of its table.

        weights: float32 [slots, W]; state: float32 [slots, S], S the widest state; slots: int32 [U] without repetition; tables: int16 [U]; gradient:
        float32 [U, W]. After: every row in `slots` is one step further within its table's columns; what lies beyond them, and all other slots, are as
        before. before: float32 [U, W] and [U, S], which then have these rows' weights and state as they were.
        """
