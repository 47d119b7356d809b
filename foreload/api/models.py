"""A model at rest, as a caller of the Python interface holds it: what can be asked of a run and of a checkpoint alike."""

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
    """What a run and a checkpoint have in common. Nothing is read before it is asked for; every call reads anew."""

    _manifest: str

    def __init__(self, path: AnyPath) -> None:
        self.path: AnyFolder = Path(path)
        self._store: str | None = None
        self._schedule: str | None = None
        self._accept_model = False

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @checked()
    def evaluate(self, schedule: AnyPath | None = None, *, progress: bool = False) -> Evaluation:
        """Measure its model on the evaluation steps of a schedule, its own by default."""
        return Evaluation.of(self._call("evaluate", {"schedule": None if schedule is None else os.fspath(schedule)}, progress))

    @checked()
    def rows(self, table: str, *, values: Sequence[str | float | None] | None = None, ids: Sequence[int] | None = None) -> Rows:
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

    @checked(sources=RECORDS)
    def predict(
        self,
        *sources: AnyPath,
        format: str | None = None,
        steps_of: AnyPath | None = None,
        logits: bool = False,
        progress: bool = False,
    ) -> np.ndarray:
        """The probability that each record's label is 1, or the number where the label is one, float32 [records], in order; of several labels,
        [records, labels]. See `predict_batches`, which takes bounded memory.
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
        """What `predict` gives, batch after batch, as they are computed: float32 [records of the batch] or [records, labels] each.

        sources: files or globs of raw records, whose labels are not needed; malformed ones are left out, as many as the schedule's max_rejects
        allows. format: by default that of the schedule, or what the names say. steps_of: a schedule whose evaluation samples these are, in
        order: the logits are those of `evaluate` on it, bit for bit. logits: give these, instead of probabilities; numbers stay what they are.
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
        """Write its model into a new folder: rows as Parquet, the dense part as safetensors.

        since: a step, or the path of a checkpoint or an export: write an increment, with the rows changed since, for `apply`.
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
        """Write its model into a new folder from which it is served, without foreload: the model.py there loads it, and takes raw records.

        program: the dense part as torch.export follows it; else its parameters alone, for the model's class. onnx: as ONNX, too. most_rows: tables of
        more trained rows stay Parquet or, with rows_at, at that Redis server, under keys as `apply` has them.
        """
        options = {"program": program, "onnx": onnx, "most_rows": plain(most_rows), "rows_at": rows_at, "key": key}
        return TorchExport.of(self._call("export_torch", {"out": os.fspath(out), "options": options}, progress))

    def digest(self) -> str:
        """SHA-256 of every bit of its model: 64 hexadecimal digits."""
        return str(self._call("digest", {}, False)["digest"])

    def _call(self, name: str, values: Mapping[str, Any], progress: bool) -> dict[str, Any]:
        return client.result(name, self._named(values), self._numerics(), progress)

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "run": str(self.path),
            "store": self._store,
            "of_schedule": self._schedule,
            "accept_model": self._accept_model,
            **values,
        }

    def _numerics(self) -> Numerics:
        """Those that it is trained under. Raises RunError where the folder has no manifest."""
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
        """The settings of its training."""
        raise NotImplementedError

    def _missing(self, name: str) -> ForeloadError:
        """What to raise where a file is not there."""
        raise NotImplementedError


def plain(value: object) -> Any:
    """A setting as a value of JSON. Raises SettingError."""
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
