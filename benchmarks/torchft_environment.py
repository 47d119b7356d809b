"""torchft's nightly in a virtual environment of its own: build/torchft-venv, made when it is first wanted.

    python benchmarks/torchft_environment.py

The last release kills the survivors of a replica that is killed, so the nightly is taken.
"""

from __future__ import annotations

import sys

from virtual_environment import NotToBeHad, VirtualEnvironment

TORCHFT = VirtualEnvironment(
    "torchft",
    (("torch==2.13.0",), ("torchft-nightly==2026.10.26",)),
    "import importlib.metadata, torchft; print(importlib.metadata.version('torchft-nightly'))",
)


if __name__ == "__main__":
    try:
        print(TORCHFT.make())
    except NotToBeHad as error:
        sys.exit(f"torchft could not be had: {error}")
