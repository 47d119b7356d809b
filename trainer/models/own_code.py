"""The files of a user's model: where they are looked for, the file that names the model, and those of its folder that this one imports."""

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


_FOR_PACKAGES = {"site-packages", "dist-packages"}


def own_files(names: Iterable[str], folder: str) -> dict[str, Path]:
    """Return the files of models and losses, by the name that each has in a copy of the user's folder.

    An import counts wherever it stands in a file, also in a function that was not called yet. One of another folder than those of `names`, of the
    standard library, or of an installed package does not count; of a model that is itself installed, the modules of its own package do.

    names, folder: as `load_named` takes them. Nothing is imported; what is not found is left out.
    """
    # Files may have been made a moment ago.
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
    """Follows imports. folders: from which modules count, each with the name of its copy; installed: packages that count wherever they are."""

    def __init__(self) -> None:
        self.found: dict[str, Path] = {}
        self._folders: dict[str, str] = {}
        self._installed: set[str] = set()

    def add_file(self, name: str, places: Iterable[str]) -> None:
        try:
            path = found_file(name, places)
        except FileNotFoundError:
            return
        extend_path([os.path.dirname(path)])
        # One that is named by way of another folder has no name within the user's.
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
        """Take in a module, with the packages that it is in, if it counts."""
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
        """Take in a file, and what it imports. package: by which its relative imports go."""
        if copied in self.found:
            return
        self.found[copied] = Path(path)
        if path.endswith(".py"):
            for name in _imports(Path(path).read_bytes(), package):
                self._import(name)


def _imports(source: bytes, package: str) -> Iterator[str]:
    """The modules that a file may import, by their full names; among them names of what is no module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # it was not imported yet, and cannot be
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
    """Where Python finds, or has found, a module that is in no package; None where it does not."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _specs(name: str) -> Iterator[ModuleSpec]:
    """Of a module and the packages that it is in, from the outermost on, those that there are. None is imported for that."""
    first, *further = name.split(".")
    spec = _top_level(first)
    while spec is not None:
        yield spec
        if not further or spec.submodule_search_locations is None:
            return
        spec = _inside(f"{spec.name}.{further.pop(0)}", spec.submodule_search_locations)


def _inside(name: str, places: Iterable[str]) -> ModuleSpec | None:
    """Where a module lies, by its full name, in the folders of its package, which need not have been imported; None where it does not."""
    finders = (pkgutil.get_importer(place) for place in places)
    return next((spec for finder in finders if finder is not None and (spec := finder.find_spec(name)) is not None), None)


def _location(spec: ModuleSpec | None) -> str | None:
    """The folder of Python's path in which a module lies that is in no package; None where it lies in none."""
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return next((os.path.dirname(os.path.abspath(place)) for place in spec.submodule_search_locations), None)
    return os.path.dirname(os.path.abspath(spec.origin)) if spec.has_location and spec.origin is not None else None


def _is_installed(location: str) -> bool:
    """Whether a folder is that of installed packages, or of the standard library."""
    return not _FOR_PACKAGES.isdisjoint(Path(location).parts) or Path(location).is_relative_to(sysconfig.get_path("stdlib"))
