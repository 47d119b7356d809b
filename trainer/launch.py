"""`python -m trainer.launch`: `foreload train`, as torchrun and other schedulers start it; and what a program calls to train."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from trainer import numerics
from trainer.job import TrainJob

if TYPE_CHECKING:
    from trainer.attempt import Ending
    from trainer.faults import Witness


def under_scheduler() -> bool:
    """Whether this process was started by torchrun or the like."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def train(job: TrainJob, witness: Witness | None = None) -> Ending | None:
    """`trainer.launcher.train` under the environment that the job asks for: torch, which reads it, is imported only then."""
    numerics.set_environment(job.cpu_capability, job.threads)
    from trainer import launcher

    return launcher.train(job, witness)


if __name__ == "__main__":
    from trainer.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
