"""The objects that a caller of the Python interface holds, and the functions that return them."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from foreload.api import client
from foreload.api.client import Numerics
from foreload.api.models import AnyPath, Model, plain
from foreload.api.results import (
    Applied,
    Deletion,
    EvaluationMetrics,
    PrepareSummary,
    StepMetrics,
    TrainSummary,
)
from foreload.api.settings import PrepareSettings, TrainSettings
from foreload.base.arguments import checked
from foreload.base.errors import SettingError
from foreload.trainer.errors import CheckpointError, ModelError, RunError


class Schedule:
    """A schedule on disk. It can be given wherever a path to a schedule can.

    Args:
        path: the folder of the schedule.
        summary: what `prepare` reported. It is None unless `prepare` returned this object.
    """

    @checked()
    def __init__(self, path: AnyPath, summary: PrepareSummary | None = None) -> None:
        self.path = Path(path)
        self.summary = summary

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Schedule({str(self.path)!r})"


class Run(Model):
    """A run on disk. It can be given wherever a path to a run can.

    Nothing is read until a method needs it, and every call reads again. Every method may raise a
    ForeloadError.

    Args:
        path: the folder of the run.
        store: the URLs of its store shards. They are needed only if they contain a password that
            FORELOAD_STORE_PASSWORD does not give.
        accept_model: whether `evaluate`, `predict`, `export` and `export_torch` accept that the
            model's code differs from the code that it was trained with.
        last: whether the model's methods use the model of the run's end in any case. Otherwise,
            if the run ended with `stop_early` and `keep_best`, they use its best checkpoint.
    """

    _manifest = "manifest.json"
    path: Path

    @checked()
    def __init__(self, path: AnyPath, store: str | None = None, accept_model: bool = False, last: bool = False) -> None:
        super().__init__(path)
        self._store, self._accept_model, self._last = store, accept_model, last

    @property
    def best(self) -> Checkpoint:
        """The checkpoint of the best evaluation, which `train(keep_best=METRIC)` keeps.

        Raises:
            CheckpointError: none is recorded.
        """
        from foreload.trainer.checkpoints.best import best_model

        return Checkpoint(str(best_model(str(self.path))), accept_model=self._accept_model)

    @property
    def summary(self) -> TrainSummary:
        """The summary of the training, from its end.

        Raises:
            RunError: the training has not ended yet.
        """
        return TrainSummary.of(self._json("summary.json"))

    @property
    def evaluation(self) -> EvaluationMetrics | None:
        """The evaluation of the model that the run stands for, of the first set. If None, there was none.

        It is the best one if the run ended with `stop_early` and `keep_best`, unless `open_run` got
        `last=True`; otherwise it is the last one. Its `step` says which.
        """
        from foreload.trainer.checkpoints.best import kept_best
        from foreload.trainer.run.directory import Run as RunFolder

        evaluations = [line for line in self._metrics("evaluation") if isinstance(line, EvaluationMetrics)]
        if not evaluations:
            return None
        kept = None if self._last else kept_best(RunFolder.open(self.path))
        step = evaluations[-1].step if kept is None else kept.best.step
        # After a rollback a step is evaluated again. The last evaluation counts.
        of_sets = {line.set: line for line in evaluations if line.step == step}
        return next(iter(of_sets.values()), None)

    @property
    def auc(self) -> float | None:
        """The area under the ROC curve of `evaluation`. If None, there was none."""
        evaluation = self.evaluation
        return None if evaluation is None else evaluation.auc

    @property
    def log_loss(self) -> float | None:
        """The mean log loss of `evaluation`. If None, there was none."""
        evaluation = self.evaluation
        return None if evaluation is None else evaluation.log_loss

    @property
    def state(self) -> str:
        """The state of the run: "training", "stopped" or "ended".

        The state is "training" also if the run's processes were killed.

        Raises:
            RunError: the run never began to train.
        """
        return str(self._json("status.json")["state"])

    def metrics(self) -> list[StepMetrics | EvaluationMetrics]:
        """Return the metrics of all steps and evaluations so far, in order. The run may train."""
        return self._metrics("")

    def _metrics(self, kind: str) -> list[StepMetrics | EvaluationMetrics]:
        """Return the metrics of a kind, or of all kinds if it is ""."""
        self._json("manifest.json")
        kinds: dict[str, type[StepMetrics | EvaluationMetrics]] = {"step": StepMetrics, "evaluation": EvaluationMetrics}
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        # The last line may be incomplete while the run writes it.
        whole = text[: text.rfind("\n") + 1].splitlines()
        lines = [json.loads(line) for line in whole if kind in line]
        return [kinds[line["kind"]].of(line) for line in lines if line["kind"] in kinds and kind in ("", line["kind"])]

    @checked()
    def report(self, out: AnyPath | None = None, *, beside: AnyPath | None = None) -> Path:
        """Write a page about the run, and return its path. The run may train.

        Args:
            out: the file to write. If None, report.html in the run's folder; with `beside`,
                NAME-NAME-report.html in the working directory.
            beside: another run, to show on the same axes.
        """
        asked = {"out": None if out is None else os.fspath(out), "beside": None if beside is None else os.fspath(beside)}
        return Path(self._call("report", asked, False)["report"])

    @checked()
    def delete(self, *, folder_moved: bool = False, force: bool = False) -> Deletion:
        """Delete the run: its rows on the store, its local stores and its folder.

        A run that trains is refused, and so is a folder that does not own the rows.

        Args:
            folder_moved: whether the folder was moved from another disk or host.
            force: whether to delete the rows even if another folder owns them.
        """
        return Deletion.of(self._call("delete", {"folder_moved": folder_moved, "force": force}, False))

    def _job(self) -> Mapping[str, Any]:
        job: Mapping[str, Any] = self._json(self._manifest).get("job", {})
        return job

    def _missing(self, name: str) -> RunError:
        what = {"summary.json": "it has not ended yet", "status.json": "it never began to train"}
        return RunError(f"run {self.path}: has no {name}: {what.get(name, 'it is not a run; give the folder that train wrote')}")


class Checkpoint(Model):
    """A checkpoint in a folder or under a URL. It can be given wherever a path to a checkpoint can.

    It needs no store. Every call verifies the checkpoint's files.

    Args:
        path: the folder, or its URL.
        schedule: the folder where the schedule of the checkpoint is now, if it was moved. It is
            needed only for raw values, and if there are vocabularies.
        accept_model: as for Run.
    """

    _manifest = "checkpoint.json"

    @checked()
    def __init__(self, path: AnyPath, schedule: AnyPath | None = None, accept_model: bool = False) -> None:
        super().__init__(path)
        self._accept_model = accept_model
        if "://" in os.fspath(path):
            from foreload.trainer.storage import place

            self.path = place(os.fspath(path))
        self._schedule = None if schedule is None else os.fspath(schedule)

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return int(self._json(self._manifest)["step"])

    def _job(self) -> Mapping[str, Any]:
        job: Mapping[str, Any] = self._json(self._manifest).get("run", {}).get("job", {})
        return job

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.path}: has no {name}, so it is not a checkpoint; give a folder that `foreload checkpoint save` wrote"
        )


@checked()
def open_checkpoint(checkpoint: AnyPath, *, schedule: AnyPath | None = None, accept_model: bool = False) -> Checkpoint:
    """Return the checkpoint in a folder or under a URL.

    Args:
        checkpoint: the folder, or its URL.
        schedule: as for Checkpoint, like `accept_model`.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    opened = Checkpoint(checkpoint, schedule, accept_model)
    opened._numerics()
    return opened


