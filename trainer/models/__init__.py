"""The models, by name or import path; building one from its options, and checking that it can be trained exactly."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.faults import check_outputs, first_not_finite, not_finite_gradient, raised_at
from foreload.trainer.models.fitting import check_fits, model_name
from foreload.trainer.models.importing import load_named
from foreload.trainer.models.layers import connect
from foreload.trainer.models.spec import Embeddings, ModelBuilder, ModelSpec, further_columns

MODELS = {
    "dlrm": "foreload.trainer.models.dlrm:DLRM",
    "wide_deep": "foreload.trainer.models.wide_deep:WideDeep",
    "dcn": "foreload.trainer.models.dcn:DCN",
    "deepfm": "foreload.trainer.models.deepfm:DeepFM",
    "shared_bottom": "foreload.trainer.models.shared_bottom:SharedBottom",
    "mmoe": "foreload.trainer.models.mmoe:MMoE",
}

_MANY = 64  # made-up samples: with so many, an input that is used shows in the gradient of at least one


def load_model(name: str, folder: str = "") -> ModelBuilder:
    """The class of a model, or the function that builds it: a name in MODELS, package.module:Class, or file.py:Class.

    A module is looked for on Python's path, then in `folder`, where one is given, and in the working directory; a file in these two folders alone.
    Raises ModelError.
    """
    path = MODELS.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ModelError(f"model: must be one of {', '.join(MODELS)}, package.module:Class or file.py:Class; got {name!r}")
    model: ModelBuilder = load_named("model", name, path, folder)
    if not (issubclass(model, nn.Module) if isinstance(model, type) else inspect.isfunction(model)):
        remedy = (
            "; it is built when it is imported, so not from --seed: build it in a function"
            if isinstance(model, nn.Module)
            else ""
        )
        raise ModelError(
            f"model: {name} must be a subclass of torch.nn.Module, or a function that builds one from a ModelSpec{remedy}"
        )
    further_columns(model)  # refused here if they are declared wrongly
    return model


def parse_value(name: str, value: object, like: object) -> Any:
    """A value from a flag (a string) or a job file, as the type of `like`: bool, int, float, a tuple of floats, else as it is.

    name: of the setting, for errors. Raises ModelError.
    """
    try:
        if isinstance(like, bool) and isinstance(value, str):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if isinstance(like, bool) and isinstance(value, bool):
            return value
        if not isinstance(like, bool | int | float | tuple):
            return value
        if isinstance(like, tuple):
            parts = value.split(",") if isinstance(value, str) else list(typing.cast(Iterable[Any], value))
            if len(parts) == len(like):
                return tuple(float(part) for part in parts)
        elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
            number = type(like)(value)
            if isinstance(value, str) or number == value:
                return number
    except (KeyError, TypeError, ValueError):
        pass
    wanted = "true or false" if isinstance(like, bool) else "a number" if isinstance(like, float) else "an integer"
    wanted = f"{len(like)} numbers with commas" if isinstance(like, tuple) else wanted
    raise ModelError(f"{name}: must be {wanted}; got {value!r}")


def parse_options(model: ModelBuilder, options: Mapping[str, object]) -> dict[str, Any]:
    """Options for a model's constructor, with the types of its defaults. Raises ModelError, with the known options if one is unknown."""
    parameters = list(inspect.signature(model).parameters.values())[1:]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    arguments = {}
    for name, value in options.items():
        if name not in known and not open_ended:
            raise ModelError(f"model-options: {model.__name__} has no option {name}; it has {', '.join(known) or 'none'}")
        default = known[name].default if name in known else None
        arguments[name] = parse_value(f"model-options: {name}", value, default)
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ModelError(f"model-options: {model.__name__} needs {name}; give {name}=...")
    return arguments


def build_model(model: ModelBuilder, spec: ModelSpec, options: Mapping[str, object], seed: int) -> nn.Module:
    """The module, built on the CPU as docs/definitions.md says (a function of the seed) and checked. Raises ModelError."""
    arguments = parse_options(model, options)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_num_threads(1)
            torch.manual_seed(seed)
            module = _of_features(model, model(spec, **arguments), spec)
        except ModelError:
            raise
        except Exception as error:  # a user's model may raise anything
            raise ModelError(f"{model.__name__}: cannot be built: {type(error).__name__}: {error}{raised_at(error)}") from error
        finally:
            torch.set_num_threads(threads)
        check_model(module, spec)
    return module


def _of_features(model: ModelBuilder, module: nn.Module, spec: ModelSpec) -> nn.Module:
    """What a model's builder made, its layers of features connected, where they fit the data. Raises ModelError."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"{model.__name__}: must return a torch.nn.Module; got {type(module).__name__}")
    if further_columns(type(module)) != further_columns(model):
        raise ModelError(
            f"{model.__name__}: returns {type(module).__name__}, which has further_columns; name that class as the model"
        )
    check_fits(module, spec)
    return connect(module)


def _trial(module: nn.Module, spec: ModelSpec, samples: int, dense_shift: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Outputs of a forward and backward on made-up samples, in training mode, and the embedding block's gradient; leaves gradients behind.

    dense_shift: added to the dense values.
    """
    torch.manual_seed(samples)
    further = further_columns(type(module))
    parts = [(("weights", dimension), *further) for _, dimension, _ in spec.features]
    width = max(sum(columns for _, columns in own) for own in parts)
    block = torch.randn(samples, len(parts), width, requires_grad=True)
    outputs = module(torch.randn(samples, spec.dense_width) + dense_shift, Embeddings.split(block, spec.names, parts))
    check_outputs(model_name(module), outputs, spec, samples)
    outputs.sum().backward()
    return outputs.detach(), block.grad


