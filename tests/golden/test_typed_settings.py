"""The settings as type checkers know them: foreload/api/settings.py is made from their declarations (`make golden` writes it)."""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from golden import pinned

from foreload.api import settings
from foreload.base.errors import SettingError
from foreload.base.settings import Parse, Setting, local, path, settings_of, size_bytes, texts
from foreload.pipelines.planning.options import PrepareOptions
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import storage_place

HEAD = """\"\"\"The settings, by their names on the command line, for type checkers. `foreload prepare --help` and `train --help` explain them.

`make golden` generates this file from the declarations of the settings.
\"\"\"

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Path = str | os.PathLike[str]
"""
PATHS: dict[Parse, str] = {local: "Path", path: "Path", storage_place: "Path", texts: "Path | Sequence[Path]"}


def test_type_checkers_know_the_settings_as_they_are_declared() -> None:
    classes = [
        *typed("PrepareSettings", "prepare", PrepareOptions, ("sources",)),
        *typed("TrainSettings", "train", TrainJob, ("schedule", "model", "loss")),
    ]
    pinned(settings.__file__, "\n".join([HEAD, *classes]))


def typed(name: str, command: str, kind: type, arguments: tuple[str, ...]) -> Iterator[str]:
    """The lines of a class with the settings of a command. arguments: those that are arguments of the function."""
    yield f'\nclass {name}(TypedDict, total=False):\n    """Settings of `foreload {command}`."""\n'
    hints = get_type_hints(kind)
    for setting_name, setting in settings_of(kind).items():
        if setting_name not in arguments:
            yield f"    {setting_name}: {taken(setting, hints[setting.field])}"
    yield "    job: Path\n"


def taken(setting: Setting, hint: Any) -> str:
    """What a setting takes. hint: the type that it has once it is parsed."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    own = PATHS.get(setting.parse) or " | ".join(_written(setting, kind) for kind in kinds if kind is not types.NoneType)
    return own + (" | None" if types.NoneType in kinds else "")


def _written(setting: Setting, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(json.dumps, get_args(kind)))}]"
    if get_origin(kind) is dict:
        _, value = get_args(kind)
        return f"Mapping[str, {value.__name__ if value in (Any, float) else 'Mapping[str, Any]'}]"
    if kind in (bool, float, str) or (kind is int and setting.parse is not size_bytes):
        return str(kind.__name__)
    # Sizes, and what is made of a text otherwise.
    return "int | str" if _is_taken(setting, 10) else "str"


def _is_taken(setting: Setting, value: object) -> bool:
    with contextlib.suppress(SettingError):
        setting.parse(setting.flag, value)
        return True
    return False
