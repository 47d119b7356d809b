"""The arithmetic of encoding, with NumPy alone (docs/definitions.md, Encoding).

It transforms numbers, and takes the hour or the weekday of a time. `foreload export --format torch`
joins this file into model.py.
"""

from __future__ import annotations

import math
import re
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

TIME_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""The units of times that are numbers, each with how many make a second."""

PARTS = ("hour", "weekday")
"""The parts of a time: the hour 0 .. 23, and the weekday, 0 for Monday to 6 for Sunday."""

_FIRST_SECOND, _LAST_SECOND = -62135596800, 253402300799  # the years 1 to 9999
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.]\d{1,9})?)?(?: ?(?:Z|UTC|([+-])(\d\d):?(\d\d)))?)?", re.ASCII
)
_WHOLE_TIME = re.compile(r"[+-]?\d{1,30}", re.ASCII)
_NUMBER_TIME = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_SPACES_AROUND = " \t\n\v\f\r"
_DAY, _HOUR, _MINUTE = 86400, 3600, 60
_EPOCH = date(1970, 1, 1).toordinal()
_THURSDAY = 3  # the weekday of 1970-01-01


def transformed(values: np.ndarray, transform: str, origin: float = 0.0, unit: float = 1.0) -> np.ndarray:
    """Transform the values of a dense column, and replace missing ones by 0.

    Args:
        values: float64 [n], NaN where missing.
        transform: log, standard, min_max or none.
        origin: of a standardized column the mean, with min_max the least value of the training data.
        unit: of a standardized column the deviation, with min_max the range of the training data.

    Returns:
        float64 [n]. The caller rounds it to float32.
    """
    if transform == "log":
        values = np.log1p(np.maximum(values, 0.0))
    elif transform in ("standard", "min_max"):
        values = (values - origin) / unit
    return np.where(np.isnan(values), 0.0, values)


def time_rule(unit: str | None) -> str:
    """Return the rule of times, as error messages state it.

    Args:
        unit: the unit of times that are numbers. If None, times must not be numbers.
    """
    if unit is None:
        return 'a time must be written like 2017-11-08 14:30:00 (of numbers, time_unit = "s", "ms", "us" or "ns" says what they count)'
    return f'a time must be a number of "{unit}" since 1970 within the years 1 to 9999, or be written like 2017-11-08 14:30:00'


def part_of(seconds: Any, part: str) -> Any:
    """Return a part of times.

    Args:
        seconds: seconds since 1970, an integer or int64 [n].
        part: one of PARTS.
    """
    return seconds % _DAY // _HOUR if part == "hour" else (seconds // _DAY + _THURSDAY) % 7


def seconds_of_numbers(values: np.ndarray, unit: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds since 1970 of times that are numbers, rounded down.

    Args:
        values: int64, uint64 or float64 [n].
        unit: their unit. If None, no number is a time.

    Returns:
        int64 [n], and bool [n], which of them are times. Others have 0.
    """
    if unit is None:
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            whole = np.floor(values / TIME_UNITS[unit])
    else:
        whole = values // values.dtype.type(TIME_UNITS[unit])
    valid = (whole >= _FIRST_SECOND) & (whole <= _LAST_SECOND)
    return np.where(valid, whole, 0).astype(np.int64), valid


def seconds_of_text(text: str, unit: str | None) -> int | None:
    """Return the seconds since 1970 of a time in text, rounded down, or None if it is no time.

    Args:
        text: a number, if there is a unit, or a date with or without a time and an offset from UTC.
        unit: the unit of times that are numbers.
    """
    text = text.strip(_SPACES_AROUND)
    if (time := _TIME.fullmatch(text)) is not None:
        day, hour, minute, second, sign, *offset = time.groups()
        days = _days(day)
        clock = [int(hour or 0), int(minute or 0), int(second or 0)]
        east = [int(offset[0] or 0), int(offset[1] or 0)]
        if days is None or max(clock[0], east[0]) > 23 or max(*clock[1:], east[1]) > 59:
            return None
        ahead = (east[0] * _HOUR + east[1] * _MINUTE) * (-1 if sign == "-" else 1)
        return days * _DAY + clock[0] * _HOUR + clock[1] * _MINUTE + clock[2] - ahead
    number: int | float
    if unit is None or not _NUMBER_TIME.fullmatch(text):
        return None
    number = int(text) if _WHOLE_TIME.fullmatch(text) else float(text)
    return _seconds_of_number(number, unit)


def seconds_of_value(value: Any, unit: str | None) -> int | None:
    """Return the seconds since 1970 of a time, rounded down, or None if it is no time.

    Args:
        value: a text, a date, a datetime (in UTC, if it has no time zone), a datetime64 or a number.
        unit: the unit of times that are numbers.
    """
    if isinstance(value, str | Decimal):
        return seconds_of_text(str(value), unit)
    if isinstance(value, datetime):
        ahead = value.utcoffset()
        seconds = (value.toordinal() - _EPOCH) * _DAY + value.hour * _HOUR + value.minute * _MINUTE + value.second
        return seconds if ahead is None else math.floor(seconds - ahead.total_seconds())
    if isinstance(value, date):
        return (value.toordinal() - _EPOCH) * _DAY
    if isinstance(value, np.datetime64):
        return int(value.astype("datetime64[s]").astype(np.int64))
    if unit is None or isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return None
    return _seconds_of_number(int(value) if isinstance(value, Integral) else float(value), unit)


def _seconds_of_number(number: int | float, unit: str) -> int | None:
    whole = number // TIME_UNITS[unit] if isinstance(number, int) else np.floor(number / TIME_UNITS[unit])
    return int(whole) if _FIRST_SECOND <= whole <= _LAST_SECOND else None


@lru_cache(1 << 12)
def _days(day: str) -> int | None:
    """Return the days from 1970 to a day, or None if there is no such day."""
    try:
        return date.fromisoformat(day).toordinal() - _EPOCH
    except ValueError:
        return None
