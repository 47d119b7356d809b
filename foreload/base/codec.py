"""Typed JSON: dataclasses to JSON and back, for messages between processes and manifests on disk.

A value that does not fit its type is refused. A field may have these types: None, bool, int, float,
str, a Literal, a tuple, list or dict of such types, another dataclass, a TypedDict, a union, Any
(JSON as it is), or Annotated. Annotated adds checks to a type, as in `Name` and `Count`, or gives
its `JsonForm`. In a union of dataclasses, {"kind": "NAME", ...} names the class.

A field with a default may be missing. Messages (`to_json`) leave out fields that are None by
default. Files (`to_stored`) leave out fields that are `LeftOut`, and write null otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from foreload.base.errors import ForeloadError

KIND = "kind"

_Value = TypeVar("_Value")


class FormError(ValueError):
    """JSON that does not have the required form.

    The message names the place, the rule and the value.
    """


class UnknownField(FormError):
    """An object has a field that this version does not know."""


def fault(name: str, why: Exception | str, remedy: str) -> str:
    """Return what is wrong with a file, and what to do about it.

    Args:
        name: the file.
        remedy: what to do if it is damaged. A file that a later version wrote is not.
    """
    if isinstance(why, UnknownField):
        return f"{name} was written by a later version of foreload ({why}); use that version"
    return f"{name} is damaged: {why}; {remedy}"


def parse_json(data: bytes | str) -> Any:
    """Parse a JSON text.

    Raises:
        FormError: the text is not JSON. NaN, infinity and text that is not Unicode are refused too.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    # RecursionError means that the value is nested too deeply.
    except (ValueError, RecursionError) as error:
        raise FormError(f"is not JSON ({error})") from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


# -- Checks of values: Annotated[type, check] ------------------------------------------------------

Check = Callable[[Any, str], None]
"""A check of a value: (value of the right type, its place) -> None. Raises FormError."""


def between(least: int, most: int) -> Check:
    """Return a check that a number is in least .. most."""

    def check(value: Any, where: str) -> None:
        if not least <= value <= most:
            raise FormError(f"{where}: must be in {least} .. {most}; got {value!r:.100}")

    return check


def finite(value: Any, where: str) -> None:
    """Check that a number is finite."""
    if not math.isfinite(value):
        raise FormError(f"{where}: must be a finite number; got {value!r}")


def one_of(*known: Any) -> Check:
    """Return a check that a value is one of these."""
    return lambda value, where: _literal(value, known, where)


def filled(value: Any, where: str) -> None:
    """Check that a value has at least one element."""
    if not value:
        raise FormError(f"{where}: must not be empty")


def plain_name(value: Any, where: str) -> None:
    """Check that a text is the name of a file or folder.

    FOLDER / name is then directly in FOLDER.
    """
    if value in ("", ".", "..") or "/" in value or not value.isprintable():
        raise FormError(f"{where}: must be the name of a file in the same folder; got {value!r:.100}")


def plain_path(value: Any, where: str) -> None:
    """Check that a text is a sequence of plain names with "/" between them."""
    for name in value.split("/"):
        plain_name(name, where)


MOST = (1 << 63) - 1
Count = Annotated[int, between(0, MOST)]
Natural = Annotated[int, between(1, MOST)]
Step = Annotated[int, between(-1, MOST)]  # the last step trained; -1 before the first
Amount = Annotated[int | float, between(0, MOST)]
Name = Annotated[str, plain_name]
RelativePath = Annotated[str, plain_path]


# -- Other forms: Annotated[type, JsonForm(..)] ----------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class JsonForm:
    """How to write values of a type that JSON does not have.

    Attributes:
        json: the type in JSON.
        write: returns the JSON form of a value.
        read: returns the value of a JSON form. It may raise ValueError or ForeloadError.
    """

    json: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_LEFT_OUT = object()
LeftOut = Annotated[_Value, _LEFT_OUT]
"""A field that files leave out if it has its default value.

A field that is added later is LeftOut, so that earlier versions still read files without it: they
refuse an unknown field.
"""


def to_json(value: Any) -> Any:
    """Return the JSON form of a message, or of a part of one, without its kind."""
    return _written(value, False)


