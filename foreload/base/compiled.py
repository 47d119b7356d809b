"""numba, with a cache of compiled kernels that is invalidated by a change in any kernel's source.

A kernel that calls a kernel of another file has it compiled in. numba alone checks only the
kernel's own file, so after an upgrade it would keep using the old code of the other file. All files
that declare kernels therefore import `nb` from here.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numba as nb
from numba.core import caching

__all__ = ["nb"]

_PACKAGE = Path(__file__).absolute().parents[1]
_IMPORTED = re.compile(rb"^from foreload\.([\w.]+) import ", re.MULTILINE)
_of_own_file = caching._SourceFileBackedLocatorMixin.get_source_stamp


@cache
def sources(package: Path = _PACKAGE) -> str:
    """Return the SHA-256 of all files of a package that declare kernels, that these import, and so on.

    Constants of imported files are compiled into kernels, and may be made of those of others.
    """
    read: dict[str, bytes] = {}
    for folder, _, names in os.walk(package, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    read[os.path.relpath(file.name, package)] = file.read()
    reached: set[str] = set()
    ahead = {name for name, data in read.items() if b"import nb\n" in data}
    while ahead:
        reached |= ahead
        imported = {name.decode().replace(".", "/") + ".py" for one in ahead for name in _IMPORTED.findall(read[one])}
        ahead = (imported & read.keys()) - reached
    checksum = hashlib.sha256()
    for name in sorted(reached):
        checksum.update(f"{name} {len(read[name])}\n".encode() + read[name])
    return checksum.hexdigest()


def _get_source_stamp(locator: Any) -> Any:
    """Return a stamp of everything that the kernels of a file are compiled from.

    This replaces numba's own method.
    """
    stamp = _of_own_file(locator)
    return (stamp, sources()) if Path(locator._py_file).is_relative_to(_PACKAGE) else stamp


caching._SourceFileBackedLocatorMixin.get_source_stamp = _get_source_stamp
