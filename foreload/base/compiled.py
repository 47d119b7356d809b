"""numba, with a cache of compiled kernels that notices a change in any kernel's source.

What one kernel calls of another file is compiled into it, and numba asks whether its own file changed alone: after an upgrade it would go on with
what the other file was. So `nb` is imported from here wherever kernels are declared.
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
    """SHA-256 of all files of a package that declare kernels, and of those that they import from, whose constants are compiled in."""
    read: dict[str, bytes] = {}
    for folder, _, names in os.walk(package, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    read[os.path.relpath(file.name, package)] = file.read()
    kernels = {name for name, data in read.items() if b"import nb\n" in data}
    imported = {name.decode().replace(".", "/") + ".py" for kernel in kernels for name in _IMPORTED.findall(read[kernel])}
    checksum = hashlib.sha256()
    for name in sorted(kernels | (imported & read.keys())):
        checksum.update(f"{name} {len(read[name])}\n".encode() + read[name])
    return checksum.hexdigest()


def _get_source_stamp(locator: Any) -> Any:
    """In the place of numba's: what the kernels of a file were compiled of."""
    stamp = _of_own_file(locator)
    return (stamp, sources()) if Path(locator._py_file).is_relative_to(_PACKAGE) else stamp


caching._SourceFileBackedLocatorMixin.get_source_stamp = _get_source_stamp