def to_stored(value: Any) -> Any:
    """Return the JSON form of what a file holds. A list or dict is converted value by value.

    `of_json` is the inverse here too.
    """
    return _written(value, True)


def of_json(value: Any, kind: type[_Value]) -> _Value:
    """Return the value of a type that a JSON form stands for. This is the inverse of `to_json`.

    Raises:
        FormError: the JSON does not have the type's form.
    """
    hint: Any = kind
    read: _Value = _reader(hint)(value, kind.__name__)
    return read


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return name, type, and whether it may be missing, for each field of a dataclass.

    The keys of a TypedDict count as its fields.
    """
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
        return tuple((name, get_args(hint)[0] if name in optional else hint, name in optional) for name, hint in hints.items())
    return tuple((field.name, hints[field.name], _has_default(field)) for field in dataclasses.fields(kind))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _several(hint: Any) -> list[type]:
    """Return the dataclasses of a union with more than one dataclass, else an empty list."""
    messages = [one for one in _alternatives(hint) if _is_dataclass(one)]
    return messages if len(messages) > 1 else []


def _as_it_is(value: Any) -> Any:
    return value


def _written(value: Any, stored: bool) -> Any:
    kind: Any = type(value)
    return _writer(kind, stored)(value)


@functools.cache
def _writer(hint: Any, stored: bool) -> Callable[[Any], Any]:
    """Return a function that writes values of a type as JSON.

    Args:
        stored: whether the JSON is for a file.
    """
    if _several(hint):
        return lambda value: None if value is None else {KIND: type(value).__name__} | _written(value, stored)
    alternatives = _alternatives(hint)
    if len(alternatives) > 1:
        # In a union such as `Lag | None` or `int | float`, at most one type is not written as it
        # is.
        writers = [_writer(one, stored) for one in alternatives]
        write_one = next((one for one in writers if one is not _as_it_is), _as_it_is)
        return lambda value: None if value is None else write_one(value)
    if _is_dataclass(hint):
        parts = [(name, _writer(part, stored), _not_written(hint, name, part, stored)) for name, part, _ in _fields(hint)]
        return lambda value: {
            name: write(held) for name, write, not_written in parts if (held := getattr(value, name)) not in not_written
        }
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        form = _form(hint)
        return _writer(args[0], stored) if form is None else form.write
    if origin is tuple and args[-1] is not Ellipsis:
        of_places = [_writer(one, stored) for one in args]
        return lambda value: [write(one) for write, one in zip(of_places, value, strict=True)]
    if origin in (tuple, list):
        write = _writer(args[0], stored)
        return lambda value: [write(one) for one in value]
    if origin is dict:
        write = _writer(args[1], stored)
        return lambda value: {str(key): write(one) for key, one in value.items()}
    if hint is dict:
        return lambda value: {key: _written(one, stored) for key, one in value.items()}
    if hint is list:
        return lambda value: [_written(one, stored) for one in value]
    return _as_it_is


def _not_written(kind: Any, name: str, hint: Any, stored: bool) -> tuple[Any, ...]:
    """Return the values for which a field of a dataclass is left out: one, or none."""
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    if not stored:
        return (None,) if field.default is None else ()
    if get_origin(hint) is not Annotated or _LEFT_OUT not in get_args(hint):
        return ()
    return (field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),)


def _form(hint: Any) -> JsonForm | None:
    """Return the form of an Annotated type, or None if it has none."""
    return next((one for one in get_args(hint)[1:] if isinstance(one, JsonForm)), None)


@functools.cache
def _reader(hint: Any) -> Callable[[Any, str], Any]:
    """Return a function that reads values of a type from JSON, given their place for errors."""
    if several := _several(hint):
        read_tagged, optional = tagged(several), type(None) in _alternatives(hint)
        return lambda value, where: None if value is None and optional else read_tagged(value, where)
    alternatives = _alternatives(hint)
    if len(alternatives) > 1:
        return functools.partial(_read_any, [_reader(one) for one in alternatives])
    if _is_dataclass(hint) or is_typeddict(hint):
        return functools.partial(_read_fields, hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        form = _form(hint)
        return _with_checks(_reader(args[0]), args[1:]) if form is None else _with_form(form)
    if origin is tuple and args[-1] is not Ellipsis:
        return functools.partial(_read_tuple, [_reader(one) for one in args])
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
        return _read_float
    return lambda value, where: _checked(value, hint, where)


def _with_checks(read: Callable[[Any, str], Any], further: tuple[Any, ...]) -> Callable[[Any, str], Any]:
    checks: list[Check] = [one for one in further if one is not _LEFT_OUT]

    def read_checked(value: Any, where: str) -> Any:
        held = read(value, where)
        for check in checks:
            check(held, where)
        return held

    return read_checked


def _with_form(form: JsonForm) -> Callable[[Any, str], Any]:
    read = _reader(form.json)

    def read_form(value: Any, where: str) -> Any:
        held = read(value, where)
        try:
            return form.read(held)
        except (ValueError, ForeloadError) as error:
            raise FormError(f"{where}: {error}") from error

    return read_form


def _read_tuple(readers: list[Callable[[Any, str], Any]], value: Any, where: str) -> tuple[Any, ...]:
    """Read a tuple with one value for each of its types."""
    given = _checked(value, list, where)
    if len(given) != len(readers):
        raise FormError(f"{where}: must have {len(readers)} values; got {len(given)}")
    return tuple(read(one, where) for read, one in zip(readers, given, strict=True))


def _read_float(value: Any, where: str) -> float:
    try:
        return float(_checked(value, (float, int), where))
    except OverflowError as error:
        raise FormError(f"{where}: must be a float; got {value!r:.100}") from error


def _key(kind: Any, key: str, where: str) -> Any:
    """Convert a key of a JSON object from text to its type.

    Raises:
        FormError: the key does not fit the type.
    """
    if get_origin(kind) is Annotated:
        return _reader(kind)(key, where)
    try:
        return kind(key)
    except ValueError as error:
        raise FormError(f"{where}: keys must be {kind.__name__}; got {key!r:.100}") from error


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    """Read a dataclass or TypedDict from a JSON object that has its fields and no others.

    Args:
        where: the name of the object in errors.

    Raises:
        FormError: the object does not fit.
    """
    given = dict(_checked(value, dict, where))
    fields = {}
    for name, part, may_miss in _fields(kind):
        if name in given:
            fields[name] = _reader(part)(given.pop(name), f"{where}.{name}")
        elif not may_miss:
            named = ", ".join(key if key.isprintable() else repr(key) for key in value)
            raise FormError(f"{where}: must have {name!r}; got {named or 'nothing':.100}")
    if given:
        raise UnknownField(f"{where}: has a field that is not known, {next(iter(given))!r:.100}")
    try:
        return kind(**fields)
    # The class's own checks may raise.
    except ForeloadError as error:
        raise FormError(f"{where}: {error}") from error


def tagged(kinds: list[type]) -> Callable[[Any, str], Any]:
    """Return a reader of JSON objects that name one of these classes under KIND."""
    by_name = {kind.__name__: kind for kind in kinds}

    def read(value: Any, where: str) -> Any:
        given = dict(_checked(value, dict, where))
        kind = by_name.get(str(given.pop(KIND, None)))
        if kind is None:
            raise FormError(f"{where}: must be {' or '.join(by_name)}; got {value.get(KIND)!r:.100}")
        return _read_fields(kind, given, kind.__name__)

    return read


def _read_any(readers: list[Callable[[Any, str], Any]], value: Any, where: str) -> Any:
    """Read a value with the first reader that accepts it.

    If none does, the error of the first one is raised.
    """
    refused = None
    for read in readers:
        try:
            return read(value, where)
        except FormError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _checked(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """Return a JSON value if it is of one of these types.

    Raises:
        FormError: it is not.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # In Python a bool is an int, but not here.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise FormError(f"{where}: must be {kinds[0].__name__}; got {value!r:.100}")
    return value


def _literal(value: Any, allowed: tuple[Any, ...], where: str) -> Any:
    if value not in allowed:
        raise FormError(f"{where}: must be {' or '.join(map(repr, allowed))}; got {value!r:.100}")
    return value
