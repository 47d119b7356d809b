"""Settings, each declared once: as a field of a frozen dataclass, for the command line, the job file, the Python API and what is kept on disk.

A field is declared by `setting(default, parse, help, group, ...)`. Its parser takes what was given (a word of the command line, a value of the job
file, a Python value, or a value that it gave before) and gives the typed value, or raises SettingError with flag, rule, value and remedy. The class
calls `parse_fields` in __post_init__, so whatever it is made from is parsed and checked, once.
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
"""(flag, value given) -> typed value; gives its own results back as they are. Raises SettingError."""

Form = Literal["value", "switch", "repeated", "several", "place", "places", "file"]
"""How a setting stands on the command line. value: a flag and a word; switch: a flag alone; repeated: a flag and a word, any number of times;
several: a flag and any number of words; place, places: one word, or any number of words, without a flag; file: not at all, only in the job file."""

Resume = Literal["fixed", "free", "rates", "numerics"]
"""Whether what was made with a setting may go on with another value. fixed: it may not; free: it may, for the result does not depend on it; rates: it
may, and notes since when; numerics: it may where that is accepted."""

_MOST_BYTES = 2**63 - 1
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1 << 10 * (i + 1) for i, p in enumerate("KMGT")} | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a setting. field: its name in the class; name: in the job file and the API; flag: on the command line and in messages.

    group: its heading on the help page. form: see Form. required: whether it must be given, and be other than the default. stated: True for what
    is kept with what is made, in its manifest; False for what concerns this call alone (whether to overwrite, where to write the summary).
    words: what may stand behind the "=" of a switch, each with its help. resume: see Resume. alias: another name for it, "" where there is none.
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
    """A field of a class of settings; the arguments are Setting's. name: given where it is not the field's; flag: where not made of the name."""
    metadata = {"setting": (name, flag, default, parse, help, group, form, metavar, required, stated, words or {}, resume, alias)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(kind: type) -> dict[str, Setting]:
    """The settings of a class by their names, in order."""
    known = {}
    for item in dataclasses.fields(kind):
        name, flag, *rest = item.metadata["setting"]
        name = name or item.name
        known[name] = Setting(item.name, name, flag or "--" + spelled(name), *rest)
    return known


def names_by_resume(kind: type, resume: Resume) -> tuple[str, ...]:
    """The names of a class' settings that are so, in order. resume: see Resume."""
    return tuple(name for name, known in settings_of(kind).items() if known.resume == resume)


def spelled(name: str) -> str:
    """A name as the command line and messages spell it."""
    return name.replace("_", "-")


def named(kind: type, values: Mapping[str, Any], where: str, further: Sequence[str] = ()) -> dict[str, Any]:
    """The same values by the settings' names as they are declared; in `values` these may have dashes or underscores.

    where: what the values are of, for messages. further: names that are taken too. Raises SettingError for an unknown name.
    """
    declared = settings_of(kind)
    known, aliases = [*declared, *further], {setting.alias: name for name, setting in declared.items() if setting.alias}
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        name = aliases.get(name, name)
        if name not in known:
            raise SettingError(f"{where} knows no {key!r}; it takes {', '.join(map(spelled, sorted(known)))}")
        if name in result and key.replace("-", "_") != name:
            raise SettingError(f"{where}: {spelled(name)} is given twice, for {key!r} is the same; give it once")
        result[name] = value
    return result


def parse_fields(made: Any) -> None:
    """Replace what the fields of an object were given by typed values. Raises SettingError; to be called by its __post_init__."""
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
    """Values by the names of fields from values by the names of settings."""
    known = settings_of(kind)
    return {known[name].field: value for name, value in values.items()}


# -- The command line and the job file -----------------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser, kind: type, only: Collection[str] | None = None) -> None:
    """Declare the settings of a class on a command, or only those of these names; values are left as text, None where not given."""
    groups: dict[str, Any] = {"": command}
    for name, known in settings_of(kind).items():
        if known.form == "file" or (only is not None and name not in only):
            continue
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
    # Each is a flag of its own, so that no word behind a switch is taken for its value.
    for word, help in known.words.items():
        group.add_argument(f"{known.flag}={word}", dest=known.name, default=None, action="store_const", const=word, help=help)


