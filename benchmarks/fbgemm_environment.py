"""FBGEMM's CUDA build in a virtual environment of its own: build/fbgemm-venv, made when it is first wanted.

    python benchmarks/fbgemm_environment.py

Its CPU build is in TorchRec's environment (torchrec_environment.py). The dense module is this project's own, which needs numba.
"""

from __future__ import annotations

import sys

from virtual_environment import NotToBeHad, VirtualEnvironment

FBGEMM = VirtualEnvironment(
    "fbgemm",
    (("torch==2.13.0",), ("fbgemm-gpu==1.8.0",), ("numba==0.68.1",)),
    "import importlib.metadata, fbgemm_gpu; print(importlib.metadata.version('fbgemm-gpu'))",
)


if __name__ == "__main__":
    try:
        print(FBGEMM.make())
    except NotToBeHad as error:
        sys.exit(f"FBGEMM could not be had: {error}")
