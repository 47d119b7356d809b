"""Settings, each declared once as a field of a frozen dataclass.

The command line, the job file, the Python API and the stored manifests follow from the declaration,
`setting(default, parse, help, group, ...)`. The parser takes a word of the command line, a value of
the job file, a Python value, or one of its own results. It returns the typed value, or raises
SettingError with flag, rule, value and remedy. The class calls `parse_fields` in __post_init__, so
the values are parsed and checked exactly once, whatever the object is made from.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from foreload.base.errors import SettingError

Parse = Callable[[str, Any], Any]
"""A parser: (flag, value given) -> typed value.

It returns its own results unchanged, and may raise SettingError.
"""

Form = Literal["value", "switch", "repeated", "several", "place", "places", "file"]
"""The form of a setting on the command line.

value: a flag and a word.
switch: a flag alone.
repeated: a flag and a word, any number of times.
several: a flag and any number of words.
place: one word without a flag.
places: any number of words without a flag.
file: none. The setting exists in the job file only.
"""

Resume = Literal["fixed", "free", "rates", "numerics"]
"""Whether what was made with a setting may be continued with another value.

fixed: it may not.
free: it may, since the result does not depend on the value.
rates: it may, and the point from which the value holds is recorded.
numerics: it may, if that is accepted.
"""

_MOST_BYTES = 2**63 - 1
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1 << 10 * (i + 1) for i, p in enumerate("KMGT")} | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        field: its name in the class.
        name: its name in the job file and the Python API.
        flag: its name on the command line and in messages.
        group: its heading on the help page.
        form: see Form.
        required: whether it must be given, and differ from the default.
        stated: whether the manifest of the result keeps it. False for what concerns only this call
            (whether to overwrite, where to write the summary).
        words: the words that may follow the "=" of a switch, each with its help.
        resume: see Resume.
        alias: another name for it, or "".
    """

    field: str
    name: str
    flag: str
    default: Any
    parse: Parse
    help: str
    group: str
    form: Form
    metavar: str | None
    required: bool
    stated: bool
    words: Mapping[str, str]
    resume: Resume
    alias: str


