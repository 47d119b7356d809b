"""Start of a process that runs a module of this foreload, wherever it is installed.

When run as a file, this module is the start of that process. It imports foreload by its location,
so no folder has to be on Python's path. A folder on the path would come before the standard library
and the installed packages. The folder of a checkout holds `trainer`, `cache` and `pipelines`, which
would hide modules of these names that the user's model imports.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).absolute().parents[1]  # the folder of the package foreload


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command line of a process that calls `main` of a module of foreload.

    The process exits with the status that `main` returns. Its sys.argv is what `python -m module`
    would set.
    """
    return [sys.executable, "-P", str(_FOLDER / "base/own_process.py"), module, *arguments]


def _main() -> int:
    spec = importlib.util.spec_from_file_location("foreload", _FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["foreload"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["foreload"])
    del sys.argv[0]
    from foreload.base import process
    from foreload.base.output import guard_messages

    guard_messages(results=False)
    # As in `foreload.__main__`: nearly all that imports make is kept.
    gc.disable()
    module = importlib.import_module(sys.argv[0])
    gc.enable()
    return process.note_exit_status(module.main())


if __name__ == "__main__":
    sys.exit(_main())
