"""Messages between the processes of a job as JSON: dataclasses that name their class. Nothing received is executed."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from foreload.base import codec
from foreload.base.codec import KIND, FormError, tagged, to_json
from foreload.trainer.errors import MessageError

_Message = TypeVar("_Message")


def encode(message: Any) -> str:
    """A message (an instance of a dataclass) with its kind, on one line."""
    return json.dumps(with_kind(message))


def with_kind(message: Any) -> dict[str, Any]:
    """A message with its kind, as JSON."""
    fields: dict[str, Any] = to_json(message)
    return {KIND: type(message).__name__} | fields


def decode(text: str | bytes, kind: type[_Message]) -> _Message:
    """The message of a kind that `encode` gave. Raises MessageError for another one, and for fields that it has not or must have."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
        raise MessageError(f"message: must be JSON; got {text!r:.100}") from error
    return one_of(value, kind)


def one_of(value: Any, *kinds: type[_Message]) -> _Message:
    """The message of one of some kinds that `with_kind` gave. Raises MessageError."""
    try:
        message: _Message = tagged([*kinds])(value, "message")
    except FormError as error:
        raise MessageError(str(error)) from error
    return message


def of_json(value: Any, kind: type[_Message]) -> _Message:
    """The inverse of `to_json`. Raises MessageError."""
    try:
        return codec.of_json(value, kind)
    except FormError as error:
        raise MessageError(str(error)) from error
