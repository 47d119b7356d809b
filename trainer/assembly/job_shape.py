"""The facts about a job, its schedule and its machine that decide how long a step takes.

A profile keeps them. They are numbers and words, without paths, ids or URLs.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreload.base.memory import total_bytes
from foreload.cache.rows.layout import slot_columns, widest
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.built_in import MODELS

OWN_MODEL = "own"
ALIKE = (
    *(
        "model",
        "model_options",
        "dim",
        "dense_parameters",
        "columns",
        "row_optimizer",
        "dense_optimizer",
        "device",
        "cpu_capability",
    ),
    *("features", "dense_columns"),
)
"""The settings that two jobs must share for one to predict the time per sample of the other."""


def settings_of_job(job: TrainJob, schedule: Schedule, model: DenseModel) -> dict[str, Any]:
    """Return what a profile says about a job.

    In the result, `columns` is the number of floats in the widest row, optimizer state included.
    `shards`, `k` and `r` describe the store. `slots` is that of the lane with the most slots.
    """
    header, shards = schedule.header, job.store.count
    k, r = job.code(shards)
    built_in = job.model in MODELS
    return {
        "model": job.model if built_in else OWN_MODEL,
        "model_options": {name: str(value) for name, value in sorted(job.model_options.items())} if built_in else {},
        "dim": job.dim,
        "dense_parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        "columns": slot_columns(model.layouts),
        "weights": widest(model.layouts),
        "row_optimizer": job.row_optimizer,
        "dense_optimizer": job.dense_optimizer,
        "device": job.device,
        "cpu_capability": job.cpu_capability,
        "features": len(header.features.features),
        "dense_columns": len(header.features.dense),
        "batch_size": header.batch_size,
        "lanes": header.lanes,
        "slots": max(schedule.slots),
        "trainers": job.trainers,
        "trainers_here": job.trainers_here,
        "threads": job.threads,
        "copies": job.replicas_held,
        "shards": shards,
        "k": k,
        "r": r,
        "local_store": job.store.local is not None,
        "saves_checkpoints": job.saves_checkpoints,
    }


def machine() -> dict[str, Any]:
    """Return this machine's processor model, usable cores and memory in bytes.

    The keys are "cpu", "cores" and "memory_bytes".
    """
    return {"cpu": _cpu(), "cores": cores(), "memory_bytes": total_bytes()}


def cores() -> int:
    """Return how many cores this process may use, at least 1.

    Its affinity and the limit of its control group both count.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Without a limit the file says "max", which is not a number.
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        count = min(count, max(-(-int(quota) // int(period)), 1))
    return max(count, 1)


def _cpu() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the settings of two profiles agree in all names of ALIKE."""
    return all(one.get(name) == other.get(name) for name in ALIKE)
