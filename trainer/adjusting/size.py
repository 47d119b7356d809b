"""The size of a job: what `train --auto` changes. It imports nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """The size of a job."""

    trainers: int
    shards: int

    def __str__(self) -> str:
        trainers, shards = self.trainers, self.shards
        return f"{trainers} trainer{'s' * (trainers != 1)}, {shards} store shard{'s' * (shards != 1)}"
