"""The figures of a run for an experiment tracker, beside TensorBoard (`--track`, docs/monitoring.md)."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from foreload.base.errors import SettingError
from foreload.trainer.job.job_values import masked
from foreload.trainer.run.directory import REPORT, SUMMARY

PATIENCE_SECONDS = 60.0
"""How long the end of a call waits for the tracker to take what it was given."""
_WAITING = 10_000  # calls that may wait for the tracker; with more, figures are left out
_RUN_TAG = "foreload.run_id"
_EXPERIMENT, _EXPERIMENT_VARIABLE = "foreload", "MLFLOW_EXPERIMENT_NAME"
_BATCH, _VALUE_CHARACTERS = 100, 6000  # what MLflow takes of parameters


class Tracker(Protocol):
    """What `--track` calls, in this order and from one thread. An exception is a warning."""

    def settings(self, run_id: str, name: str, settings: Mapping[str, Any]) -> None:
        """Begin to report a call of `foreload train`.

        Args:
            run_id: the id of the run, the same for every call that resumes it.
            name: the name of the run's folder.
            settings: the settings of the training by name, without passwords.
        """

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Report figures by name, under the names that they have in TensorBoard, at a training step."""

    def files(self, paths: Sequence[Path], state: str) -> None:
        """Report that the call is over.

        Args:
            paths: the files that it leaves: summary.json, and report.html unless it is turned off.
            state: "ended" if the schedule is done, "stopped" if the run can be resumed, or "failed".
        """


class MlflowTracker:
    """Reports to MLflow. All calls of a run report to one run of MLflow, which a tag finds.

    Args:
        uri: where MLflow keeps its runs. If "", MLflow's own default.
    """

    def __init__(self, uri: str) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise SettingError("--track: mlflow is not installed; install it with pip install 'foreload[mlflow]'") from error
        try:
            self._client = MlflowClient(uri or None)
        except MlflowException as error:
            why = " ".join(masked(str(error)).split())
            raise SettingError(
                f"--track: MLflow cannot use {masked(uri) or 'its default'} (a database needs pip install mlflow): {why}"
            ) from error
        self._run = ""

    def settings(self, run_id: str, name: str, settings: Mapping[str, Any]) -> None:
        """See Tracker."""
        from mlflow.entities import Param

        client, experiment = self._client, os.environ.get(_EXPERIMENT_VARIABLE, _EXPERIMENT)
        known = client.get_experiment_by_name(experiment)
        place = client.create_experiment(experiment) if known is None else known.experiment_id
        runs = client.search_runs([place], f"tags.`{_RUN_TAG}` = '{run_id}'", max_results=1)
        if runs:
            client.update_run(runs[0].info.run_id, status="RUNNING")
        run = runs[0] if runs else client.create_run(place, tags={_RUN_TAG: run_id}, run_name=name)
        self._run = run.info.run_id
        # MLflow refuses another value for a parameter, so those of the first call stay.
        parameters = [Param(key, str(value)[:_VALUE_CHARACTERS]) for key, value in settings.items() if key not in run.data.params]
        for first in range(0, len(parameters), _BATCH):
            client.log_batch(self._run, params=parameters[first : first + _BATCH])

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def files(self, paths: Sequence[Path], state: str) -> None:
        """See Tracker."""
        for path in paths:
            self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, {"ended": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED"))


def load_tracker(name: str, folder: str) -> Tracker:
    """Return the tracker that `--track` names.

    Args:
        folder: where to look for a class, as for a model.

    Raises:
        SettingError: MLflow is not installed, or cannot use the URI; the class cannot be made, or lacks a method.
        ModelError: the class cannot be imported.
    """
    kind, _, uri = name.partition(":")
    if kind == "mlflow":
        return MlflowTracker(uri)
    # This loads torch, which commands that only read reports need not.
    from foreload.trainer.models.importing import load_named

    made = load_named("--track", name, name, folder)
    try:
        tracker: Tracker = made()
    except Exception as error:
        raise SettingError(f"--track: {name} cannot be made: {type(error).__name__}: {error}") from error
    if missing := [method for method in ("settings", "metrics", "files") if not callable(getattr(tracker, method, None))]:
        raise SettingError(f"--track: {name} must have the methods settings, metrics and files; it lacks {', '.join(missing)}")
    return tracker


class Tracking:
    """Calls a tracker from a thread of its own, so that no step waits for it.

    The first call that fails is a warning, and so is a queue that is full. Later calls are tried.

    Args:
        name: the tracker's name, for warnings.
        patience: for how many seconds `close` waits.
    """

    def __init__(self, tracker: Tracker, name: str, patience: float = PATIENCE_SECONDS) -> None:
        self._tracker, self._name, self._patience = tracker, masked(name), patience
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._warned = self._begun = False
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def settings(self, run_id: str, name: str, settings: Mapping[str, Any]) -> None:
        """See Tracker. A call that begins several times reports its first settings."""
        if not self._begun:
            self._begun = True
            self._submit(lambda: self._tracker.settings(run_id, name, settings))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        self._submit(lambda: self._tracker.metrics(values, step))

    def close(self, run: Path, state: str) -> None:
        """End the report, unless none was begun, and wait until the tracker has taken it.

        Args:
            run: the run's folder.
            state: as for `Tracker.files`.
        """
        paths = [path for path in (run / SUMMARY, run / REPORT) if state != "failed" and path.exists()]
        last = (lambda: self._tracker.files(paths, state)) if self._begun else None
        try:
            for call in (last, None):
                self._calls.put(call, timeout=self._patience)
            self._thread.join(self._patience)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._warned = False
            self._warn(f"it has not taken all figures within {self._patience:.0f} s of the end; the rest is missing there")

    def _submit(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._warn("it takes figures too slowly, so some are left out")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # a tracker may raise anything
                self._warn(f"{type(error).__name__}: {masked(str(error))}; figures are missing there")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            sys.stderr.write(f"foreload: warning: --track {self._name}: {' '.join(why.split())}\n")
