"""What a caller of the Python interface holds: a schedule, a run, and the functions that give them."""

from __future__ import annotations

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
from foreload.trainer.errors import CheckpointError, ModelError, RunError


class Schedule:
    """A schedule on disk, taken wherever a path to one is. summary: what `prepare` reported of it; None unless `prepare` returned this."""

    @checked()
    def __init__(self, path: AnyPath, summary: PrepareSummary | None = None) -> None:
        self.path = Path(path)
        self.summary = summary

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Schedule({str(self.path)!r})"


class Run(Model):
    """A run on disk, taken wherever a path to one is. Nothing is read before it is asked for; every call reads anew.

    store: URLs of its store shards, needed only where they hold a password that FORELOAD_STORE_PASSWORD does not give. accept_model: evaluate,
    predict and export also with other code of the model than it was trained with. Every method may raise a ForeloadError.
    """

    _manifest = "manifest.json"
    path: Path

    @checked()
    def __init__(self, path: AnyPath, store: str | None = None, accept_model: bool = False) -> None:
        super().__init__(path)
        self._store, self._accept_model = store, accept_model

    @property
    def summary(self) -> TrainSummary:
        """What its training reported at its end. Raises RunError where it has none yet."""
        return TrainSummary.of(self._json("summary.json"))

    @property
    def auc(self) -> float | None:
        """Area under the ROC curve of the last evaluation; None without one."""
        return self.summary.auc

    @property
    def log_loss(self) -> float | None:
        """Mean log loss of the last evaluation; None without one."""
        return self.summary.log_loss

    @property
    def state(self) -> str:
        """training, stopped or ended: "training" also where its processes were killed. Raises RunError where it never began."""
        return str(self._json("status.json")["state"])

    def metrics(self) -> list[StepMetrics | EvaluationMetrics]:
        """Every step and every evaluation so far, in order; also while it trains."""
        self._json("manifest.json")
        kinds: dict[str, type[StepMetrics | EvaluationMetrics]] = {"step": StepMetrics, "evaluation": EvaluationMetrics}
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        # The last line may still be being written.
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [kinds[line["kind"]].of(line) for line in lines if line["kind"] in kinds]

    @checked()
    def report(self, out: AnyPath | None = None, *, beside: AnyPath | None = None) -> Path:
        """Write a page to look at, also while it trains; returns where it is. beside: another run on the same axes.

        out: the file; by default report.html in its folder, beside another one NAME-NAME-report.html in this one.
        """
        asked = {"out": None if out is None else os.fspath(out), "beside": None if beside is None else os.fspath(beside)}
        return Path(self._call("report", asked, False)["report"])

    @checked()
    def delete(self, *, folder_moved: bool = False, force: bool = False) -> Deletion:
        """Delete its rows on the store, its local stores and its folder. Refused while it trains, and for a folder that does not own the rows.

        folder_moved: it was moved from another disk or host; force: delete the rows even if they are another folder's.
        """
        return Deletion.of(self._call("delete", {"folder_moved": folder_moved, "force": force}, False))

    def _job(self) -> Mapping[str, Any]:
        job: Mapping[str, Any] = self._json(self._manifest).get("job", {})
        return job

    def _missing(self, name: str) -> RunError:
        what = {"summary.json": "it has not come to an end yet", "status.json": "it never began to train"}
        return RunError(f"run {self.path}: has no {name}: {what.get(name, 'it is no run; give the folder that train wrote')}")


