"""Virtual environments of contenders that are not installed beside this project: in build/, made when they are first wanted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from comparison import tell

BUILD = Path(__file__).resolve().parent.parent / "build"


class NotToBeHad(Exception):
    """The environment could not be made; says why."""


@dataclass(frozen=True, slots=True)
class VirtualEnvironment:
    """build/NAME-venv. installed: arguments of one `pip install` after the other; probe: a program that says what there is, to see that it works."""

    name: str
    installed: tuple[tuple[str, ...], ...]
    probe: str

    @property
    def folder(self) -> Path:
        """Where it is, or is to be."""
        return BUILD / f"{self.name}-venv"

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"

    def is_there(self) -> bool:
        """Whether it has been made, of these packages."""
        made = self.folder / "whole"
        return made.exists() and made.read_text() == repr(self.installed)

    def make(self) -> Path:
        """Make it if it is not there; returns its Python. Raises NotToBeHad with pip's last words."""
        if self.is_there():
            return self.python
        BUILD.mkdir(parents=True, exist_ok=True)
        tell(f"making {self.folder}")
        _run([sys.executable, "-m", "venv", "--clear", str(self.folder)])
        for packages in self.installed:
            tell(f"installing {' '.join(packages)}")
            _run([str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
        tell(f"{self.name} {_run([str(self.python), '-c', self.probe])} can be imported")
        (self.folder / "whole").write_text(repr(self.installed))
        return self.python


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise NotToBeHad(f"{' '.join(command[:6])}: {words[-1]}")
    return done.stdout.strip()
