"""Where numba keeps compiled kernels: beside the code or in the user's cache; where neither can be written, in the temporary folder, or nowhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"
"""The environment variable that gives numba the folder; processes that are started have it, too."""

_BESIDE = Path(__file__).resolve().parent / "__pycache__"


def choose_folder() -> str | None:
    """Have kernels compile where no cache can be written, as in a container under a user id of its own, which ends numba otherwise.

    To be called before numba is imported. Returns a line for the user where the cache is not where it usually is.
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "numba"
    named = os.environ.get(VARIABLE)
    if any(_can_be_written(folder) for folder in ([Path(named)] if named else []) + [_BESIDE, users]):
        return None
    import tempfile  # what the usual case does without

    try:
        own = Path(tempfile.gettempdir()) / f"foreload-kernels-{os.geteuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(own) and _can_be_written(own):
            os.environ[VARIABLE] = str(own)
            return f"no cache folder can be written, so compiled kernels are kept in {own}; {VARIABLE} names another folder"
    except OSError:
        pass
    from numba.core.dispatcher import Dispatcher

    setattr(Dispatcher, "enable_caching", _keep_nothing)  # noqa: B010 - a method of another package
    return f"no folder can be written, so kernels are compiled by each process anew, which takes long; {VARIABLE} names a folder for them"


def _keep_nothing(_: object) -> None:
    """In the place of what would end in an error."""


def _can_be_written(folder: Path) -> bool:
    """Whether a folder is there, or can be made, and takes files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can have put anything into a folder: what numba reads from its cache, it runs."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
