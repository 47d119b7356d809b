"""Find a model by name or import path, build it, and check that it can be trained exactly.

The model is built from its options.
"""

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
from foreload.trainer.models.wrapping import Wrapped, check_weights, has_weights


def load_model(name: str, folder: str = "") -> ModelBuilder:
    """Return the class of a model, or the function that builds it.

    A module is looked up on Python's path, then in `folder`, then in the working directory. A file
    is looked up only in these two folders.

    Args:
        name: a name in MODELS, package.module:Class, or file.py:Class.
        folder: the folder to search. If "", only the working directory is searched.

    Raises:
        ModelError: there is no such model, or it is not a model.
    """
    path = MODELS.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ModelError(f"model: must be one of {', '.join(MODELS)}, package.module:Class or file.py:Class; got {name!r}")
    model: ModelBuilder = load_named("model", name, path, folder)
    if not (issubclass(model, nn.Module) if isinstance(model, type) else inspect.isfunction(model)):
        remedy = (
            "; it is built when it is imported, so --seed does not affect it: build it in a function"
            if isinstance(model, nn.Module)
            else ""
        )
        raise ModelError(
            f"model: {name} must be a subclass of torch.nn.Module, or a function that builds one from a ModelSpec{remedy}"
        )
    # This raises an error if the columns are declared wrongly.
    further_columns(model)
    return model


def parse_value(name: str, value: object, like: object) -> Any:
    """Convert a value from a flag (a string) or a job file to the type of `like`.

    The types are bool, int, float, and tuples of floats. For any other `like` the value is returned
    unchanged.

    Args:
        name: the name of the setting, for errors.
        like: a value of the wanted type, such as the default.

    Raises:
        ModelError: the value cannot be converted.
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
    """Convert the options for a model's constructor to the types of its defaults.

    Raises:
        ModelError: an option is unknown, missing or not valid. For an unknown option the error
            lists the known ones.
    """
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
    """Build a module on the CPU as a function of the seed (docs/definitions.md), and check it.

    Args:
        model: the class of the model, or the function that builds it.
        spec: the description of the data, for the constructor.
        options: the constructor's options, as strings or values.
        seed: the seed of the generators that the constructor may draw from. The caller's states of
            these are restored.
        twice: whether to build the module a second time, and to refuse it if the two differ. This
            is done before anything is trained.
        drop_weights: whether weights that tables had before they were wrapped may be lost. If False
            and `twice` is True, such weights are refused.

    Raises:
        ModelError: the module cannot be built, or cannot be trained exactly.
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
    """Build a model with one thread.

    Raises:
        ModelError: the builder failed, or its result does not fit the data.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return _of_features(model, model(spec, **arguments), spec)
    except ModelError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise ModelError(f"{model.__name__}: cannot be built: {type(error).__name__}: {error}{raised_at(error)}") from error
    finally:
        torch.set_num_threads(threads)


def _of_features(model: ModelBuilder, module: nn.Module, spec: ModelSpec) -> nn.Module:
    """Check the result of a model's builder, and connect its feature layers.

    Raises:
        ModelError: the result is not a module, or does not fit the data.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"{model.__name__}: must return a torch.nn.Module; got {type(module).__name__}")
    if further_columns(type(module)) != further_columns(model):
        raise ModelError(
            f"{model.__name__}: returns {type(module).__name__}, which has further_columns; name that class as the model"
        )
    check_fits(module, spec)
    check_step(module)
    for part in module.modules():
        if isinstance(part, Wrapped):
            # Outputs of a part of a model are not those for the labels, so they stay as they are.
            part.predict(spec.label_kinds if part is module else ("number",) * len(spec.label_kinds))
    return connect(module)
