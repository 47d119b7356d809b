"""Where the files of a user's model are looked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def search_folders(folder: str) -> list[str]:
    """Where a user's files are looked for, in order: in `folder`, if it is not "", and in the working directory."""
    return list(dict.fromkeys(os.path.abspath(place) for place in (folder, os.getcwd()) if place))


def found_file(name: str, folders: Iterable[str]) -> str:
    """The path of a file in the first of these folders that has it. Raises FileNotFoundError."""
    path = next((path for folder in folders if os.path.isfile(path := os.path.join(folder, name))), None)
    if path is None:
        raise FileNotFoundError(f"there is no file {name}")
    return path


def extend_path(folders: Iterable[str]) -> None:
    """Have Python find modules in these folders, too, behind all others."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)
