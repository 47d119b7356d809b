"""Finding a model by name or import path, building it from its options, and checking that it can be trained exactly."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.built_in import MODELS
from foreload.trainer.models.checking import check_built_alike, check_model
from foreload.trainer.models.diagnosis import raised_at
from foreload.trainer.models.fitting import check_fits
from foreload.trainer.models.generators import seeded
from foreload.trainer.models.importing import load_named
from foreload.trainer.models.layers import check_step, connect
from foreload.trainer.models.spec import ModelBuilder, ModelSpec, further_columns
from foreload.trainer.models.wrapping import check_weights, has_weights


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


def build_model(
    model: ModelBuilder,
    spec: ModelSpec,
    options: Mapping[str, object],
    seed: int,
    *,
    twice: bool = False,
    drop_weights: bool = False,
) -> nn.Module:
    """Build a module on the CPU as docs/definitions.md says (a function of the seed), and check it. Raises ModelError.

    Args:
        model: its class, or the function that builds it.
        spec: the description of the data that it gets.
        options: for its constructor, as strings or values.
        seed: of the generators that the constructor may draw from; the caller's are as before afterwards.
        twice: whether to build it a second time, and to refuse it where the two differ, as is done before anything is trained.
        drop_weights: whether weights that tables were given before they were wrapped may be lost; else that is refused, too, if it is built twice.
    """
    arguments = parse_options(model, options)
    with seeded(seed):
        module = _built(model, spec, arguments)
        check_model(module, spec)
    if twice:
        with seeded(seed):
            again = _built(model, spec, arguments)
            check_built_alike(module, again, spec)
        if has_weights(module) and not drop_weights:

            def otherwise(number: int) -> nn.Module:
                with seeded(seed + number):
                    return _built(model, spec, arguments)

            check_weights(module, again, otherwise)
    return module


def _built(model: ModelBuilder, spec: ModelSpec, arguments: Mapping[str, Any]) -> nn.Module:
    """What a model's builder makes, with one thread. Raises ModelError."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return _of_features(model, model(spec, **arguments), spec)
    except ModelError:
        raise
    except Exception as error:  # a user's model may raise anything
        raise ModelError(f"{model.__name__}: cannot be built: {type(error).__name__}: {error}{raised_at(error)}") from error
    finally:
        torch.set_num_threads(threads)


def _of_features(model: ModelBuilder, module: nn.Module, spec: ModelSpec) -> nn.Module:
    """What a model's builder made, its layers of features connected, where they fit the data. Raises ModelError."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"{model.__name__}: must return a torch.nn.Module; got {type(module).__name__}")
    if further_columns(type(module)) != further_columns(model):
        raise ModelError(
            f"{model.__name__}: returns {type(module).__name__}, which has further_columns; name that class as the model"
        )
    check_fits(module, spec)
    check_step(module)
    return connect(module)
