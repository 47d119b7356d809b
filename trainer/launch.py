"""`python -m trainer.launch`: `foreload train`, as torchrun and other schedulers start it; and what a program calls to train."""

from __future__ import annotations

import sys

from trainer.cli import main
from trainer.launcher import train

__all__ = ["train"]

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
