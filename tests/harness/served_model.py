"""An exported model as its user has it: the module model.py of its folder, which needs no foreload."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def served(folder: Path) -> Any:
    """The module model.py of a folder."""
    spec = importlib.util.spec_from_file_location(f"served_{folder.name}", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(folder: Path) -> Any:
    """The model in a folder that `foreload export --format torch` wrote."""
    return served(folder).load(folder)
