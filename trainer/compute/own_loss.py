"""A loss of the user's own: found by its name, and tried on synthetic samples."""

from __future__ import annotations

import torch
from torch import Tensor

from foreload.trainer.compute.training_loss import LossFunction, OwnLoss
from foreload.trainer.errors import ModelError
from foreload.trainer.models.diagnosis import first_change, hidden_state
from foreload.trainer.models.generators import seed_torch, states_beside_torch
from foreload.trainer.models.importing import load_named
from foreload.trainer.models.spec import ModelSpec

_SAMPLES = 5
# How much a sample's loss alone may differ from its loss among other samples.
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6


def load_loss(name: str, folder: str = "") -> LossFunction:
    """Return the loss function that package.module:function or file.py:function names.

    It is searched for as models are. Raises ModelError.
    """
    module, _, function_name = name.partition(":")
    if not module or not function_name:
        raise ModelError(f"--loss: must be package.module:function or file.py:function; got {name!r}")
    function: LossFunction = load_named("--loss", name, name, folder)
    if not callable(function) or isinstance(function, type):
        raise ModelError(f"--loss: {name} must be a function of outputs and labels; got {type(function).__name__}")
    return function


def checked_loss(name: str, folder: str, spec: ModelSpec) -> OwnLoss:
    """Return the loss of a name for a model's outputs, after checking it.

    Args:
        name: as in `load_loss`.
        folder: as in `load_loss`.
        spec: describes the outputs of the model.

    Raises:
        ModelError: there is no such loss, or it cannot be trained.
    """
    own = OwnLoss(name, load_loss(name, folder))
    check_loss(own, spec)
    return own


def check_loss(loss: OwnLoss, spec: ModelSpec) -> None:
    """Refuse a loss that cannot be trained.

    A loss must be a finite function of outputs and labels alone, sample by sample. It is tried on
    synthetic samples: outputs around 0, clicks of both kinds, numbers above 0. Raises ModelError.
    """
    what, shape = f"--loss {loss.name}", spec.output_shape(_SAMPLES)
    with torch.random.fork_rng(devices=[]):
        seed_torch(0)
        outputs, labels = torch.randn(shape, requires_grad=True), _synthetic_labels(spec)
        losses = loss(outputs, labels)
        gradient = _gradient(what, losses, outputs)
        for place, value in enumerate((losses, gradient)):
            if not value.isfinite().all():
                raise ModelError(
                    f"{what}: must give finite {('losses', 'gradients')[place]} for synthetic samples (outputs around 0, clicks of both kinds, "
                    f"numbers above 0); got {value[~value.isfinite()][0].item()}; look for a logarithm, root or division of "
                    "a value that may be 0 or less"
                )
        _check_memory(what, loss, losses, outputs, labels)
        for sample in range(_SAMPLES):
            own = slice(sample, sample + 1)
            alone_outputs = outputs.detach()[own].requires_grad_()
            alone = loss(alone_outputs, labels[own])
            both = (losses[own], alone), (gradient[own], _gradient(what, alone, alone_outputs))
            if not all(torch.allclose(one, other, _RELATIVE, _ABSOLUTE) for one, other in both):
                raise ModelError(
                    f"{what}: a sample's loss must not depend on the other samples; alone it is {alone.item():.6g}, among others "
                    f"{losses[sample].item():.6g}; lanes cut a batch into slices, so leave out means and sums over samples"
                )


def _synthetic_labels(spec: ModelSpec) -> Tensor:
    """Return synthetic labels, float32, in the shape of outputs.

    Clicks alternate between 0 and 1, and numbers are from 0.5 to 1.5.
    """
    clicks, numbers = torch.arange(_SAMPLES) % 2, torch.rand(_SAMPLES) + 0.5
    columns = [clicks.float() if kind == "click" else numbers for kind in spec.label_kinds]
    return torch.stack(columns, 1).reshape(spec.output_shape(_SAMPLES))


def _check_memory(what: str, loss: OwnLoss, losses: Tensor, outputs: Tensor, labels: Tensor) -> None:
    """Refuse a loss that depends on earlier calls.

    Args:
        losses: the result of the first call.

    Raises:
        ModelError: a further call gives another result, draws random numbers or changes an
            attribute.
    """
    drawn, states = states_beside_torch(), []
    for _ in range(2):
        if not torch.equal(losses, loss(outputs, labels)) or states_beside_torch() != drawn:
            raise ModelError(f"{what}: two calls with the same samples differ; it must keep no state, and draw no random numbers")
        states.append(hidden_state(loss.function))
    if change := first_change(*states):
        raise ModelError(f"{what}: must keep no state; it changes an attribute from call to call: {change}")


def _gradient(what: str, losses: Tensor, outputs: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(losses.sum(), [outputs], allow_unused=True) if losses.requires_grad else (None,)
    if gradient is None:
        raise ModelError(
            f"{what}: must have a gradient with respect to the outputs; compute it from them with torch's operations, without detach or no_grad"
        )
    return gradient
