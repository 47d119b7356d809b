"""TorchRec in a virtual environment of its own: build/torchrec-venv, made when it is first wanted.

    python benchmarks/torchrec_environment.py

TorchRec asks for the GPU build of FBGEMM, so it is installed without its dependencies, and those that it needs on a CPU by name. The dense
module is this project's own, which needs numba.
"""

from __future__ import annotations

import sys

from virtual_environment import NotToBeHad, VirtualEnvironment

TORCHREC = VirtualEnvironment(
    "torchrec",
    (
        ("torch==2.13.0",),
        ("fbgemm-gpu-cpu==1.8.0",),
        ("--no-deps", "torchrec==1.8.0"),
        ("numba==0.68.1", "tensordict", "pyre-extensions", "torchmetrics==1.0.3", "iopath", "tqdm", "psutil"),
    ),
    "import torchrec; from torchrec.distributed.model_parallel import DistributedModelParallel; print(torchrec.__version__)",
)


if __name__ == "__main__":
    try:
        print(TORCHREC.make())
    except NotToBeHad as error:
        sys.exit(f"TorchRec could not be had: {error}")
