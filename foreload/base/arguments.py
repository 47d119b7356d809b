"""Checks of arguments that users pass to functions.

They are compared with the declared types before anything is done.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from foreload.base.errors import SettingError

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

_WORDS: dict[Any, str] = {
    str: "text",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    None: "None",
    type(None): "None",
}
_SELF = ("self", "cls")


def checked(**remedies: str) -> Callable[[Callable[_P, _Result]], Callable[_P, _Result]]:
    """Return a decorator that makes a function raise SettingError for an argument of a wrong type.

    The message names the parameter, what it takes, and what it got. Settings, which a function
    takes as **settings, are checked where they are declared.

    Args:
        remedies: parameter -> what the message suggests to do instead.
    """

    def decorate(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
            hints = _parameters(function)
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                kind = signature.parameters[name].kind
                if name in _SELF or kind is inspect.Parameter.VAR_KEYWORD:
                    continue
                for one in value if kind is inspect.Parameter.VAR_POSITIONAL else [value]:
                    if not _fits(one, hints[name]):
                        remedy = f"; {remedies[name]}" if name in remedies else ""
                        raise SettingError(f"{name}: must be {_words(hints[name])}; got {_described(one)}{remedy}")
            return function(*args, **kwargs)

        return call

    return decorate


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's parameters.

    The type of the result is not resolved: it may be one that only type checkers import.
    """
    of_parameters = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(types.SimpleNamespace(__annotations__=of_parameters), function.__globals__)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value is of a type.

    Types are those in _WORDS, Any, paths, sequences, and unions of such.
    """
    # A class or function that is passed on is checked by the code that uses it.
    if hint is Any or get_origin(hint) is Callable:
        return True
    if len(alternatives := _alternatives(hint)) > 1:
        return any(_fits(value, one) for one in alternatives)
    origin = get_origin(hint) or hint
    if origin is os.PathLike:
        return isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
    if origin is Sequence:
        return _is_sequence(value) and all(_fits(one, get_args(hint)[0]) for one in value)  # type: ignore[attr-defined]
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        return not isinstance(value, bool) and _is_whole(value)
    return isinstance(value, origin)


def _is_sequence(value: object) -> bool:
    """Return whether a value has a length and ordered elements, as lists and NumPy arrays have.

    A text is not a sequence here.
    """
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)


def _is_whole(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _words(hint: Any) -> str:
    """Describe what a parameter of this type takes."""
    alternatives = [one for one in _alternatives(hint) if get_origin(one) is not os.PathLike]
    is_path = len(alternatives) < len(_alternatives(hint))
    words = ["a path" if one is str and is_path else _word(one) for one in alternatives]
    return " or ".join(words)


def _word(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if origin is Sequence:
        return f"a list (each element {_words(get_args(hint)[0])})"
    return _WORDS.get(hint) or ("a dict" if origin is Mapping else f"of type {origin.__name__}")


def _described(value: object) -> str:
    """Describe a value for a message: its type and the beginning of its text."""
    shown = repr(value).replace("\n", " ")
    return f"{type(value).__name__} {shown[:60]}{'...' if len(shown) > 60 else ''}"