def setting(
    default: Any,
    parse: Parse,
    help: str,
    group: str = "",
    *,
    form: Form = "value",
    metavar: str | None = None,
    name: str = "",
    flag: str = "",
    required: bool = False,
    stated: bool = True,
    words: Mapping[str, str] | None = None,
    resume: Resume = "fixed",
    alias: str = "",
) -> Any:
    """Declare a setting, as a field of a class of settings.

    The arguments are those of `Setting`.

    Args:
        name: given only if it is not the field's name.
        flag: given only if it is not derived from the name.
    """
    metadata = {"setting": (name, flag, default, parse, help, group, form, metavar, required, stated, words or {}, resume, alias)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(kind: type) -> dict[str, Setting]:
    """Return the settings of a class by name, in order."""
    known = {}
    for item in dataclasses.fields(kind):
        name, flag, *rest = item.metadata["setting"]
        name = name or item.name
        known[name] = Setting(item.name, name, flag or "--" + spelled(name), *rest)
    return known


def names_by_resume(kind: type, resume: Resume) -> tuple[str, ...]:
    """Return the names of the settings of a class with this `Resume`, in order."""
    return tuple(name for name, known in settings_of(kind).items() if known.resume == resume)


def spelled(name: str) -> str:
    """Return a name as the command line and messages spell it."""
    return name.replace("_", "-")


def named(kind: type, values: Mapping[str, Any], where: str, further: Sequence[str] = ()) -> dict[str, Any]:
    """Return the same values by the declared names of the settings.

    Args:
        values: by names that may have dashes or underscores, or be aliases.
        where: where the values come from, for messages.
        further: names that are accepted too.

    Raises:
        SettingError: a name is unknown, or a setting is given twice.
    """
    declared = settings_of(kind)
    known, aliases = [*declared, *further], {setting.alias: name for name, setting in declared.items() if setting.alias}
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        name = aliases.get(name, name)
        if name not in known:
            raise SettingError(f"{where} has no setting {key!r}; it takes {', '.join(map(spelled, sorted(known)))}")
        if name in result and key.replace("-", "_") != name:
            raise SettingError(f"{where}: {spelled(name)} is given twice, because {key!r} is the same setting; give it once")
        result[name] = value
    return result


def parse_fields(made: Any) -> None:
    """Replace the given values of an object's fields by typed values.

    To be called by the object's __post_init__.

    Raises:
        SettingError: a value is invalid, or a required one is missing.
    """
    missing = []
    for known in settings_of(type(made)).values():
        value = getattr(made, known.field)
        if known.required and (value is None or value == known.default):
            missing.append(known.flag)
        elif value is not None or known.default is not None:
            object.__setattr__(made, known.field, known.parse(known.flag, value))
    if missing:
        raise SettingError(f"{missing[0]}: is missing; give it, or put it into the job file")


def to_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of the fields, from values by the names of the settings."""
    known = settings_of(kind)
    return {known[name].field: value for name, value in values.items()}


# -- The command line and the job file -------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser, kind: type, only: Collection[str] | None = None) -> None:
    """Add the settings of a class to a command as arguments.

    The parsed values are text, or None if not given.

    Args:
        only: the names of the settings to add. If None, all.
    """
    groups: dict[str, Any] = {"": command}
    added = {name: known for name, known in settings_of(kind).items() if known.form != "file" and (only is None or name in only)}
    command.set_defaults(**{_added(kind): tuple(added)})
    for known in added.values():
        if known.group not in groups:
            groups[known.group] = command.add_argument_group(known.group)
        _add_argument(groups[known.group], known)


def _add_argument(group: Any, known: Setting) -> None:
    stated = known.required or known.default in (None, "", (), False) or "default" in known.help
    default = "" if stated else f" (default {known.default})"
    options: dict[str, Any] = {"help": (known.help + default).replace("%", "%%"), "metavar": known.metavar}
    if known.form in ("place", "places"):
        group.add_argument(known.name, nargs="?" if known.form == "place" else "*", **options)
        return
    forms: dict[str, dict[str, Any]] = {
        "switch": {"action": "store_const", "const": True},
        "repeated": {"action": "append"},
        "several": {"nargs": "+", "action": "extend"},
    }
    if known.form == "switch":
        del options["metavar"]
    flags = [known.flag, *(["--" + spelled(known.alias)] if known.alias else [])]
    group.add_argument(*flags, dest=known.name, default=None, **forms.get(known.form, {}), **options)
    # Each word is declared as a flag of its own, so that no word after a switch is taken as its
    # value.
    for word, help in known.words.items():
        group.add_argument(f"{known.flag}={word}", dest=known.name, default=None, action="store_const", const=word, help=help)


def given(namespace: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Return the settings of a class that the command line gives, by name.

    An argument that only has the name of a setting, and was not added by `add_arguments`, is not one.
    """
    words = {name: getattr(namespace, name) for name in getattr(namespace, _added(kind))}
    return {name: value for name, value in words.items() if value not in (None, [])}


def _added(kind: type) -> str:
    """Return under which name a namespace has the names of the settings that were added."""
    return f"settings of {kind.__name__}"


def read_job_file(
    path: str | Path, table: Literal["prepare", "train"], kind: type, further: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the settings in the table [prepare] or [train] of a TOML file, by name.

    Names may have dashes or underscores. Settings with several options have a table each, such as
    [train.model-options].

    Args:
        further: names that are accepted too.

    Raises:
        SettingError: the file is unreadable or invalid, or has an unknown name.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"--job: cannot read {path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--job: {path} is not valid TOML: {error}") from error
    wrong = sorted(set(document) - {"prepare", "train"}) or [
        f"{name} = {value!r}" for name, value in document.items() if not isinstance(value, dict)
    ]
    if wrong:
        raise SettingError(f"--job: {path} may have tables [prepare] and [train]; got {wrong[0]}")
    return named(kind, document.get(table, {}), f"--job {path}: [{table}]", further)


# -- Parsers ---------------------------------------------------------------------------------------


def integer(least: int, most: int = 2**63 - 1) -> Parse:
    """Return a parser of whole numbers within bounds, given as number or text."""

    def parse(flag: str, value: Any) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]+", str(value)):
            raise SettingError(f"{flag}: must be a whole number; got {value!r}")
        if int(value) < least:
            raise SettingError(f"{flag}: must be at least {least}; got {value}")
        if int(value) > most:
            raise SettingError(f"{flag}: must be at most {most}; got {value}")
        return int(value)

    return parse


