"""Try a model on synthetic samples.

Checks that its training is a function only of its parameters, the slice, the step and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.diagnosis import (
    check_apart,
    check_outputs,
    first_change,
    first_not_finite,
    hidden_state,
    mixes_samples,
    not_finite_gradient,
    raised_at,
)
from foreload.trainer.models.dlrm import little_to_interact
from foreload.trainer.models.fitting import model_name
from foreload.trainer.models.generators import seed_torch, states_beside_torch
from foreload.trainer.models.inference import TILE, modes_kept
from foreload.trainer.models.layers import takes_step
from foreload.trainer.models.own_losses import check_penalty_arguments, outputs_and_losses, outputs_of, penalty_of
from foreload.trainer.models.spec import Embeddings, ModelSpec, further_columns

# The numbers of synthetic samples: _FEW for most trials, and _OTHERS for the calls between them.
_FEW, _OTHERS = 3, 2
_SEVERAL = 5  # samples in the check that samples do not affect each other
# With so many samples, an input that the model uses shows in the gradient of at least one of them.
_MANY = 64
# A training step at which an annealed part may matter that does not matter at step 0.
_LATER = 10_000


def _trial(
    module: nn.Module, spec: ModelSpec, samples: int, dense_shift: float = 0.0, step: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Run forward on synthetic samples, and in training mode also backward, which leaves gradients.

    Args:
        module: the module, in either mode.
        samples: the number of samples. Their values are a function of this number.
        dense_shift: a number added to the dense values.
        step: the step for a forward that takes it.

    Returns:
        The outputs, with the module's own losses as a last column if it has any, and the gradient
        of the embedding block. The gradient is None in evaluation mode, and if the outputs do not
        depend on the block.
    """
    seed_torch(samples)
    parts = _parts(module, spec)
    block = torch.randn(samples, len(parts), _width(parts), requires_grad=module.training)
    dense = torch.randn(samples, spec.dense_width) + dense_shift
    with torch.set_grad_enabled(module.training):
        result = _result(module, spec, dense, block, step)
    check_outputs(model_name(module), outputs_of(result), spec, samples)
    outputs = outputs_and_losses(model_name(module), result, samples)
    if module.training:
        outputs.sum().backward()
    return outputs.detach(), block.grad


_Parts = list[tuple[tuple[str, int], ...]]


def _parts(module: nn.Module, spec: ModelSpec) -> _Parts:
    """Return per feature the (name, columns) of the parts of its rows."""
    further = further_columns(type(module))
    return [(("weights", dimension), *further) for _, dimension, _ in spec.features]


def _width(parts: _Parts) -> int:
    return max((sum(columns for _, columns in own) for own in parts), default=0)


def _result(module: nn.Module, spec: ModelSpec, dense: Tensor, block: Tensor, step: int) -> Any:
    """Return what forward returns: the outputs, or (outputs, own losses)."""
    given = {"step": step} if takes_step(module) else {}
    return module(dense, Embeddings.split(block, spec.names, _parts(module, spec)), **given)


def _outputs(module: nn.Module, spec: ModelSpec, dense: Tensor, block: Tensor, step: int) -> Tensor:
    outputs: Tensor = outputs_of(_result(module, spec, dense, block, step))
    return outputs


def _check_apart(module: nn.Module, spec: ModelSpec, step: int = 0) -> None:
    """Refuse a module whose outputs depend on other samples.

    Exceptions of forward pass through.

    Raises:
        ModelError: an output depends on other samples.
    """

    def forward(dense: Tensor, block: Tensor) -> Tensor:
        seed_torch(_SEVERAL)
        return outputs_and_losses(model_name(module), _result(module, spec, dense, block, step), len(block))

    seed_torch(_SEVERAL)
    parts = _parts(module, spec)
    block = torch.randn(_SEVERAL, len(parts), _width(parts))
    check_apart(model_name(module), module, forward, torch.randn(_SEVERAL, spec.dense_width), block)


