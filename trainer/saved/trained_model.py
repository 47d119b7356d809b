"""A stopped run's or checkpoint's model, to be evaluated: its dense part, and its outputs."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor, nn

from foreload.trainer.assembly.dense_file import load_parameters, tensors
from foreload.trainer.compute.choose_kernels import kernels_for
from foreload.trainer.compute.dense_average import to_serve
from foreload.trainer.compute.layouts import BlockLayout, Lookups, model_spec
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.diagnosis import mixes_samples
from foreload.trainer.models.inference import in_tiles
from foreload.trainer.models.layers import takes_step
from foreload.trainer.models.own_losses import outputs_of
from foreload.trainer.saved.saved_model import SavedModel


def dense_module(model: SavedModel) -> nn.Module:
    """Return a model's trained dense part, on the CPU, in evaluation mode. Raises ModelError."""
    torch.set_num_threads(1)
    job = model.job
    spec = model_spec(model.features, job.dim)
    built = load_model(job.model, job.model_folder)
    model.check_code()
    module = build_model(built, spec, job.model_options, job.seed)
    load_parameters(module, tensors(to_serve(*model.dense())))
    return module.eval()


class DenseForward:
    """The dense part of a model, applied to slices.

    The process must have the run's numerics.

    Attributes:
        mixes_samples: Whether outputs depend on the other samples of a slice, as the model's class
            declares.
    """

    def __init__(self, model: SavedModel) -> None:
        self._layout = BlockLayout.of(model.features, model.layouts)
        self._kernels = kernels_for("cpu")
        self._module = dense_module(model)
        self._given = {"step": model.step + 1} if takes_step(self._module) else {}
        self.mixes_samples = mixes_samples(self._module)
        self._name = model.job.model

    def note_mixing(self, what: str) -> None:
        """Report on stderr if the model mixes samples.

        Args:
            what: An output, as the command calls it.
        """
        if self.mixes_samples:
            sys.stderr.write(
                f"foreload: note: {self._name} declares mixes_samples: {what} depends on the records around it, as many as a slice has in training\n"
            )

    def outputs(self, rows: np.ndarray | Tensor, index: np.ndarray, offsets: np.ndarray | None, dense: np.ndarray) -> Tensor:
        """Return the outputs of forward for a slice, float32 [b] or [b, labels].

        The slice is cut into tiles, unless the model mixes samples.

        Args:
            rows: float32 [U, W of the widest table].
            index: As in Lookups.
            offsets: As in Lookups.
            dense: float32 [b, n].
        """
        block = torch.empty((len(dense), len(self._layout.names), self._layout.width))
        values = torch.empty(dense.shape, dtype=torch.float32)
        # Copy the values. A mapped view may lie at any address, and the bits of a product depend on
        # its alignment.
        values.numpy()[...] = dense
        distinct_rows = torch.as_tensor(rows)
        self._kernels.gather_block(distinct_rows, Lookups(index, offsets, self._layout), block)
        with torch.no_grad():
            return self._run(values, block) if self.mixes_samples else in_tiles(self._run, values, block)

    def _run(self, dense: Tensor, block: Tensor) -> Tensor:
        outputs: Tensor = outputs_of(self._module(dense, self._layout.embeddings(block), **self._given))
        return outputs
