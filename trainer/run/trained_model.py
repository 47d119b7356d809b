"""A saved run's model, to be asked: its rows by table and id, trained or initial, and its logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foreload.cache.protocol.reading import Expected, read_rows
from foreload.cache.rows.initial import initial_weights
from foreload.pipelines.schedule.kept import ordinals_after
from foreload.pipelines.schedule.row_index import RowIndex
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.compute.layouts import BlockLayout, Lookups, model_spec
from foreload.trainer.models import build_model, load_model
from foreload.trainer.run.dense_file import load_parameters
from foreload.trainer.run.saved_run import SavedRun


class ModelRowReader:
    """The rows of a saved run's tables, also those that were never trained."""

    def __init__(self, saved: SavedRun) -> None:
        self._saved = saved
        self._index = RowIndex(saved.schedule)
        self._ordinals = None
        if saved.status.step < saved.schedule.header.end_step - 1:
            self._ordinals = ordinals_after(saved.schedule, saved.status.step)

    def read(self, table: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights float32 [n, W] of the rows with these ids (int64 [n], each once), and whether each was trained (bool [n]); else they are initial.

        Raises RowError and StoreError.
        """
        saved = self._saved
        layout = saved.layouts[table]
        weights = np.zeros((len(ids), layout.width), np.float32)
        initial_weights(saved.job.seed, table, np.ascontiguousarray(ids), layout.scale, weights, layout.init_columns)
        trained = np.zeros(len(ids), bool)
        located = self._index.find(table, ids)
        reached = np.ones(len(located.places), bool)
        if self._ordinals is not None:
            reached = located.ordinal < self._ordinals[located.lane, table]
        for lane in np.unique(located.lane[reached]):
            chosen = np.flatnonzero(reached & (located.lane == lane))
            tags = np.minimum(located.tag[chosen], saved.status.step + 1)
            # The last change of a row that changes after the run's step is not known, so any tag up to that is taken.
            tables = np.full(len(chosen), table, np.int16)
            expected = Expected(tables, located.ordinal[chosen], located.id[chosen], tags, int(lane), tag_at_most=True)
            read = read_rows(saved.stored, expected, saved.last_batches[lane]).weights
            weights[located.places[chosen]] = read[:, : layout.width]
            trained[located.places[chosen]] = True
        return weights, trained


class DenseForward:
    """The dense part of a saved run, applied to slices. The process must be under the run's numerics."""

    def __init__(self, saved: SavedRun) -> None:
        job, features = saved.job, saved.schedule.header.features
        self._layout = BlockLayout.of(features, saved.layouts)
        self._kernels = kernels_for("cpu")
        module = build_model(load_model(job.model, job.model_folder), model_spec(features, job.dim), job.model_options, job.seed)
        load_parameters(module, saved.dense()[0])
        self._module = module.eval()

    def logits(self, rows: np.ndarray | Tensor, index: np.ndarray, offsets: np.ndarray | None, dense: np.ndarray) -> Tensor:
        """Logits float32 [b] of a slice. rows: float32 [U, W of the widest table]; index, offsets: as Lookups has them; dense: float32 [b, n]."""
        block = torch.empty((len(dense), len(self._layout.names), self._layout.width))
        values = torch.empty(dense.shape, dtype=torch.float32)
        # A mapped view may lie at any address, and the bits of a product depend on its alignment.
        values.numpy()[...] = dense
        distinct_rows = torch.as_tensor(rows)
        self._kernels.gather_block(distinct_rows, Lookups(index, offsets, self._layout), block)
        with torch.no_grad():
            logits: Tensor = self._module(values, self._layout.embeddings(block))
        return logits