def equal_samples_tie(module: nn.Module, spec: ModelSpec) -> bool:
    """Return whether a sample has the same output, to the bit, at every place in a tile.

    The check runs in evaluation mode. Returns True for a model that mixes samples, because such a
    model gets no tiles, and for one whose forward fails, which is reported elsewhere. The modes are
    restored afterwards.
    """
    parts = _parts(module, spec)
    try:
        with modes_kept(module), torch.random.fork_rng(devices=[]), torch.no_grad():
            module.eval()
            seed_torch(0)
            dense, block = torch.randn(TILE, spec.dense_width), torch.randn(TILE, len(parts), _width(parts))
            order = torch.randperm(TILE)
            outputs = _outputs(module, spec, dense, block, 0)
            return mixes_samples(module) or torch.equal(_outputs(module, spec, dense[order], block[order], 0), outputs[order])
    except Exception:  # a user's module may raise anything
        return True


def doubts(name: str, module: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the properties of a model that are probably not intended, one line each.

    The module must not be used afterwards, because its parameters have been replaced.

    Args:
        name: the name of the model, as `--model` has it.
    """
    lines = []
    if labels := probable_probabilities(module, spec):
        of_labels = f" of {', '.join(labels)}" if len(spec.labels) > 1 else ""
        lines.append(
            f"outputs{of_labels} lie between 0 and 1 for all synthetic samples, so they are probably probabilities; "
            "return logits, since the loss has a "
            "sigmoid of its own"
        )
    if name == "dlrm" and (said := little_to_interact(spec)):
        lines.append(said)
    return lines


def probable_probabilities(module: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the labels of clicks whose outputs are probably probabilities.

    Their outputs lie between 0 and 1 in several batches, both with the current and with random
    parameters. With random parameters some outputs may be rounded to 0 or 1. The module must not be
    used afterwards, because its parameters have been replaced.
    """
    clicks = [place for place, kind in enumerate(spec.label_kinds) if kind == "click"]
    module.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for randomised in (False, True):
            if randomised:
                _randomise(module)
            try:
                outputs = torch.cat(
                    [_trial(module, spec, _MANY + batch, step=_LATER)[0].reshape(_MANY + batch, -1) for batch in range(3)]
                )
            except Exception:  # a user's module may raise anything with other parameters
                break
            within = ((outputs >= 0) & (outputs <= 1)).all(0) & ((outputs > 0) & (outputs < 1)).any(0)
            clicks = [place for place in clicks if within[place]]
    return [spec.labels[place] for place in clicks]


def _randomise(module: nn.Module) -> None:
    """Replace the parameters with random ones, the same in each call."""
    seed_torch(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)


def check_apart_later(module: nn.Module, spec: ModelSpec) -> None:
    """Refuse a module whose outputs depend on other samples after training.

    This is tried with random parameters at a later step, because the initial parameters may hide
    such a dependence. The module must not be used afterwards, because its parameters have been
    replaced.

    Raises:
        ModelError: an output depends on other samples.
    """
    with torch.random.fork_rng(devices=[]):
        _randomise(module)
        try:
            _check_apart(module, spec, _LATER)
        except ModelError:
            raise
        except Exception:  # a user's module may raise anything with other parameters
            return


def _checked_trial(module: nn.Module, spec: ModelSpec, samples: int, step: int = 0) -> tuple[Tensor, Tensor | None]:
    """Do the same as `_trial`, but raise ModelError for any exception of the user's module."""
    try:
        return _trial(module, spec, samples, step=step)
    except ModelError:
        raise
    except Exception as error:  # a user's module may raise anything
        mode = "" if module.training else " in evaluation mode"
        raise ModelError(
            f"{model_name(module)}: forward failed{mode} on {samples} synthetic sample{'s' * (samples > 1)}: {type(error).__name__}: "
            f"{error}{raised_at(error)}; "
            "it must work on slices of any size, from one sample on"
        ) from error


def _values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, by name."""
    return chain(module.named_parameters(), module.named_buffers())


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in _values(module)}


def _check_values(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Raise ModelError if forward changed a parameter or buffer.

    Args:
        before: copies of the earlier values, by name.
    """
    after = dict(_values(module))
    changed = first_difference(before, after)
    if changed is None:
        return
    if changed in dict(module.named_parameters()):
        raise ModelError(
            f"{model_name(module)}: forward must leave parameters as they are, since each lane runs it on its own slice; it changes {changed}; "
            "let the optimizer alone change it"
        )
    raise ModelError(
        f"{model_name(module)}: forward must leave buffers as they are, since lanes do not share them; it changes {changed}; leave out "
        "BatchNorm and the like, use LayerNorm"
    )


def first_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose values differ, or None.

    A name that only one mapping has counts as different. NaN is equal to itself.
    """
    for name in dict.fromkeys((*other, *one)):
        if name not in one or name not in other or not _same(one[name], other[name]):
            return name
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def check_uses(module: nn.Module, spec: ModelSpec) -> None:
    """Check that forward works on many synthetic samples and that the outputs depend on all inputs.

    The module must not be used afterwards (see `ignored_inputs`).

    Raises:
        ModelError: forward failed, the outputs ignore a feature or the dense values, or an output
            depends on other samples.
    """
    _checked_trial(module, spec, _MANY)
    if ignored := ignored_inputs(module, spec):
        raise ModelError(
            f"{model_name(module)}: logits do not depend on {', '.join(ignored)}; use all of it, or take it out of the feature file"
        )
    check_apart_later(module, spec)


def ignored_inputs(module: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the inputs that the outputs do not depend on.

    These are the features whose embeddings get no gradient, and "dense values" if no output depends
    on them. With the initial parameters, or at an early step, a gradient may happen to be zero. So
    inputs without a gradient are tried again with random parameters at a later step. The module
    must not be used afterwards: its parameters may have been replaced, and it holds gradients.
    """
    with torch.random.fork_rng(devices=[]):
        ignored = _ignored(module, spec, step=0)
        if ignored:
            _randomise(module)
            again = _ignored(module, spec, step=_LATER)
            ignored = [name for name in ignored if name in again]
    return ignored


def _ignored(module: nn.Module, spec: ModelSpec, step: int) -> list[str]:
    """Return the ignored inputs with the current parameters.

    The list is empty if forward fails.
    """
    module.train()
    try:
        logits, gradient = _trial(module, spec, _MANY, step=step)
        others, _ = _trial(module, spec, _MANY, dense_shift=1.0, step=step) if spec.dense_width else (torch.empty(0), None)
    except Exception:  # a user's module may raise anything with other parameters
        return []
    used = gradient.ne(0).any(2).any(0).tolist() if gradient is not None else [False] * len(spec.names)
    ignored = [name for name, is_used in zip(spec.names, used, strict=True) if not is_used]
    return [*ignored, *(["dense values"] if torch.equal(logits, others) else [])]


def check_model(module: nn.Module, spec: ModelSpec) -> None:
    """Check that a module can be trained exactly.

    Its training must be a function of its parameters, the slice, the step and the seed.

    Raises:
        ModelError: the module is not supported.
    """
    name = model_name(module)
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ModelError(f"{name}: has no parameters; a model needs at least one, such as a bias")
    for parameter, value in parameters.items():
        if isinstance(value, nn.parameter.UninitializedParameter) or value.dtype != torch.float32 or value.device.type != "cpu":
            raise ModelError(f"{name}: parameter {parameter} must be float32, on the CPU, with its shape known when it is built")
    before, drawn = _copied(module), states_beside_torch()
    module.train()
    first, of_block = _checked_trial(module, spec, _FEW)
    # This check comes before the trial with a single sample, for which BatchNorm has no variance.
    _check_values(module, before)
    if not first.isfinite().all():
        outputs = "logits" if spec.label_kinds == ("click",) else "outputs"
        raise ModelError(
            f"{name}: forward must return finite {outputs} for synthetic samples (dense values and embeddings around 0); got "
            f"{first[~first.isfinite()][0].item()}; look for a division by zero, or a logarithm or root of a value that may be negative, in "
            f"{first_not_finite(module, lambda: _trial(module, spec, _FEW))}"
        )
    if infinite := not_finite_gradient(module, spec.names, of_block):
        raise ModelError(
            f"{name}: backward must give finite gradients for synthetic samples, and does not for {infinite}; "
            "look for a root or norm of a value that is 0"
        )
    for training in (True, False):
        module.train(training)
        _check_memory(module, spec)
    module.train()
    _check_penalty(module, spec)
    for source, state in states_beside_torch().items():
        if state != drawn[source]:
            raise ModelError(
                f"{name}: forward must draw random numbers from torch's generator alone, which every step seeds; it draws from {source}; use "
                "torch.rand, torch.randn or nn.Dropout"
            )
    _checked_trial(module, spec, 1)
    _check_values(module, before)
    _check_apart(module, spec)
    for parameter, value in parameters.items():
        if value.grad is not None and value.grad.layout is not torch.strided:
            raise ModelError(f"{name}: parameter {parameter} has a sparse gradient; rows belong in a feature's table")
        value.grad = None


def _check_memory(module: nn.Module, spec: ModelSpec) -> None:
    """Refuse a module whose forward depends on earlier calls.

    Forward is given the same samples three times under one seed, and other samples in between. The
    first call may create state that stays the same, such as a mask or a cache. State that still
    changes after the second call is not a function of the samples.

    Raises:
        ModelError: the state or the outputs change between calls.
    """
    name, mode = model_name(module), "" if module.training else " in evaluation mode"
    outputs, states = [], []
    for _ in range(3):
        outputs.append(_checked_trial(module, spec, _FEW)[0])
        states.append(hidden_state(module))
        _checked_trial(module, spec, _OTHERS, step=1)
    if change := first_change(*states[1:]):
        raise ModelError(
            f"{name}: forward must keep no state of its own, since each lane runs it on its own slices; after two forwards{mode} of the same "
            f"samples under one seed an attribute differs: {change}; if something is to change during training, make it depend on the step: "
            "forward(self, dense, embeddings, step)"
        )
    if any(not torch.equal(outputs[0], other) for other in outputs[1:]):
        raise ModelError(
            f"{name}: two forwards{mode} of the same samples under one seed differ; forward must keep no state of its own, and draw random numbers "
            "from torch's generator alone"
        )


def _check_penalty(module: nn.Module, spec: ModelSpec) -> None:
    """Refuse a penalty that depends on anything but the parameters, as on the samples of a forward.

    Raises:
        ModelError: the penalty changes between calls, or is not a finite scalar.
    """
    name, values = model_name(module), []
    check_penalty_arguments(name, module)
    for samples in (_FEW, _OTHERS):
        _checked_trial(module, spec, samples)
        if (value := penalty_of(name, module)) is None:
            return
        values.append(float(value.detach()))
    if not math.isfinite(values[0]) or values[0] != values[1]:
        raise ModelError(
            f"{name}: penalty() must be a finite function of the parameters alone, since it is added once a step, not for each sample; got "
            f"{values[0]:g} and {values[1]:g} after forwards of different samples; return what samples add from forward: (outputs, losses)"
        )


def check_built_alike(module: nn.Module, again: nn.Module, spec: ModelSpec) -> None:
    """Refuse a constructor whose two modules, built under one seed, differ.

    Args:
        module: a module that `check_model` has tried.
        again: a module that was never called. Forward is first given other samples, so that state
            it keeps from the first samples shows in its outputs.
        spec: the inputs and labels of the model.

    Raises:
        ModelError: the parameters, buffers or outputs differ.
    """
    name = model_name(module)
    sources = "draw random numbers from torch, numpy.random or random, which --seed seeds, and use neither the time, the process nor the system"
    if (differs := first_difference(dict(_values(module)), dict(_values(again)))) is not None:
        kind = "parameter" if differs in dict(module.named_parameters()) else "buffer"
        raise ModelError(f"{name}: built twice under one seed, {kind} {differs} differs; {sources}")
    again.train()
    _checked_trial(again, spec, _OTHERS, step=1)
    if not torch.equal(_checked_trial(module, spec, _FEW)[0], _checked_trial(again, spec, _FEW)[0]):
        raise ModelError(
            f"{name}: built twice under one seed, its forward gives different outputs for the same samples, though parameters and buffers are "
            f"equal; do not keep the first samples in attributes; and {sources}"
        )
    for parameter in module.parameters():
        parameter.grad = None