@checked()
def apply(export: AnyPath, to: AnyPath, *, key: str | None = None, keep: int = 0, progress: bool = False) -> Applied:
    """Bring an export to where it is served.

    A full export goes to where there is none yet, an increment to where its predecessor is.

    Args:
        export: the folder of the export.
        to: a folder, or the URL of a Redis server.
        key: the template of the server's keys.
        keep: how many older versions stay readable.
        progress: whether progress is shown on stderr.

    Raises:
        ExportError: the export is out of order, was applied already, or comes after a gap, among
            other reasons. Nothing is changed then.
    """
    values = {"export": os.fspath(export), "to": os.fspath(to), "key": key, "keep": plain(keep)}
    return Applied.of(client.result("apply", values, None, progress))


@checked()
def open_run(run: AnyPath, *, store: str | None = None, accept_model: bool = False, last: bool = False) -> Run:
    """Return the run in a folder.

    Args:
        run: the folder.
        store: as for Run, like `accept_model` and `last`.

    Raises:
        RunError: there is no run.
    """
    opened = Run(run, store, accept_model, last)
    # This reads the manifest, which only a run has.
    opened._numerics()
    return opened


@checked()
def prepare(
    *sources: AnyPath, progress: bool = False, beam_flags: Sequence[str] = (), **settings: Unpack[PrepareSettings]
) -> Schedule:
    """Compile click logs into a schedule.

    Args:
        sources: files or globs.
        progress: whether progress is shown on stderr.
        beam_flags: flags for Apache Beam, as on the command line.
        settings: the options of `foreload prepare`, with underscores for dashes.
    """
    given = {name: plain(value) for name, value in settings.items()}
    if sources:
        given["sources"] = [os.fspath(source) for source in sources]
    values = {"settings": given, "beam_flags": list(beam_flags)}
    summary = PrepareSummary.of(client.result("prepare", values, None, progress))
    return Schedule(summary.schedule, summary)


