"""The folder where numba keeps compiled kernels.

It is beside the code or in the user's cache. If neither can be written, it is in the temporary
folder, or kernels are not kept.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"
"""The environment variable that gives numba the folder. Child processes inherit it."""

_BESIDE = Path(__file__).resolve().parent / "__pycache__"


def choose_folder() -> str | None:
    """Choose the folder for compiled kernels, so that numba works where no cache can be written.

    An example is a container that runs under a user id of its own. numba would otherwise fail
    there. To be called before numba is imported.

    Returns:
        A line for the user if the folder is not one of the usual ones, else None.
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "numba"
    named = os.environ.get(VARIABLE)
    if any(_can_be_written(folder) for folder in ([Path(named)] if named else []) + [_BESIDE, users]):
        return None
    import tempfile  # not needed in the usual case

    try:
        own = Path(tempfile.gettempdir()) / f"foreload-kernels-{os.geteuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(own) and _can_be_written(own):
            os.environ[VARIABLE] = str(own)
            return f"no cache folder is writable, so compiled kernels are kept in {own}; set {VARIABLE} to use another folder"
    except OSError:
        pass
    from numba.core.dispatcher import Dispatcher

    setattr(Dispatcher, "enable_caching", _keep_nothing)  # noqa: B010 - a method of another package
    return f"no cache folder is writable, so each process compiles the kernels again, which takes long; set {VARIABLE} to a writable folder"


def _keep_nothing(_: object) -> None:
    """Do nothing. This replaces a method of numba that would fail."""


def _can_be_written(folder: Path) -> bool:
    """Return whether a folder exists or can be created, and is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _is_ours(folder: Path) -> bool:
    """Return whether no other user can have put anything into a folder.

    numba executes what it reads from its cache.
    """
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