def number(least: float) -> Parse:
    """Return a parser of finite numbers of at least `least`, given as number or text."""

    def parse(flag: str, value: Any) -> float:
        try:
            result = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            result = math.nan
        if not math.isfinite(result):
            raise SettingError(f"{flag}: must be a finite number; got {value!r}")
        if result < least:
            raise SettingError(f"{flag}: must be at least {least:g}; got {value}")
        return result

    return parse


def positive(flag: str, value: Any) -> float:
    """Parse a finite number above 0, given as number or text."""
    if (result := number(-math.inf)(flag, value)) <= 0:
        raise SettingError(f"{flag}: must be above 0; got {value}")
    return result


def size_bytes(flag: str, value: Any) -> int:
    """Parse a size in bytes: a number with or without a unit, such as 300000, 512MB or 2GiB."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = None if match is None else next((u for u in _UNITS if u.lower() == match[2].lower()), None)
    if match is None or unit is None or isinstance(value, bool):
        raise SettingError(f"{flag}: must be a size such as 1GiB or 500MB; got {value!r}")
    size = float(match[1]) * _UNITS[unit]
    if size > _MOST_BYTES:
        raise SettingError(f"{flag}: must be at most {_MOST_BYTES} bytes; got {value!r:.100}")
    result = int(size)
    if result < 1:
        raise SettingError(f"{flag}: must be at least 1 byte; got {value!r}")
    return result


def choice(*known: str) -> Parse:
    """Return a parser that accepts one of some words."""

    def parse(flag: str, value: Any) -> str:
        if value not in known:
            raise SettingError(f"{flag}: must be one of {', '.join(known)}; got {value!r}")
        return str(value)

    return parse


def switch(flag: str, value: Any) -> bool:
    """Parse a bool."""
    if not isinstance(value, bool):
        raise SettingError(f"{flag}: must be true or false; got {value!r}")
    return value


def switch_or(word: str) -> Parse:
    """Return a parser that accepts a bool or a word."""

    def parse(flag: str, value: Any) -> bool | str:
        if value != word and not isinstance(value, bool):
            raise SettingError(f'{flag}: must be true, false or "{word}"; got {value!r}')
        return word if value == word else bool(value)

    return parse


def text(flag: str, value: Any) -> str:
    """Parse a text or a path."""
    if not isinstance(value, str | os.PathLike):
        raise SettingError(f"{flag}: must be text; got {value!r}")
    return os.fspath(value)


def local(flag: str, value: Any) -> str:
    """Parse the path of a file or folder on this machine, as text. URLs are refused."""
    named = text(flag, value)
    if _URL.match(named):
        shown = re.sub(r"//[^ ]*@", "//***@", named.partition("?")[0])
        raise SettingError(
            f"{flag}: must be a path on this machine; got {shown}; only checkpoints can be in an object store: give a local path, and copy it there"
        )
    return named


def path(flag: str, value: Any) -> Path:
    """Parse the path of a file or folder on this machine."""
    if not _is_path(value):
        raise SettingError(f"{flag}: must be a path; got {value!r}")
    return Path(local(flag, value))


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and os.fspath(value) != "" and "\0" not in os.fspath(value)


def texts(flag: str, value: Any) -> tuple[str, ...]:
    """Parse one or several paths of files or folders on this machine.

    Each may begin with NAME=. The result is a tuple of texts in any case.
    """
    values = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(values, list | tuple) or not all(map(_is_path, values)):
        raise SettingError(f"{flag}: must be a path or a list of paths; got {value!r}")
    for item in values:
        local(flag, re.sub(r"^[^/=]*=", "", os.fspath(item)))
    return tuple(os.fspath(item) for item in values)


def key_values(flag: str, value: Any) -> dict[str, Any]:
    """Parse options by name, given as a table or as words K=V."""
    if isinstance(value, Mapping):
        return dict(value)
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, Iterable):
        raise SettingError(f"{flag}: must be a table of options, or words such as key=value; got {value!r}")
    result: dict[str, Any] = {}
    for word in words:
        key, equals, of_key = str(word).partition("=")
        if not equals or not key:
            raise SettingError(f"{flag}: must be given as key=value; got {word!r}")
        if key in result:
            raise SettingError(f"{flag}: {key} is given twice; give it once")
        result[key] = of_key
    return result