class Checkpoint(Model):
    """A checkpoint in a folder, or under a URL, taken wherever a path to one is; it is asked without a store. Every call verifies its files.

    schedule: where the schedule is now that it was trained on, needed only for raw values, and where there are vocabularies, if it was moved.
    accept_model: as Run has it.
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
        """The last step trained."""
        return int(self._json(self._manifest)["step"])

    def _job(self) -> Mapping[str, Any]:
        job: Mapping[str, Any] = self._json(self._manifest).get("run", {}).get("job", {})
        return job

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.path}: has no {name}, so it is none; give a folder that `foreload checkpoint save` wrote"
        )


@checked()
def open_checkpoint(checkpoint: AnyPath, *, schedule: AnyPath | None = None, accept_model: bool = False) -> Checkpoint:
    """The checkpoint in a folder, or under a URL. schedule, accept_model: as Checkpoint has them. Raises CheckpointError where there is none."""
    opened = Checkpoint(checkpoint, schedule, accept_model)
    opened._numerics()
    return opened


@checked()
def apply(export: AnyPath, to: AnyPath, *, key: str | None = None, keep: int = 0, progress: bool = False) -> Applied:
    """Bring an export to where it is served: a full one to where there is none yet, an increment to where its predecessor is.

    to: a folder, or the URL of a Redis server, whose keys are called by `key`. keep: how many versions before it can still be read. Raises
    ExportError, also for one out of order, applied already, or after a gap; nothing is changed then.
    """
    values = {"export": os.fspath(export), "to": os.fspath(to), "key": key, "keep": plain(keep)}
    return Applied.of(client.result("apply", values, None, progress))


@checked()
def open_run(run: AnyPath, *, store: str | None = None, accept_model: bool = False) -> Run:
    """The run in a folder. store, accept_model: as Run has them. Raises RunError where there is none."""
    opened = Run(run, store, accept_model)
    opened._numerics()  # reads the manifest, which only a run has
    return opened


@checked()
def prepare(
    *sources: AnyPath, progress: bool = False, beam_flags: Sequence[str] = (), **settings: Unpack[PrepareSettings]
) -> Schedule:
    """Compile click logs into a schedule. sources: files or globs; beam_flags: as on the command line, for Apache Beam."""
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
    progress: bool = False,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Train a model from a schedule, in processes of its own; returns when the run has ended.

    schedule: may be left out with resume=True or from_checkpoint. model: a name as the command line has it, or the class itself, or a function that
    builds one, of a module that can be imported from its file; loss: likewise, a name or the function. Ctrl-C stops after the step with everything
    saved, and KeyboardInterrupt is raised then; resume=True goes on.
    """
    values = {name: plain(value) for name, value in settings.items()}
    if schedule is not None:
        values["schedule"] = os.fspath(schedule)
    for setting, own in (("model", model), ("loss", loss)):
        if own is not None and not isinstance(own, str):
            values[setting], folder = _location(setting, own)
            if setting == "loss" and values.get("model_folder", folder) != folder:
                raise ModelError(
                    f"loss: must be of a module in the folder of the model, {values['model_folder']}; got one in {folder}; put it there"
                )
            values["model_folder"] = folder
        elif own is not None:
            values[setting] = own
    numerics = Numerics(str(values.get("cpu_capability", "avx2")), _threads(values.get("threads", 1)))
    ended = client.result("train", values, numerics, progress)
    store = values.get("store")
    return Run(ended["run"], None if store is None or str(store).startswith("local") else str(store))


def _threads(value: object) -> int:
    """The number of threads, for the choice of a fork server; 1 where it is none, which the job will refuse."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _location(setting: str, own: Callable[..., object]) -> tuple[str, str]:
    """The name by which a process of its own finds a class or function of the caller's, and the folder where it looks. Raises ModelError."""
    if not (isinstance(own, type) and setting == "model") and not inspect.isfunction(own):
        what = "a class, or a function that builds one, for each trainer builds its own" if setting == "model" else "a function"
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
        raise ModelError(f"{setting}: {name} must be of a module that has a file, for trainers import it; {remedy}")
    if "." in name or (module is not None and getattr(module, name, None) is not own):
        raise ModelError(
            f"{setting}: {own.__module__}.{name} must be found in its module by its name, for trainers import it; {remedy}"
        )
    if own.__module__ == "__main__" or "." not in own.__module__:
        return f"{file.name}:{name}", str(file.parent)
    depth = own.__module__.count(".") + (file.name == "__init__.py")
    return f"{own.__module__}:{name}", str(file.parents[depth])
