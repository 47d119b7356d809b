"""Training in one process, for tests: trainers as threads over the in-memory transport, on real servers.

Each trainer goes through its terms as `foreload.trainer.cluster.member.trainer_process` does, and a coordinator in memory states
them by the same rules. Deaths, and changes of trainers and lanes, are arguments of `train`.
"""

from training.in_threads import job_in_memory, train
from training.one_trainer import Death
from training.outcome import Trained

__all__ = ["Death", "Trained", "job_in_memory", "train"]
