"""A stopped model as a caller of the Python interface holds it.

It has the methods that a run and a checkpoint share.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.api import client
from foreload.api.client import Numerics
from foreload.api.results import Evaluation, Export, Rows, TorchExport
from foreload.base.arguments import checked
from foreload.base.errors import ForeloadError, SettingError
from foreload.trainer.errors import RunError

if TYPE_CHECKING:
    import numpy as np

    from foreload.trainer.storage import AnyFolder

AnyPath = str | os.PathLike[str]
RECORDS = "predict reads files; write the records into a CSV or Parquet file, or export_torch the model, which then takes records"


class Model:
    """The methods that a run and a checkpoint share.

    Nothing is read until a method needs it, and every call reads again.
    """

    _manifest: str

    def __init__(self, path: AnyPath) -> None:
        self.path: AnyFolder = Path(path)
        self._store: str | None = None
        self._schedule: str | None = None
        self._accept_model = False
        self._last = False

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @checked()
    def evaluate(self, schedule: AnyPath | None = None, *, progress: bool = False) -> Evaluation:
        """Measure the model on the evaluation steps of a schedule.

        Args:
            schedule: the schedule. If None, the model's own.
            progress: whether progress is shown on stderr.
        """
        return Evaluation.of(self._call("evaluate", {"schedule": None if schedule is None else os.fspath(schedule)}, progress))

    @checked()
    def rows(self, table: str, *, values: Sequence[str | float | None] | None = None, ids: Sequence[int] | None = None) -> Rows:
        """Return rows of a table, by raw values or by ids. One of the two must be given.

        Args:
            table: the name of the table.
            values: raw values, encoded as the schedule specifies. None stands for a missing value.
            ids: the rows' ids.
        """
        import numpy as np

        if (values is None) == (ids is None):
            raise SettingError("rows: needs either values=[...] or ids=[...], not both")
        asked = {"table": table, "values": _plain_list(values), "ids": _plain_list(ids)}
        with contextlib.closing(client.parts("rows", self._named(asked), self._numerics())) as parts:
            message = list(parts)[-1]
        count, columns = message.values["rows"], message.values["columns"]
        data = message.payload
        vectors = np.frombuffer(data, np.float32, count * columns, 8 * count).reshape(count, columns)
        trained = np.frombuffer(data, np.bool_, count, 8 * count + vectors.nbytes)
        return Rows(table, np.frombuffer(data, np.int64, count), vectors, trained, message.values["step"])

    @checked(sources=RECORDS)
    def predict(
        self,
        *sources: AnyPath,
        format: str | None = None,
        steps_of: AnyPath | None = None,
        logits: bool = False,
        progress: bool = False,
    ) -> np.ndarray:
        """Return the score of each record, in order.

        The score is the probability that the label is 1, or, for a label of numbers, the number.
        The arguments are those of `predict_batches`, which takes bounded memory.

        Returns:
            float32 [records], or [records, labels] if there are several labels.
        """
        import numpy as np

        batches = list(self.predict_batches(*sources, format=format, steps_of=steps_of, logits=logits, progress=progress))
        return np.concatenate(batches) if batches else np.empty(0, np.float32)

    @checked(sources=RECORDS)
    def predict_batches(
        self,
        *sources: AnyPath,
        format: str | None = None,
        steps_of: AnyPath | None = None,
        logits: bool = False,
        progress: bool = False,
    ) -> Iterator[np.ndarray]:
        """Yield the scores that `predict` returns, batch by batch, as they are computed.

        Each batch is float32 [records of the batch], or [records, labels].

        Args:
            sources: files or globs of raw records, which need no labels. Malformed records are left
                out, at most as many as the schedule's max_rejects allows.
            format: the files' format. If None, the schedule's, or the one that the files' names
                indicate.
            steps_of: a schedule whose evaluation samples the records are, in order. The logits are
                then those of `evaluate` on it, bit for bit.
            logits: whether to return logits instead of probabilities. Numbers stay as they are.
            progress: whether progress is shown on stderr.
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
                yield np.frombuffer(message.payload, np.float32).reshape(message.values["shape"])

    @checked()
    def export(self, out: AnyPath, *, since: AnyPath | int | None = None, progress: bool = False) -> Export:
        """Write the model into a new folder: rows as Parquet, the dense part as safetensors.

        Args:
            out: the folder to write.
            since: a step, or the path of a checkpoint or an export. If given, the export is an
                increment, with the rows changed since, for `apply`.
            progress: whether progress is shown on stderr.
        """
        before = None if since is None else os.fspath(since) if isinstance(since, str | os.PathLike) else str(since)
        return Export.of(self._call("export", {"out": os.fspath(out), "since": before}, progress))

    @checked()
    def export_torch(
        self,
        out: AnyPath,
        *,
        program: bool = True,
        onnx: bool = False,
        most_rows: int | None = None,
        rows_at: str | None = None,
        key: str | None = None,
        progress: bool = False,
    ) -> TorchExport:
        """Write the model into a new folder from which it is served without foreload.

        The folder has a model.py, which loads the model and takes raw records.

        Args:
            out: the folder to write.
            program: whether the dense part is written as torch.export traces it. Otherwise its
                parameters alone are written, for the model's class.
            onnx: whether the dense part is also written as ONNX.
            most_rows: tables with more trained rows stay in Parquet or, with `rows_at`, on a Redis
                server.
            rows_at: the URL of that server.
            key: the template of the server's keys, as for `apply`.
            progress: whether progress is shown on stderr.
        """
        options = {"program": program, "onnx": onnx, "most_rows": plain(most_rows), "rows_at": rows_at, "key": key}
        return TorchExport.of(self._call("export_torch", {"out": os.fspath(out), "options": options}, progress))

    def digest(self) -> str:
        """Return the SHA-256 of every bit of the model, as 64 hexadecimal digits."""
        return str(self._call("digest", {}, False)["digest"])

    def _call(self, name: str, values: Mapping[str, Any], progress: bool) -> dict[str, Any]:
        return client.result(name, self._named(values), self._numerics(), progress)

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "run": str(self.path),
            "store": self._store,
            "of_schedule": self._schedule,
            "accept_model": self._accept_model,
            "last": self._last,
            **values,
        }

    def _numerics(self) -> Numerics:
        """Return the numerics that the model is trained under.

        Raises:
            RunError: the folder has no manifest; for a checkpoint, CheckpointError.
        """
        job = self._job()
        return Numerics(job.get("cpu_capability", "avx2"), job.get("threads", 1))

    def _json(self, name: str) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self._missing(name) from None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path}: cannot read {name} ({error}); restore the folder from a copy") from error
        return values

    def _job(self) -> Mapping[str, Any]:
        """Return the settings of the model's training."""
        raise NotImplementedError

    def _missing(self, name: str) -> ForeloadError:
        """Return the error to raise if a file does not exist."""
        raise NotImplementedError


def plain(value: object) -> Any:
    """Return a setting as a JSON value.

    Raises:
        SettingError: the setting has no such value.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "item"):  # a NumPy number
        return value.item()
    raise SettingError(f"settings: must be numbers, texts, paths, lists or mappings; got {value!r}")


def _plain_list(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else [plain(value) for value in values]
