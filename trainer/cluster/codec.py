"""Messages as JSON: dataclasses, told apart by the names of their classes. What does not fit is refused, and nothing received is executed.

A field is null, a bool, an int, a float, a str, a Literal, a tuple, list or dict of such, another dataclass, any of several, or Any (JSON as it is).
Of several dataclasses, and at the top, {"kind": "NAME", ...} says which it is. A field that may be None and is so by default is left out where it is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from foreload.trainer.errors import MessageError

KIND = "kind"

_Message = TypeVar("_Message")


def encode(message: Any) -> str:
    """A message (an instance of a dataclass) with its kind, on one line."""
    return json.dumps({KIND: type(message).__name__} | to_json(message))


def decode(text: str | bytes, kind: type[_Message]) -> _Message:
    """The message of a kind that `encode` gave. Raises MessageError for another one, and for fields that it has not or must have."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
        raise MessageError(f"message: must be JSON; got {text!r:.100}") from error
    message: _Message = _tagged([kind])(value, "message")
    return message


def to_json(value: Any) -> Any:
    """A message, or part of one, as JSON holds it, without its kind."""
    kind: Any = type(value)
    return _writer(kind)(value)


def of_json(value: Any, kind: type[_Message]) -> _Message:
    """The inverse of `to_json`. Raises MessageError."""
    hint: Any = kind
    message: _Message = _reader(hint)(value, kind.__name__)
    return message


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Of a dataclass, for each field: name, type, and whether it is left out where it is None."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name], field.default is None) for field in dataclasses.fields(kind))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_message(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _several(hint: Any) -> list[type]:
    """The dataclasses of which a value of this type is one, where there are several; else none."""
    messages = [one for one in _alternatives(hint) if _is_message(one)]
    return messages if len(messages) > 1 else []


def _as_it_is(value: Any) -> Any:
    return value


@functools.cache
def _writer(hint: Any) -> Callable[[Any], Any]:
    """From values of a type to JSON."""
    if _several(hint):
        return lambda value: None if value is None else {KIND: type(value).__name__} | to_json(value)
    alternatives = _alternatives(hint)
    if len(alternatives) > 1:
        # Of a union such as `Lag | None` or `int | float`, at most one type is written otherwise than as it is.
        writers = [_writer(one) for one in alternatives]
        write_one = next((one for one in writers if one is not _as_it_is), _as_it_is)
        return lambda value: None if value is None else write_one(value)
    if _is_message(hint):
        parts = [(name, _writer(part), left_out) for name, part, left_out in _fields(hint)]
        return lambda value: {
            name: write(held) for name, write, left_out in parts if (held := getattr(value, name)) is not None or not left_out
        }
    origin, args = get_origin(hint), get_args(hint)
    if origin in (tuple, list):
        write = _writer(args[0])
        return lambda value: [write(one) for one in value]
    if origin is dict:
        write = _writer(args[1])
        return lambda value: {str(key): write(one) for key, one in value.items()}
    return _as_it_is


@functools.cache
def _reader(hint: Any) -> Callable[[Any, str], Any]:
    """From JSON to values of a type, given where it stands."""
    if several := _several(hint):
        tagged, optional = _tagged(several), type(None) in _alternatives(hint)
        return lambda value, where: None if value is None and optional else tagged(value, where)
    alternatives = _alternatives(hint)
    if len(alternatives) > 1:
        return functools.partial(_read_any, [_reader(one) for one in alternatives])
    if _is_message(hint):
        return functools.partial(_read_fields, hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (tuple, list):
        read = _reader(args[0])
        return lambda value, where: origin([read(one, where) for one in _checked(value, list, where)])
    if origin is dict:
        key_type, read = args[0], _reader(args[1])
        return lambda value, where: {
            _key(key_type, key, where): read(one, where) for key, one in _checked(value, dict, where).items()
        }
    if origin is Literal:
        return lambda value, where: _literal(value, args, where)
    if hint is Any:
        return lambda value, where: value
    if hint is float:
        return lambda value, where: float(_checked(value, (float, int), where))
    return lambda value, where: _checked(value, hint, where)


def _key(kind: Any, key: str, where: str) -> Any:
    """A key of a JSON object, which is text there, as what it stands for. Raises MessageError."""
    try:
        return kind(key)
    except ValueError as error:
        raise MessageError(f"{where}: keys must be {kind.__name__}; got {key!r}") from error


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    """A dataclass from a JSON object of exactly its fields. where: what the object is called in errors. Raises MessageError."""
    given = dict(_checked(value, dict, where))
    fields = {}
    for name, part, left_out in _fields(kind):
        if name in given:
            fields[name] = _reader(part)(given.pop(name), f"{where}.{name}")
        elif not left_out:
            raise MessageError(f"{where}: must have {name!r}; got {', '.join(value) or 'nothing'}")
    if given:
        raise MessageError(
            f"{where}: has no field {next(iter(given))!r}; there are {', '.join(name for name, _, _ in _fields(kind))}"
        )
    return kind(**fields)


def _tagged(kinds: list[type]) -> Callable[[Any, str], Any]:
    """A reader of JSON objects that name their class, one of these, under KIND."""
    by_name = {kind.__name__: kind for kind in kinds}

    def read(value: Any, where: str) -> Any:
        given = dict(_checked(value, dict, where))
        kind = by_name.get(str(given.pop(KIND, None)))
        if kind is None:
            raise MessageError(f"{where}: must be {' or '.join(by_name)}; got {value.get(KIND)!r}")
        return _read_fields(kind, given, kind.__name__)

    return read


def _read_any(readers: list[Callable[[Any, str], Any]], value: Any, where: str) -> Any:
    """With the first reader that takes it."""
    refused = None
    for read in readers:
        try:
            return read(value, where)
        except MessageError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _checked(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """A JSON value, if it is of one of these types. Raises MessageError."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # A bool is an int to Python, not here.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise MessageError(f"{where}: must be {kinds[0].__name__}; got {value!r:.100}")
    return value


def _literal(value: Any, allowed: tuple[Any, ...], where: str) -> Any:
    if value not in allowed:
        raise MessageError(f"{where}: must be {' or '.join(map(repr, allowed))}; got {value!r:.100}")
    return value