@checked()
def train(
    schedule: AnyPath | None = None,
    *,
    model: str | Callable[..., object] | None = None,
    loss: str | Callable[..., object] | None = None,
    on_evaluation: Callable[[EvaluationMetrics], object] | None = None,
    progress: bool = False,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Train a model from a schedule, in processes of its own, and return when the run has ended.

    Ctrl-C stops the training after the current step, with everything saved, and KeyboardInterrupt
    is raised then. A call with resume=True continues the run.

    Args:
        schedule: the schedule. It may be left out with resume=True or from_checkpoint.
        model: a name as on the command line, or the class itself, or a function that builds one.
            Its module must be importable from its file.
        loss: likewise, a name or the function.
        on_evaluation: is called with the metrics of each evaluation set when they are known, while
            training goes on. If it raises an exception, training stops after the current step, with
            everything saved, and the exception is raised here.
        progress: whether progress is shown on stderr.
        settings: the options of `foreload train`, with underscores for dashes.
    """
    if on_evaluation is not None and not callable(on_evaluation):
        raise SettingError(f"on_evaluation: must be a function of one argument, the metrics; got {type(on_evaluation).__name__}")
    values = {name: plain(value) for name, value in settings.items()}
    if schedule is not None:
        values["schedule"] = os.fspath(schedule)
    for setting, own in (("model", model), ("loss", loss)):
        if own is not None and not isinstance(own, str):
            values[setting], folder = _location(setting, own)
            if setting == "loss" and values.get("model_folder", folder) != folder:
                raise ModelError(
                    f"loss: must come from a module in the model's folder, {values['model_folder']}; got one in {folder}; move it there"
                )
            values["model_folder"] = folder
        elif own is not None:
            values[setting] = own
    numerics = Numerics(str(values.get("cpu_capability", "avx2")), _threads(values.get("threads", 1)))
    ended: Mapping[str, Any] = {}
    with contextlib.closing(client.parts("train", values, numerics, progress)) as parts:
        for message in parts:
            ended = message.values
            if on_evaluation is not None and "evaluation" in ended:
                on_evaluation(EvaluationMetrics.of(ended["evaluation"]))
    store = values.get("store")
    return Run(ended["run"], None if store is None or str(store).startswith("local") else str(store))


def _threads(value: object) -> int:
    """Return the number of threads, which the choice of a fork server needs.

    A malformed value counts as 1; the job refuses it later.
    """
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _location(setting: str, own: Callable[..., object]) -> tuple[str, str]:
    """Return how another process finds a class or function: its name, and the folder to look in.

    Raises:
        ModelError: another process cannot find it.
    """
    if not (isinstance(own, type) and setting == "model") and not inspect.isfunction(own):
        what = "a class, or a function that builds one, since each trainer builds its own" if setting == "model" else "a function"
        raise ModelError(f"{setting}: must be {what}; got {type(own).__name__}")
    module, name = sys.modules.get(own.__module__), own.__qualname__
    remedy = (
        f'write it into a file of its own, at the top level, and give that as {setting}="file.py:NAME" or import it from there'
    )
    try:
        file = Path(inspect.getfile(own)).absolute()
    except (TypeError, OSError):
        file = Path()
    if not file.is_file():
        raise ModelError(f"{setting}: {name} must come from a module that has a file, since trainers import it; {remedy}")
    if "." in name or (module is not None and getattr(module, name, None) is not own):
        raise ModelError(
            f"{setting}: {own.__module__}.{name} must be found in its module by its name, since trainers import it; {remedy}"
        )
    if own.__module__ == "__main__" or "." not in own.__module__:
        return f"{file.name}:{name}", str(file.parent)
    depth = own.__module__.count(".") + (file.name == "__init__.py")
    return f"{own.__module__}:{name}", str(file.parents[depth])
