"""Train recommendation models exactly, with embedding tables larger than memory, through crashes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from foreload.base.errors import ForeloadError
from foreload.base.kernel_cache import choose_folder

if TYPE_CHECKING:
    from foreload import nn as nn
    from foreload.api.handles import Checkpoint as Checkpoint
    from foreload.api.handles import Run as Run
    from foreload.api.handles import Schedule as Schedule
    from foreload.api.handles import apply as apply
    from foreload.api.handles import open_checkpoint as open_checkpoint
    from foreload.api.handles import open_run as open_run
    from foreload.api.handles import prepare as prepare
    from foreload.api.handles import train as train
    from foreload.nn import wrap as wrap
    from foreload.trainer.serving.redis_keys import ServedRows as ServedRows

    __version__: str

KERNEL_CACHE = choose_folder()
"""A line for the user if compiled kernels are kept elsewhere than usual, else None.

The folder is chosen before anything imports numba.
"""

_MODULES = dict.fromkeys(
    ("Checkpoint", "Run", "Schedule", "apply", "open_checkpoint", "open_run", "prepare", "train"), "foreload.api.handles"
) | {"ServedRows": "foreload.trainer.serving.redis_keys", "wrap": "foreload.nn"}
__all__ = [
    "Checkpoint",
    "ForeloadError",
    "Run",
    "Schedule",
    "ServedRows",
    "apply",
    "nn",
    "open_checkpoint",
    "open_run",
    "prepare",
    "train",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import a name of the Python interface when it is first used, so that `import foreload` is cheap."""
    if name == "nn":
        return importlib.import_module("foreload.nn")
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def _version() -> str:
    """Return the installed version, or "unknown" if foreload is not installed."""
    from importlib import metadata

    try:
        return metadata.version("foreload")
    except metadata.PackageNotFoundError:
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
