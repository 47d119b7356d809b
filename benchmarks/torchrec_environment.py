"""TorchRec in a virtual environment of its own: build/torchrec-venv, made when it is first wanted.

    python benchmarks/torchrec_environment.py

TorchRec asks for the GPU build of FBGEMM, so it is installed without its dependencies, and those that it needs on a CPU by name. The dense
module is this project's own, which needs numba.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from comparison import tell

FOLDER = Path(__file__).resolve().parent.parent / "build" / "torchrec-venv"
INSTALLED = (
    ("torch==2.13.0",),
    ("fbgemm-gpu-cpu==1.8.0",),
    ("--no-deps", "torchrec==1.8.0"),
    ("numba==0.68.1", "tensordict", "pyre-extensions", "torchmetrics==1.0.3", "iopath", "tqdm", "psutil"),
)
PROBE = "import torchrec; from torchrec.distributed.model_parallel import DistributedModelParallel; print(torchrec.__version__)"


class NotToBeHad(Exception):
    """The environment could not be made; says why."""


def python() -> Path:
    """The environment's Python."""
    return FOLDER / "bin" / "python"


def is_there() -> bool:
    """Whether the environment has been made, of these packages."""
    made = FOLDER / "whole"
    return made.exists() and made.read_text() == repr(INSTALLED)


def make() -> Path:
    """Make the environment if it is not there; returns its Python. Raises NotToBeHad with pip's last words."""
    if is_there():
        return python()
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    tell(f"making {FOLDER}")
    _run([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
    for packages in INSTALLED:
        tell(f"installing {' '.join(packages)}")
        _run([str(python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    tell(f"torchrec {_run([str(python()), '-c', PROBE])} can be imported")
    (FOLDER / "whole").write_text(repr(INSTALLED))
    return python()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise NotToBeHad(f"{' '.join(command[:6])}: {words[-1]}")
    return done.stdout.strip()


if __name__ == "__main__":
    try:
        print(make())
    except NotToBeHad as error:
        sys.exit(f"TorchRec could not be had: {error}")
