"""The dense part of a model as a program of torch.export or ONNX.

Such a program needs neither the class of the model nor foreload.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from foreload.trainer.compute.layouts import BlockLayout
from foreload.trainer.errors import ExportError
from foreload.trainer.models.diagnosis import check_apart
from foreload.trainer.models.generators import seed_torch
from foreload.trainer.models.layers import takes_step
from foreload.trainer.models.own_losses import outputs_of
from foreload.trainer.serving.plain_files import read_program

# The numbers of synthetic samples: for the trace, and for the trials of a written program.
_TRACED, _TRIED = 5, (1, 3, 64)
# The tolerance between the logits of the module and of ONNX, which runs on other kernels.
_NEAR_ONNX = 1e-3
# The relative and absolute tolerance between the logits of the module and of the program, for which
# torch may choose other products.
_NEAR = 1e-5
_MOST_TEXT = 300  # characters of torch's message in an error
_ONNX_PACKAGES = ("onnx", "onnxscript")


class BlockModel(nn.Module):
    """A model of (dense [b, n], block [b, F, W]).

    It cuts the embeddings of each feature out of the block, as in training.

    Args:
        module: the model.
        layout: the layout of the block.
        steps_done: the number of steps that the model was trained for. It is a constant of the
            program if forward takes the step.
    """

    def __init__(self, module: nn.Module, layout: BlockLayout, steps_done: int) -> None:
        super().__init__()
        self.module, self._layout = module, layout
        self._given = {"step": steps_done} if takes_step(module) else {}

    def forward(self, dense: Tensor, block: Tensor) -> Tensor:
        """Return the logits [b], or [b, L] for several labels."""
        logits: Tensor = outputs_of(self.module(dense, self._layout.embeddings(block), **self._given))
        return logits


def check_dense(model: BlockModel, dense_width: int, name: str) -> None:
    """Refuse to export a model whose outputs depend on other samples, with its trained parameters.

    Raises:
        ModelError: an output depends on other samples.
    """

    def forward(dense: Tensor, block: Tensor) -> Tensor:
        seed_torch(0)
        logits: Tensor = model(dense, block)
        return logits

    with torch.random.fork_rng(devices=[]):
        check_apart(name, model, forward, *synthetic_inputs(model, dense_width, _TRACED))


def check_onnx() -> None:
    """Raise ExportError if the packages that write ONNX are not installed."""
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"--onnx: needs {' and '.join(missing)}, which is not installed: pip install 'foreload[onnx]'")


def trace(model: BlockModel, dense_width: int, name: str) -> torch.export.ExportedProgram:
    """Trace a model in evaluation mode, for any number of samples.

    Args:
        dense_width: the number of dense values.
        name: the name of the model, for errors.

    Raises:
        ExportError: torch.export cannot follow forward.
    """
    batch = torch.export.Dim("batch")
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(
                model, synthetic_inputs(model, dense_width, _TRACED), dynamic_shapes=({0: batch}, {0: batch})
            )
    except Exception as error:  # a user's module may do anything
        raise ExportError(
            f"--format torch: torch.export cannot follow forward of {name}: {type(error).__name__}: {_reason(error)}; use only operations of "
            "torch on tensors of any number of samples, or give --dense weights, for its parameters alone"
        ) from error
    # Example inputs would be the only pickled part of the file.
    program.example_inputs = None
    return program


def write_program(program: torch.export.ExportedProgram, path: Path, model: BlockModel, dense_width: int, name: str) -> None:
    """Write a program, and compare the written file with the module.

    Args:
        program: the program of the model.
        path: the file to write.
        dense_width: the number of dense values.
        name: the name of the model, for errors.

    Raises:
        ExportError: the program gives other logits, or cannot be loaded without unpickling.
        OSError: the file cannot be written.
    """
    with _quiet():
        torch.export.save(program, path)
        try:
            written = read_program(path)
        except ValueError as error:
            raise ExportError(
                f"--format torch: {name} has weights or constants that torch {torch.__version__} pickles ({error}); make them "
                "plain tensors, use a newer torch, or give --dense weights, "
                "for its parameters alone"
            ) from error
    for samples in _TRIED:
        given = synthetic_inputs(model, dense_width, samples)
        with torch.no_grad():
            wanted, got = model(*given), written(*given)
        if wanted.shape != got.shape or not torch.allclose(wanted, got, rtol=_NEAR, atol=_NEAR):
            raise ExportError(
                f"--format torch: forward of {name} gives other logits than the program that torch.export made of it, "
                f"for {samples} synthetic samples; it depends "
                "on more than its inputs' values, such as how many there are; give --dense weights, for its parameters alone"
            )


def write_onnx(program: torch.export.ExportedProgram, path: Path, model: BlockModel, dense_width: int, name: str) -> None:
    """Write a program as ONNX, for any number of samples.

    Its inputs are dense and block, and its output is logits. If onnxruntime is installed, it runs
    the written file.

    Args:
        program: the program of the model.
        path: the file to write.
        dense_width: the number of dense values.
        name: the name of the model, for errors.

    Raises:
        ExportError: the program cannot be written as ONNX, or onnxruntime cannot run it or gives
            other logits.
        OSError: the file cannot be written.
    """
    try:
        with _quiet():
            written = torch.onnx.export(
                program, dynamo=True, input_names=["dense", "block"], output_names=["logits"], verbose=False
            )
        assert written is not None
        written.save(path)
    except OSError:
        raise
    except Exception as error:
        raise ExportError(
            f"--onnx: the operations of {name} cannot be written as ONNX: {type(error).__name__}: {_reason(error)}; leave it out"
        ) from error
    if importlib.util.find_spec("onnxruntime") is not None:
        _try_onnx(path, model, dense_width, name)


def _try_onnx(path: Path, model: BlockModel, dense_width: int, name: str) -> None:
    # Without this, onnxruntime sends telemetry and leaves a file in the temporary folder. A value
    # that is already set is kept.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        # The program lacks the inputs that the model does not use.
        wanted_inputs = {given.name for given in session.get_inputs()}
        for samples in _TRIED:
            given = dict(zip(("dense", "block"), synthetic_inputs(model, dense_width, samples), strict=True))
            (got,) = session.run(["logits"], {key: value.numpy() for key, value in given.items() if key in wanted_inputs})
            with torch.no_grad():
                wanted = model(**given).numpy()
            if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=_NEAR_ONNX, atol=_NEAR_ONNX):
                raise ExportError(
                    f"--onnx: onnxruntime gives other logits for the exported {name} than its forward, for {samples} samples; leave it out"
                )
    except ExportError:
        raise
    except Exception as error:  # the exceptions of onnxruntime have no common class
        raise ExportError(
            f"--onnx: onnxruntime {onnxruntime.__version__} cannot run on the CPU the exported {name}: {_reason(error)}; use operations in "
            "float32, or leave it out"
        ) from error


def synthetic_inputs(model: BlockModel, dense_width: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return synthetic dense values [samples, n] and a synthetic block [samples, F, W].

    The values are a function of the number of samples.
    """
    generator = torch.Generator().manual_seed(samples)
    layout = model._layout
    return (
        torch.randn(samples, dense_width, generator=generator),
        torch.randn(samples, len(layout.names), layout.width, generator=generator),
    )


def _reason(error: Exception) -> str:
    """Return the message of an error of torch in one line.

    Only the first two lines are used. The lines after them describe how to debug the error.
    """
    lines = [line.strip(" -.") for line in str(error).splitlines() if line.strip()]
    return f"{': '.join(lines[:2]):.{_MOST_TEXT}}" or "no reason given"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings and logs of torch's compiler within the context."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
