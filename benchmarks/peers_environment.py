"""DeepCTR-Torch, and RecBole for the data in its wheel, in a virtual environment of their own: build/peers-venv, made when it is first wanted.

python benchmarks/peers_environment.py
"""

from __future__ import annotations

import sys

from virtual_environment import NotToBeHad, VirtualEnvironment

PEERS = VirtualEnvironment(
    "peers",
    (
        ("torch==2.13.0",),
        ("--no-deps", "deepctr-torch==0.3.0", "recbole==1.2.1"),
        ("scikit-learn==1.7.2", "pandas==2.3.3", "tqdm", "requests", "packaging"),
    ),
    "import deepctr_torch; print('deepctr-torch', deepctr_torch.__version__)",
)


if __name__ == "__main__":
    try:
        print(PEERS.make())
    except NotToBeHad as error:
        sys.exit(f"DeepCTR-Torch could not be had: {error}")