def _checked_trial(module: nn.Module, spec: ModelSpec, samples: int) -> tuple[Tensor, Tensor | None]:
    """A trial; whatever the user's module raises becomes a ModelError."""
    try:
        return _trial(module, spec, samples)
    except ModelError:
        raise
    except Exception as error:  # a user's model may raise anything
        raise ModelError(
            f"{model_name(module)}: forward failed on {samples} made-up sample{'s' * (samples > 1)}: {type(error).__name__}: "
            f"{error}{raised_at(error)}; "
            "it must work on slices of any size, from one sample on"
        ) from error


def _check_buffers(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Raise ModelError if the buffers are not those of `before`, name to copy."""
    after = dict(module.named_buffers())
    changed = [buffer for buffer in after if buffer not in before or not _same(before[buffer], after[buffer])]
    if changed or len(after) != len(before):
        what = changed[0] if changed else next(iter(set(before) - set(after)))
        raise ModelError(
            f"{model_name(module)}: forward must leave buffers as they are, since lanes do not share them; it changes {what}; leave out "
            "BatchNorm and the like, use LayerNorm"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether values are equal, NaN to itself."""
    return torch.equal(one, other) or (one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num()))


def check_uses(module: nn.Module, spec: ModelSpec) -> None:
    """Raise ModelError where forward fails on many made-up samples, or the outputs do not depend on a feature or the dense values.

    The module is not to be used afterwards (see `ignored_inputs`).
    """
    _checked_trial(module, spec, _MANY)
    if ignored := ignored_inputs(module, spec):
        raise ModelError(
            f"{model_name(module)}: logits do not depend on {', '.join(ignored)}; use what is there, or take it out of the feature file"
        )


def ignored_inputs(module: nn.Module, spec: ModelSpec) -> list[str]:
    """The features whose embeddings get no gradient, and "dense values" where the logits do not depend on them.

    The module is not to be used afterwards: its parameters may have been replaced, and it holds gradients.

    Initial parameters may be such that a gradient is zero, so what has none is tried again with random ones.
    """
    with torch.random.fork_rng(devices=[]):
        ignored = _ignored(module, spec)
        if ignored:
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_(0, 0.5)
            again = _ignored(module, spec)
            ignored = [name for name in ignored if name in again]
    return ignored


def _ignored(module: nn.Module, spec: ModelSpec) -> list[str]:
    """`ignored_inputs` with the parameters as they are; nothing where forward fails."""
    module.train()
    try:
        logits, gradient = _trial(module, spec, _MANY)
        others, _ = _trial(module, spec, _MANY, dense_shift=1.0) if spec.dense_width else (torch.empty(0), None)
    except Exception:  # a user's model may raise anything where its parameters are not those that it began with
        return []
    used = gradient.ne(0).any(2).any(0).tolist() if gradient is not None else [False] * len(spec.names)
    ignored = [name for name, is_used in zip(spec.names, used, strict=True) if not is_used]
    return [*ignored, *(["dense values"] if torch.equal(logits, others) else [])]


def check_model(module: nn.Module, spec: ModelSpec) -> None:
    """Refuse a module whose training would not be a function of its parameters, the slice and the seed. Raises ModelError."""
    name = model_name(module)
    if not spec.features:
        raise ModelError(f"{name}: there are no features to look up; the feature file must name at least one")
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ModelError(f"{name}: has no parameters; a model needs at least one, such as a bias")
    for parameter, value in parameters.items():
        if isinstance(value, nn.parameter.UninitializedParameter) or value.dtype != torch.float32 or value.device.type != "cpu":
            raise ModelError(f"{name}: parameter {parameter} must be float32, on the CPU, with its shape known when it is built")
    before = {buffer: value.clone() for buffer, value in module.named_buffers()}
    module.train()
    (first, of_block), (again, _) = _checked_trial(module, spec, 3), _checked_trial(module, spec, 3)
    # Before a single sample is tried, of which BatchNorm has no variance.
    _check_buffers(module, before)
    if not first.isfinite().all():
        outputs = "logits" if spec.label_kinds == ("click",) else "outputs"
        raise ModelError(
            f"{name}: forward must return finite {outputs} for made-up samples (dense values and embeddings around 0); got "
            f"{first[~first.isfinite()][0].item()}; look for a division by zero, or a logarithm or root of what may be negative, in "
            f"{first_not_finite(module, lambda: _trial(module, spec, 3))}"
        )
    if infinite := not_finite_gradient(module, spec.names, of_block):
        raise ModelError(
            f"{name}: backward must give finite gradients for made-up samples, and does not for {infinite}; look for a root or norm of what is 0"
        )
    if not torch.equal(first, again):
        raise ModelError(f"{name}: two forwards of the same samples under one seed differ; forward must keep no state of its own")
    _checked_trial(module, spec, 1)
    _check_buffers(module, before)
    for parameter, value in parameters.items():
        if value.grad is not None and value.grad.layout is not torch.strided:
            raise ModelError(f"{name}: parameter {parameter} has a sparse gradient; rows belong in a feature's table")
        value.grad = None
