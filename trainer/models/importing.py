"""What a user names by package.module:name or file.py:name."""

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
    """What is called `path`, package.module:name or file.py:name.

    A module is looked for on Python's path, then in `folder`, where one is given, and in the working directory; a file in these two folders alone.
    It is imported with generators of random numbers that are always seeded alike, so what it draws then is the same in every process.
    setting, name: what asked for it, and how, for the error. Raises ModelError, and SettingError for a URL.
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
    """A module by its name, or by the path of its file. Raises what its import does."""
    if not name.endswith(".py"):
        extend_path(folders)
        return importlib.import_module(name)
    path = found_file(name, folders)
    if path not in sys.modules:
        # A name that no other module has; what lies beside the file can be imported by it.
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