def given(namespace: argparse.Namespace, kind: type) -> dict[str, Any]:
    """What the command line gives to the settings of a class, by their names."""
    words = {name: getattr(namespace, name, None) for name in settings_of(kind)}
    return {name: value for name, value in words.items() if value not in (None, [])}


def read_job_file(
    path: str | Path, table: Literal["prepare", "train"], kind: type, further: Sequence[str] = ()
) -> dict[str, Any]:
    """What the table [prepare] or [train] of a TOML file gives to settings, by their names, and to further names. Raises SettingError.

    Names are spelled with dashes or underscores; settings of several options stand in tables of their own, such as [train.model-options].
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"--job: cannot read {path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--job: {path} is no TOML: {error}") from error
    wrong = sorted(set(document) - {"prepare", "train"}) or [
        f"{name} = {value!r}" for name, value in document.items() if not isinstance(value, dict)
    ]
    if wrong:
        raise SettingError(f"--job: {path} may have tables [prepare] and [train]; got {wrong[0]}")
    return named(kind, document.get(table, {}), f"--job {path}: [{table}]", further)


# -- Parsers --------------------------------------------------------------------------------------------------------------------


def integer(least: int, most: int = 2**63 - 1) -> Parse:
    """A whole number within bounds, as number or text."""

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
    """A finite number of at least so much, as number or text."""

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
    """A finite number above 0, as number or text."""
    if not (result := number(0)(flag, value)):
        raise SettingError(f"{flag}: must be above 0; got {value}")
    return result


def size_bytes(flag: str, value: Any) -> int:
    """Bytes: a number, with or without a unit, such as 300000, 512MB or 2GiB."""
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
    """One of some words."""

    def parse(flag: str, value: Any) -> str:
        if value not in known:
            raise SettingError(f"{flag}: must be one of {', '.join(known)}; got {value!r}")
        return str(value)

    return parse


def switch(flag: str, value: Any) -> bool:
    """Yes or no."""
    if not isinstance(value, bool):
        raise SettingError(f"{flag}: must be true or false; got {value!r}")
    return value


def switch_or(word: str) -> Parse:
    """Yes or no, or a word."""

    def parse(flag: str, value: Any) -> bool | str:
        if value != word and not isinstance(value, bool):
            raise SettingError(f'{flag}: must be true, false or "{word}"; got {value!r}')
        return word if value == word else bool(value)

    return parse


def text(flag: str, value: Any) -> str:
    """Any text, or a path."""
    if not isinstance(value, str | os.PathLike):
        raise SettingError(f"{flag}: must be text; got {value!r}")
    return os.fspath(value)


def local(flag: str, value: Any) -> str:
    """The path of a file or folder on this machine, as text; not a URL."""
    named = text(flag, value)
    if _URL.match(named):
        shown = re.sub(r"//[^ ]*@", "//***@", named.partition("?")[0])
        raise SettingError(
            f"{flag}: must be a path on this machine; got {shown}; only checkpoints can be in an object store: give a local path, and copy it there"
        )
    return named


def path(flag: str, value: Any) -> Path:
    """The path of a file or folder on this machine."""
    if not _is_path(value):
        raise SettingError(f"{flag}: must be a path; got {value!r}")
    return Path(local(flag, value))


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and os.fspath(value) != "" and "\0" not in os.fspath(value)


def texts(flag: str, value: Any) -> tuple[str, ...]:
    """The path of a file or folder on this machine, or several, as text; a tuple in any case. Each may begin with NAME=."""
    values = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(values, list | tuple) or not all(map(_is_path, values)):
        raise SettingError(f"{flag}: must be a path or a list of paths; got {value!r}")
    for item in values:
        local(flag, re.sub(r"^[^/=]*=", "", os.fspath(item)))
    return tuple(os.fspath(item) for item in values)


def key_values(flag: str, value: Any) -> dict[str, Any]:
    """Options by name: a table, or words K=V."""
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
