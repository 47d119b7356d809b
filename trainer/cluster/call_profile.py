"""The profile that a call adds to the history."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from foreload.base.memory import ProcessUse
from foreload.cache.client.store import Store
from foreload.cache.errors import CacheError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import DenseModel
from foreload.trainer.assembly.job_shape import machine, settings_of_job
from foreload.trainer.cluster.ending import Ending
from foreload.trainer.compute.reports import values_of
from foreload.trainer.errors import HistoryError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run import history
from foreload.trainer.run.directory import METRICS, Run
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.servers import asked

_PATIENCE = timedelta(seconds=1)  # for connecting to servers that trainers have just used


class CallProfile:
    """The profile of a call.

    `begin` records the state before the first step, `leave` writes the profile. Neither fails.
    """

    def __init__(self, job: TrainJob, schedule: Schedule, model: DenseModel) -> None:
        self._path = history.history_path(job.history)
        self._job = job
        self._settings = settings_of_job(job, schedule, model) if self._path is not None else {}

    def begin(self, run: Run, start: Status, urls: Sequence[str]) -> None:
        """Record the state before training begins.

        Args:
            start: The run's status.
            urls: The URLs of its store shards, with passwords.
        """
        if self._path is None:
            return
        self._metrics, self._term = run.path / METRICS, start.term
        self._start_bytes = os.path.getsize(self._metrics) if self._metrics.exists() else 0
        self._urls, self._servers = list(urls), self._used_by(urls)

    def leave(self, ending: Ending, status: Status, urls: Sequence[str]) -> None:
        """Append the call's profile to the history, once the run has stopped.

        If the profile cannot be written, the user gets a warning.

        Args:
            ending: How the call ended.
            status: The run's status now.
            urls: The URLs of its store shards now, with passwords.
        """
        if self._path is None:
            return
        lines = _steps_of(self._metrics, self._start_bytes)
        if not lines:
            return
        steps, stride = history.of_steps(lines)
        before = self._servers
        servers = [
            {
                **used,
                "processor_seconds": max(used["processor_seconds"] - before.get(shard, {}).get("processor_seconds", 0.0), 0.0),
            }
            for shard, used in self._used_by(urls).items()
        ]
        processes = [_of_process("trainer", use) for use in ending.uses]
        processes += [_of_process("launcher", ProcessUse.now()), *servers]
        # With further terms or other servers the trainers or servers changed during the call, so
        # its steps cannot all be compared with each other.
        call_fields = {
            "state": status.state,
            "steps": len(lines),
            "terms": status.term - self._term + 1,
            "same_servers": list(urls) == self._urls,
        }
        settings = {**self._settings, **call_fields}
        try:
            history.add(self._path, history.Profile(settings, machine(), processes, steps, stride))
        except HistoryError as error:
            sys.stderr.write(f"foreload: warning: {error}; no profile of this run is saved\n")

    def _used_by(self, urls: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Return what each shard's server has used. Servers that do not report it are left out."""
        used: dict[int, dict[str, Any]] = {}
        try:
            with Store.connect(asked(urls), self._job.store_silence, self._settings["r"], _PATIENCE) as store:
                for shard in range(store.shards):
                    try:
                        used[shard] = _of_server(shard, store.info(shard))
                    except (CacheError, KeyError, ValueError):
                        continue
        except (CacheError, OSError):
            pass
        return used


def _of_process(kind: str, use: ProcessUse) -> dict[str, Any]:
    return {"kind": kind, "peak_bytes": use.peak_bytes, "processor_seconds": use.processor_seconds}


def _of_server(shard: int, info: Mapping[str, str]) -> dict[str, Any]:
    return {
        "kind": "store",
        "shard": shard,
        "peak_bytes": int(info["used_memory_peak"]),
        "used_bytes": int(info["used_memory"]),
        "processor_seconds": float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
    }


def _steps_of(metrics: Path, start_bytes: int) -> list[list[float]]:
    """Return the values of the steps in metrics.jsonl from `start_bytes` on.

    Lines that are damaged are left out.
    """
    lines: list[list[float]] = []
    try:
        with open(metrics, "rb") as file:
            file.seek(start_bytes)
            for line in file:
                try:
                    entry = json.loads(line)
                    if entry["kind"] == "step":
                        lines.append([float(value) for value in values_of(entry)])
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
    except OSError:
        return []
    return lines
