"""Import objects that a user names by package.module:name or file.py:name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from foreload.base.settings import local
from foreload.trainer.errors import ModelError
from foreload.trainer.models.generators import seeded
from foreload.trainer.models.own_code import extend_path, found_file, search_folders


def load_named(setting: str, name: str, path: str, folder: str) -> Any:
    """Import the object called `path`: package.module:name or file.py:name.

    A module is looked up on Python's path, then in `folder`, then in the working directory. A file
    is looked up only in these two folders. During the import the random number generators always
    have the same seed, so the values that the module draws are the same in every process.

    Args:
        setting: the setting that names the object, for errors.
        name: the name that the user gave, for errors.
        path: the name of the object.
        folder: the folder to search. If "", only the working directory is searched.

    Raises:
        ModelError: the object cannot be imported.
        SettingError: the path is a URL.
    """
    local(setting, path)
    module_name, _, own_name = path.partition(":")
    folders = search_folders(folder)
    try:
        with seeded(0):
            return getattr(_imported(module_name, folders), own_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ModelError(
            f"{setting}: cannot import {name}: {type(error).__name__}: {error}; looked for it in {' and '.join(folders)}: put it there, or its "
            "folder into PYTHONPATH"
        ) from error


def _imported(name: str, folders: Sequence[str]) -> ModuleType:
    """Import a module by its name or the path of its file. Errors of the import pass through."""
    if not name.endswith(".py"):
        extend_path(folders)
        return importlib.import_module(name)
    path = found_file(name, folders)
    if path not in sys.modules:
        # The path is a module name that no other module has. The folder of the file joins the path,
        # so that the file can import its neighbours.
        extend_path([os.path.dirname(path)])
        spec = importlib.util.spec_from_file_location(path, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[path] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[path])
        except BaseException:
            del sys.modules[path]
            raise
    return sys.modules[path]
