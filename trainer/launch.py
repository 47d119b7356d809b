"""`python -m foreload.trainer.launch`: `foreload train`, for schedulers that start a module."""

from __future__ import annotations

import sys

from foreload.base.process import use_utf8
from foreload.trainer.cli import main

if __name__ == "__main__":
    use_utf8()
    sys.exit(main(["train", *sys.argv[1:]]))
