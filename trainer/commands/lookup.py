"""`foreload lookup`: print rows of a model by raw value or by id.

The model is that of a run or a checkpoint. Raw values are encoded as its schedule specifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import pyarrow as pa

from foreload.base.errors import SettingError
from foreload.trainer.checkpoints.saved_checkpoint import open_model
from foreload.trainer.saved.model_encoder import encoder_of
from foreload.trainer.saved.saved_model import SavedModel


@dataclass(frozen=True, slots=True)
class ValueRow:
    """The row of a raw value or an id.

    Attributes:
        value: the value or id, as the user gave it.
        trained: whether the row was trained. Otherwise `vector` is its initial value.
    """

    value: str
    id: int
    trained: bool
    vector: list[float]


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a table after a step."""

    table: str
    step: int
    rows: list[ValueRow]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of a table, in the order in which the user asked for them.

    Attributes:
        ids: int64 [n].
        weights: float32 [n, W].
        trained: bool [n]. The weights of a row that was not trained are its initial ones.
        step: the last step that was trained.
    """

    ids: np.ndarray
    weights: np.ndarray
    trained: np.ndarray
    step: int

    def as_json(self, table: str, values: Sequence[str]) -> TableRows:
        """Return the rows in the form that `--json` writes.

        Args:
            table: the table of the rows.
            values: the values or ids that the user gave.
        """
        columns = zip(values, self.ids.tolist(), self.trained.tolist(), self.weights.tolist(), strict=True)
        return TableRows(table, self.step, [ValueRow(*row) for row in columns])

    def text(self, values: Sequence[str]) -> str:
        """Return a line for each row."""
        columns = zip(values, self.ids.tolist(), self.trained.tolist(), self.weights, strict=True)
        return "\n".join(
            f"{value!r}  id {row_id}  {'trained' if trained else 'initial'}  {' '.join(map(str, vector))}"
            for value, row_id, trained, vector in columns
        )


def run(
    path: str,
    store: str | None,
    table: str,
    values: Sequence[str | int | None] | None,
    ids: Sequence[int] | None = None,
    schedule: str | None = None,
) -> FoundRows:
    """Return the rows of a table for raw values, or for ids if these are given.

    Args:
        path: the folder of a run, or of a checkpoint.
        store: the URLs of the run's servers. If None, the run's own.
        values: raw values. None and "" stand for a missing value.
        ids: ids; if given, `values` is ignored.
        schedule: the folder where a checkpoint's schedule is now.

    Raises:
        SettingError: there is no such table, or a value or an id is malformed.
    """
    with open_model(path, store, schedule) as model:
        names = [one.name for one in model.features.tables]
        if not names:
            raise SettingError(f"TABLE: the model has no tables, since it has no features; leave out {table!r}")
        if table not in names:
            raise SettingError(f"TABLE: must be one of {', '.join(names)}; got {table!r}")
        place = names.index(table)
        wanted = _ids_of(model, place, values or ()) if ids is None else _checked(model, place, ids)
        distinct, inverse = np.unique(wanted, return_inverse=True)
        weights, trained = model.row_source().read(place, distinct)
        return FoundRows(wanted, weights[inverse], trained[inverse], model.step)


def _ids_of(model: SavedModel, table: int, values: Sequence[str | int | None]) -> np.ndarray:
    features, encoder = encoder_of(model)
    feature = next(one for one in features.features if one.table == table)
    texts = [None if (text := _text(value)) is None else features.text_of(text) for value in values]
    if feature.encoding == "id":
        return _checked(model, table, [0 if text is None else text for text in texts])
    return np.asarray(encoder.ids(feature, pa.array(texts, pa.string())), np.int64)


def _text(value: object) -> str | None:
    """Return a raw value as text, a whole number in decimal, or None if it is missing.

    Raises:
        SettingError: the value is a number that is not whole.
    """
    # NaN, which differs from itself, also stands for a missing value.
    if value is None or value != value:
        return None
    if isinstance(value, Real) and not isinstance(value, Integral):
        number = float(value)
        if not number.is_integer():
            raise SettingError(f"VALUE: a categorical value must be a text or a whole number; got {value!r}")
        return str(int(number))
    return str(value)


def _checked(model: SavedModel, table: int, given: Sequence[object]) -> np.ndarray:
    rows = model.features.table_rows[table]
    ids = []
    for value in given:
        text = str(value).strip()
        if not text.isdecimal() or int(text) >= rows:
            raise SettingError(f"VALUE: an id must be a whole number in 0 .. {rows - 1}; got {value!r}")
        ids.append(int(text))
    return np.array(ids, np.int64)
