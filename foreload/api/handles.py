"""What a caller of the Python interface holds: a schedule, a run, and the functions that give them."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from foreload.api import client
from foreload.api.client import Numerics
from foreload.api.results import (
    Deletion,
    Evaluation,
    EvaluationMetrics,
    Export,
    PrepareSummary,
    Rows,
    StepMetrics,
    TrainSummary,
)
from foreload.api.settings import PrepareSettings, TrainSettings
from foreload.pipelines.errors import SettingError
from foreload.trainer.errors import ModelError, RunError

if TYPE_CHECKING:
    import numpy as np

AnyPath = str | os.PathLike[str]


class Schedule:
    """A schedule on disk, taken wherever a path to one is. summary: what `prepare` told of it; None unless `prepare` returned this."""

    def __init__(self, path: AnyPath, summary: PrepareSummary | None = None) -> None:
        self.path = Path(path)
        self.summary = summary

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Schedule({str(self.path)!r})"


class Run:
    """A run on disk, taken wherever a path to one is. Nothing is read before it is asked for; every call reads anew.

    store: URLs of its store shards, needed only where they hold a password that FORELOAD_STORE_PASSWORD does not give. Every method may raise a
    ForeloadError.
    """

    def __init__(self, path: AnyPath, store: str | None = None) -> None:
        self.path = Path(path)
        self._store = store

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def summary(self) -> TrainSummary:
        """What its training told at its end. Raises RunError where it has none yet."""
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

    def evaluate(self, schedule: AnyPath | None = None, *, progress: bool = False) -> Evaluation:
        """Measure its model on the evaluation steps of a schedule, its own by default."""
        return Evaluation.of(self._call("evaluate", {"schedule": None if schedule is None else os.fspath(schedule)}, progress))

    def rows(self, table: str, *, values: Sequence[str | int | None] | None = None, ids: Sequence[int] | None = None) -> Rows:
        """Rows of a table, by raw values (None where missing), encoded as the schedule says, or by ids. One of the two must be given."""
        import numpy as np

        if (values is None) == (ids is None):
            raise SettingError("rows: needs values=[...] or ids=[...], one of them")
        asked = {"table": table, "values": _plain_list(values), "ids": _plain_list(ids)}
        with contextlib.closing(client.parts("rows", self._named(asked), self._numerics())) as parts:
            message = list(parts)[-1]
        count, columns = message.values["rows"], message.values["columns"]
        data = message.payload
        vectors = np.frombuffer(data, np.float32, count * columns, 8 * count).reshape(count, columns)
        trained = np.frombuffer(data, np.bool_, count, 8 * count + vectors.nbytes)
        return Rows(table, np.frombuffer(data, np.int64, count), vectors, trained, message.values["step"])

    def predict(
        self,
        *sources: AnyPath,
        format: str | None = None,
        steps_of: AnyPath | None = None,
        logits: bool = False,
        progress: bool = False,
    ) -> np.ndarray:
        """The probability that each record's label is 1, float32 [records], in order; see `predict_batches`, which takes bounded memory."""
        import numpy as np

        batches = self.predict_batches(*sources, format=format, steps_of=steps_of, logits=logits, progress=progress)
        return np.concatenate([np.empty(0, np.float32), *batches])

    def predict_batches(
        self,
        *sources: AnyPath,
        format: str | None = None,
        steps_of: AnyPath | None = None,
        logits: bool = False,
        progress: bool = False,
    ) -> Iterator[np.ndarray]:
        """What `predict` gives, batch after batch, as they are computed: float32 [records of the batch] each.

        sources: files or globs of raw records, whose labels are not needed; malformed ones are left out, as many as the schedule's max_rejects
        allows. format: by default that of the schedule, or what the names say. steps_of: a schedule whose evaluation samples these are, in
        order: the logits are those of `evaluate` on it, bit for bit. logits: give these, instead of probabilities.
        """
        import numpy as np

        asked = {
            "sources": [os.fspath(source) for source in sources],
            "format": format,
            "steps_of": None if steps_of is None else os.fspath(steps_of),
            "logits": logits,
        }
        with contextlib.closing(client.parts("predict", self._named(asked), self._numerics(), progress)) as parts:
            for message in parts:
                yield np.frombuffer(message.payload, np.float32)

    def export(self, out: AnyPath, *, progress: bool = False) -> Export:
        """Write its model into a new folder: rows as Parquet, the dense part as safetensors."""
        return Export.of(self._call("export", {"out": os.fspath(out)}, progress))

    def digest(self) -> str:
        """SHA-256 of every bit of its model: 64 hexadecimal digits."""
        return str(self._call("digest", {}, False)["digest"])

    def delete(self) -> Deletion:
        """Delete its rows on the store, its local stores and its folder. Refused while it trains."""
        return Deletion.of(self._call("delete", {}, False))

    def _call(self, name: str, values: Mapping[str, Any], progress: bool) -> dict[str, Any]:
        return client.result(name, self._named(values), self._numerics(), progress)

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": str(self.path), "store": self._store, **values}

    def _numerics(self) -> Numerics:
        """Those that it is trained under. Raises RunError where this is no run."""
        job = self._json("manifest.json").get("job", {})
        return Numerics(job.get("cpu_capability", "avx2"), job.get("threads", 1))

    def _json(self, name: str) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            what = {"summary.json": "it has not come to an end yet", "status.json": "it never began to train"}
            raise RunError(
                f"run {self.path}: has no {name}: {what.get(name, 'it is no run; give the folder that train wrote')}"
            ) from None
        except (OSError, ValueError) as error:
            raise RunError(f"run {self.path}: cannot read {name} ({error}); restore the folder from a copy") from error
        return values


