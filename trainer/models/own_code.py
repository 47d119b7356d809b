"""Find the files of a user's model.

These are the file that the name of the model refers to, and the files of its folder that it
imports.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath


def search_folders(folder: str) -> list[str]:
    """Return the folders to search for a user's files, in order.

    They are `folder`, if it is not "", and the working directory.
    """
    return list(dict.fromkeys(os.path.abspath(place) for place in (folder, os.getcwd()) if place))


def found_file(name: str, folders: Iterable[str]) -> str:
    """Return the path of a file in the first of these folders that has it.

    Raises:
        FileNotFoundError: no folder has the file.
    """
    path = next((path for folder in folders if os.path.isfile(path := os.path.join(folder, name))), None)
    if path is None:
        raise FileNotFoundError(f"there is no file {name}")
    return path


def extend_path(folders: Iterable[str]) -> None:
    """Append folders to Python's path, so that Python finds modules there after all others."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


_FOR_PACKAGES = {"site-packages", "dist-packages"}


def own_files(names: Iterable[str], folder: str) -> dict[str, Path]:
    """Return the files of models and losses, by their names in a copy of the user's folder.

    An import counts wherever it stands in a file, even in a function that has not been called.
    Imports from folders other than those of `names`, from the standard library and from installed
    packages do not count. If a model is itself installed, the modules of its own package count.
    Nothing is imported. Files and modules that are not found are left out.

    Args:
        names: the names of the models and losses, as `load_named` takes them.
        folder: the folder to search, as `load_named` takes it.
    """
    # Python's import caches may miss files that were just created.
    importlib.invalidate_caches()
    walk = _Walk()
    for name in names:
        module = name.partition(":")[0]
        if module.endswith(".py"):
            walk.add_file(module, search_folders(folder))
        else:
            extend_path(search_folders(folder))
            walk.add_module(module)
    return dict(sorted(walk.found.items()))


class _Walk:
    """Follows the imports of a user's files.

    Attributes:
        found: the files found so far, by their names in the copy.
    """

    def __init__(self) -> None:
        self.found: dict[str, Path] = {}
        # The folders whose modules count, each with its name in the copy.
        self._folders: dict[str, str] = {}
        # The installed packages whose modules count.
        self._installed: set[str] = set()

    def add_file(self, name: str, places: Iterable[str]) -> None:
        try:
            path = found_file(name, places)
        except FileNotFoundError:
            return
        extend_path([os.path.dirname(path)])
        # A path that is absolute or contains `..` has no name within the user's folder.
        plain = not os.path.isabs(name) and ".." not in Path(name).parts
        copied = PurePosixPath(name if plain else os.path.basename(name))
        self._folders.setdefault(os.path.dirname(path), str(copied.parent))
        self._follow(str(copied), path, package="")

    def add_module(self, name: str) -> None:
        top = name.partition(".")[0]
        location = _location(_top_level(top))
        if location is not None and top != "foreload":
            if _is_installed(location):
                self._installed.add(top)
            self._folders.setdefault(location, ".")
            self._import(name)

    def _import(self, name: str) -> None:
        """Add a module, and the packages that contain it, if it counts."""
        top = name.partition(".")[0]
        location = _location(_top_level(top))
        if location not in self._folders or top == "foreload" or (_is_installed(location) and top not in self._installed):
            return
        for spec in _specs(name):
            if spec.has_location and spec.origin is not None:
                copied = PurePosixPath(self._folders[location], os.path.relpath(spec.origin, location))
                is_package = spec.submodule_search_locations is not None
                self._follow(str(copied), spec.origin, spec.name if is_package else spec.name.rpartition(".")[0])

    def _follow(self, copied: str, path: str, package: str) -> None:
        """Add a file and the modules that it imports.

        Args:
            copied: the name of the file in the copy.
            path: the path of the file.
            package: the package that its relative imports refer to.
        """
        if copied in self.found:
            return
        self.found[copied] = Path(path)
        if path.endswith(".py"):
            for name in _imports(Path(path).read_bytes(), package):
                self._import(name)


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Yield the full names of the modules that a file may import.

    Some of the names may be attributes of a module, which are not modules.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # The file was never imported, and cannot be.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _top_level(name: str) -> ModuleSpec | None:
    """Return the spec of a top-level module, or None if Python does not find it."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _specs(name: str) -> Iterator[ModuleSpec]:
    """Yield the specs of a module and its packages, from the outermost package inwards.

    Stops at the first that does not exist. Nothing is imported.
    """
    first, *further = name.split(".")
    spec = _top_level(first)
    while spec is not None:
        yield spec
        if not further or spec.submodule_search_locations is None:
            return
        spec = _inside(f"{spec.name}.{further.pop(0)}", spec.submodule_search_locations)


def _inside(name: str, places: Iterable[str]) -> ModuleSpec | None:
    """Return the spec of a module in the folders of its package, or None if it is not there.

    The package need not have been imported.

    Args:
        name: the full name of the module.
        places: the folders of its package.
    """
    finders = (pkgutil.get_importer(place) for place in places)
    return next((spec for finder in finders if finder is not None and (spec := finder.find_spec(name)) is not None), None)


def _location(spec: ModuleSpec | None) -> str | None:
    """Return the folder on Python's path that contains a top-level module, or None."""
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return next((os.path.dirname(os.path.abspath(place)) for place in spec.submodule_search_locations), None)
    return os.path.dirname(os.path.abspath(spec.origin)) if spec.has_location and spec.origin is not None else None


def _is_installed(location: str) -> bool:
    """Return whether a folder belongs to installed packages or to the standard library."""
    return not _FOR_PACKAGES.isdisjoint(Path(location).parts) or Path(location).is_relative_to(sysconfig.get_path("stdlib"))
