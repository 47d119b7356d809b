"""Which evaluation sets --eval-source names: NAME=SOURCE is a source of the set of that name; plain sources are one set without a name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foreload.base.errors import SettingError
from foreload.pipelines.errors import SourceError
from foreload.pipelines.schedule.format import SET_NAME
from foreload.pipelines.sources.files import match_files

_FLAG = "--eval-source"


def evaluation_sets(sources: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The sources of each set by its name, in the order of first mention; of a set without a name they are under "". Looks for files, where
    a path may have a = itself.

    Raises SettingError where a source can be meant in two ways, and where some have a name and others none.
    """
    of_sets: dict[str, tuple[str, ...]] = {}
    for source in sources:
        name, path = split_name(source)
        of_sets[name] = (*of_sets.get(name, ()), path)
    if "" in of_sets and len(of_sets) > 1:
        raise SettingError(
            f"{_FLAG}: must have a name each, NAME=SOURCE, or none; {of_sets[''][0]} has none, but set {next(filter(None, of_sets))} has; "
            "name all, or none"
        )
    return of_sets


def split_name(source: str) -> tuple[str, str]:
    """The set's name, "" for none, and the path or glob. Raises SettingError where files are there for the text with, and without, the name."""
    match = re.fullmatch(rf"({SET_NAME})=(.+)", source, re.DOTALL)
    if match is None or not _is_there(source):
        return ("", source) if match is None else (match[1], match[2])
    if _is_there(match[2]):
        raise SettingError(
            f"{_FLAG}: must be clear; {source} is a file's own name, and {match[2]} of set {match[1]} is there, too; give ./{source} for the "
            f"former, {match[1]}=./{match[2]} for the latter"
        )
    return "", source


def _is_there(pattern: str) -> bool:
    try:
        return bool(match_files([pattern]))
    except SourceError:
        return False