def open_run(run: AnyPath, *, store: str | None = None) -> Run:
    """The run in a folder. store: as Run has it. Raises RunError where there is none."""
    opened = Run(run, store)
    opened._numerics()  # reads the manifest, which only a run has
    return opened


def prepare(
    *sources: AnyPath, progress: bool = False, beam_flags: Sequence[str] = (), **settings: Unpack[PrepareSettings]
) -> Schedule:
    """Compile click logs into a schedule. sources: files or globs; beam_flags: as on the command line, for Apache Beam."""
    given = {name: _plain(value) for name, value in settings.items()}
    if sources:
        given["sources"] = [os.fspath(source) for source in sources]
    values = {"settings": given, "beam_flags": list(beam_flags)}
    summary = PrepareSummary.of(client.result("prepare", values, None, progress))
    return Schedule(summary.schedule, summary)


def train(
    schedule: AnyPath | None = None, *, model: str | type | None = None, progress: bool = False, **settings: Unpack[TrainSettings]
) -> Run:
    """Train a model from a schedule, in processes of its own; returns when the run has ended.

    schedule: may be left out with resume=True or from_checkpoint. model: a name as the command line has it, or the class itself, of a module that
    can be imported from its file. Ctrl-C stops after the step with everything saved, and KeyboardInterrupt is raised then; resume=True goes on.
    """
    values = {name: _plain(value) for name, value in settings.items()}
    if schedule is not None:
        values["schedule"] = os.fspath(schedule)
    if isinstance(model, type):
        values["model"], values["model_folder"] = _location(model)
    elif model is not None:
        values["model"] = model
    numerics = Numerics(str(values.get("cpu_capability", "avx2")), _threads(values.get("threads", 1)))
    ended = client.result("train", values, numerics, progress)
    store = values.get("store")
    return Run(ended["run"], None if store is None or str(store).startswith("local") else str(store))


def _threads(value: object) -> int:
    """The number of threads, for the choice of a fork server; 1 where it is none, which the job will refuse."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _plain(value: object) -> Any:
    """A setting as a value of JSON. Raises SettingError."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "item"):  # a NumPy number
        return value.item()
    raise SettingError(f"settings: must be numbers, texts, paths, lists or mappings; got {value!r}")


def _plain_list(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else [_plain(value) for value in values]


def _location(model: type) -> tuple[str, str]:
    """The name by which a process of its own finds a class of the caller's, and the folder where it looks. Raises ModelError."""
    module, name = sys.modules.get(model.__module__), model.__qualname__
    remedy = 'write it into a file of its own, at the top level, and give that as model="file.py:Class" or import it from there'
    try:
        file = Path(inspect.getfile(model)).absolute()
    except (TypeError, OSError):
        file = Path()
    if not file.is_file():
        raise ModelError(f"model: {name} must be of a module that has a file, for trainers import it; {remedy}")
    if "." in name or (module is not None and getattr(module, name, None) is not model):
        raise ModelError(
            f"model: {model.__module__}.{name} must be found in its module by its name, for trainers import it; {remedy}"
        )
    if model.__module__ == "__main__" or "." not in model.__module__:
        return f"{file.name}:{name}", str(file.parent)
    depth = model.__module__.count(".") + (file.name == "__init__.py")
    return f"{model.__module__}:{name}", str(file.parents[depth])
