"""Messages between the processes of a job: dataclasses as JSON that names their class.

Nothing that a process receives is executed.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from foreload.base import codec
from foreload.base.codec import KIND, FormError, tagged, to_json
from foreload.trainer.errors import MessageError

_Message = TypeVar("_Message")


def encode(message: Any) -> str:
    """Encode a message, an instance of a dataclass, with its kind as one line of JSON."""
    return json.dumps(with_kind(message))


def with_kind(message: Any) -> dict[str, Any]:
    """Return a message with its kind as a JSON object."""
    fields: dict[str, Any] = to_json(message)
    return {KIND: type(message).__name__} | fields


def decode(text: str | bytes, kind: type[_Message]) -> _Message:
    """Decode the text of `encode` to a message of class `kind`.

    Raises:
        MessageError: The text is not JSON, the message is of another class, or a field is unknown
            or missing.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter for JSON nested too deeply
        raise MessageError(f"message: must be JSON; got {text!r:.100}") from error
    return one_of(value, kind)


def one_of(value: Any, *kinds: type[_Message]) -> _Message:
    """Decode the JSON object of `with_kind` to a message of one of `kinds`. Raises MessageError."""
    try:
        message: _Message = tagged([*kinds])(value, "message")
    except FormError as error:
        raise MessageError(str(error)) from error
    return message


def of_json(value: Any, kind: type[_Message]) -> _Message:
    """Decode the value of `to_json` to class `kind`. Raises MessageError."""
    try:
        return codec.of_json(value, kind)
    except FormError as error:
        raise MessageError(str(error)) from error
