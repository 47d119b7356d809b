"""numba, with a cache of compiled kernels that is invalidated by a change in any kernel's source.

A kernel that calls a kernel of another file has it compiled in. numba alone checks only the
kernel's own file, so after an upgrade it would keep using the old code of the other file. All files
that declare kernels therefore import `nb` from here.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import numba as nb
from numba.core import caching

__all__ = ["nb"]

_PACKAGE = Path(__file__).absolute().parents[1]
_IMPORTED = re.compile(r"^from foreload\.([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
_of_own_file = caching._SourceFileBackedLocatorMixin.get_source_stamp


@cache
def _read(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """Return what a file of this package holds, and the files that it imports. There may be none."""
    data = path.read_bytes() if path.exists() else b""
    imported = []
    for module, names in _IMPORTED.findall(data.decode()):
        # What is imported from a package may be a module.
        of_package = (f"{module}.{name}" for name in re.findall(r"\w+", names))
        imported += [name.replace(".", "/") + ".py" for name in (module, *of_package)]
    return data, tuple(imported)


@cache
def sources(file: str, package: Path = _PACKAGE) -> str:
    """Return the SHA-256 of a file that declares kernels, of those that it imports, and so on.

    Constants of imported files are compiled into kernels, and may be made of those of others.
    """
    reached: set[str] = set()
    ahead = {file}
    while ahead:
        reached |= ahead
        ahead = {imported for name in ahead for imported in _read(package / name)[1]} - reached
    checksum = hashlib.sha256()
    for name in sorted(reached):
        data, _ = _read(package / name)
        checksum.update(f"{name} {len(data)}\n".encode() + data)
    return checksum.hexdigest()


def _get_source_stamp(locator: Any) -> Any:
    """Return a stamp of everything that the kernels of a file are compiled from.

    This replaces numba's own method.
    """
    stamp, file = _of_own_file(locator), Path(locator._py_file)
    return (stamp, sources(str(file.relative_to(_PACKAGE)))) if file.is_relative_to(_PACKAGE) else stamp


caching._SourceFileBackedLocatorMixin.get_source_stamp = _get_source_stamp
