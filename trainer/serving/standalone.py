"""A model trained by foreload, to be called without foreload.

`load(FOLDER)` returns a torch.nn.Module that takes raw records. `foreload export --format torch`
joins raw_values.py, plain_files.py, generators.py, inference.py, own_module.py and this file into
model.py. It needs torch and NumPy. It needs PyArrow if features.json names Parquet files, and redis
if tables stay on a server.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreload.trainer.models.inference import in_tiles
from foreload.trainer.serving.own_module import OwnModule
from foreload.trainer.serving.plain_files import RowLines, opened_text, read_program, read_safetensors
from foreload.trainer.serving.raw_values import Encoder, columns_of, initial_rows

FORMAT, ABOUT = 1, "features.json"

_AT_ONCE = 256  # rows that one command reads from a server
_SHOWN_CHARACTERS = 1000
_MOST_LINES = 1000  # the most lines of a value, if the feature file does not specify it
_CHUNK = 1 << 14  # records of a file that are predicted at once
# `predict` warns of a feature that has at least _FEWEST values, if more than the share _HARDLY of
# them is unknown.
_FEWEST, _HARDLY = 10, 0.9
_STEP_BYTES = 8  # the size of the step before each version of a row on a server


class ParquetRows:
    """The rows of a table in a Parquet file, by ascending id.

    Only the row groups that hold requested rows are read. The last few are cached.
    """

    def __init__(self, path: Path, width: int) -> None:
        import pyarrow.parquet as parquet

        self._file, self._width = parquet.ParquetFile(path), width
        groups = [self._file.metadata.row_group(group).column(0) for group in range(self._file.num_row_groups)]
        self._last = np.array([group.statistics.max for group in groups], np.int64)
        self._group = lru_cache(8)(self._read_group)

    def _read_group(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._file.read_row_group(group, ["id", "weight"]).combine_chunks()
        weights = rows["weight"].chunk(0).flatten().to_numpy().reshape(-1, self._width)
        return rows["id"].to_numpy(), weights

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read rows.

        Args:
            ids: int64 [n], ascending and distinct.

        Returns:
            The weights, float32 [n, W], and whether each row was trained, bool [n].
        """
        weights, found = np.zeros((len(ids), self._width), np.float32), np.zeros(len(ids), bool)
        # The group of an id is the first one whose last id is not smaller.
        groups = np.searchsorted(self._last, ids)
        for group in np.unique(groups[groups < len(self._last)]):
            known, rows = self._group(int(group))
            here = np.flatnonzero(groups == group)
            places = np.searchsorted(known, ids[here])
            there = known[places] == ids[here]
            weights[here[there]], found[here[there]] = rows[places[there]], True
        return weights, found


class RedisRows:
    """The rows of a table on a server, as `foreload apply` writes them.

    They are those of one step. Every read checks that the server still has this step.
    """

    def __init__(self, url: str, key: str, about: Mapping[str, Any], table: str, width: int) -> None:
        import redis

        self._server, self._where = redis.Redis.from_url(url), f"{key} of the server"
        self._step, self._state, self._width = about["step"], about["state"], width
        self._template, self._version = key.replace("{table}", table), key.partition("{")[0] + "~version"
        self.read(np.empty(0, np.int64))

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read rows, as ParquetRows does.

        Raises:
            RuntimeError: the server no longer has the rows of this model's step.
        """
        asked = self._server.pipeline(transaction=False)
        for first in range(0, len(ids), _AT_ONCE):
            piece = [str(row) for row in ids[first : first + _AT_ONCE].tolist()]
            if "{id}" in self._template:
                asked.mget([self._template.replace("{id}", row) for row in piece])
            else:
                asked.hmget(self._template, piece)
        # The version key is read after the rows, because it drops a step before its rows are
        # deleted.
        asked.get(self._version)
        *replies, version = asked.execute()
        self._check(json.loads(version or b"{}"))
        weights, found = np.zeros((len(ids), self._width), np.float32), np.zeros(len(ids), bool)
        for place, value in enumerate(value for reply in replies for value in reply):
            for start in range(0, len(value or b""), _STEP_BYTES + 4 * self._width):
                if int.from_bytes(value[start : start + _STEP_BYTES], "little") <= self._step:
                    weights[place] = np.frombuffer(value, "<f4", self._width, start + _STEP_BYTES)
                    found[place] = True
                    break
        return weights, found

    def _check(self, version: Mapping[str, Any]) -> None:
        there = [*([version["step"]] if "step" in version else []), *version.get("kept", [])]
        if self._step not in there or (version["step"] == self._step and version["state"] != self._state):
            steps = ", ".join(map(str, there)) or "nothing"
            raise RuntimeError(
                f"rows: {self._where} must have the rows of this model after step {self._step}; it has those of {steps}, or another model's"
            )


Rows = Mapping[str, np.ndarray] | ParquetRows | RedisRows
"""The rows of a table.

In memory: ids int64 [n], ascending, and weights float32 [n, W]. Otherwise an object that reads
them.
"""


class Table(nn.Module):
    """A table, which sums its rows. A row that was never trained has its initial values.

    Args:
        number: the number of the table.
        entry: its entry in features.json.
        seed: the seed of the training.
        rows: its trained rows.

    Attributes:
        known: the ids of the trained rows in memory. `bag` has their weights.
    """

    def __init__(self, number: int, entry: Mapping[str, Any], seed: int, rows: Rows) -> None:
        super().__init__()
        self.name, self.table_rows, self.width = entry["name"], entry["table_rows"], sum(columns for _, columns in entry["parts"])
        self._initial = (seed, number), (entry.get("initial", "uniform"), self.table_rows, entry["parts"][0][1], self.width)
        self._reader = None if isinstance(rows, Mapping) else rows
        self.known = rows["ids"] if isinstance(rows, Mapping) else np.empty(0, np.int64)
        weights = rows["weights"] if isinstance(rows, Mapping) else np.empty((0, self.width), np.float32)
        self.bag = nn.EmbeddingBag.from_pretrained(torch.from_numpy(weights), mode="sum")
        self.untrained = np.empty(0, np.int64)
        """The ids of the last forward whose rows were never trained."""

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the sum of the rows of each bag, in order: float32 [bags, W].

        Args:
            ids: int64 [lookups].
            offsets: int64 [bags], the place where each bag begins. An empty bag is zeros.

        Raises:
            ValueError: an id is out of range.
        """
        values = ids.numpy()
        if values.size and not 0 <= values.min() <= values.max() < self.table_rows:
            raise ValueError(
                f"table {self.name}: ids must be in 0 .. {self.table_rows - 1}; got {values.min()} .. {values.max()}"
            )
        places = np.searchsorted(self.known, values)
        # If all rows are trained and in memory, the bag looks them up directly.
        if places.max(initial=-1) < len(self.known) and (self.known[places] == values).all() and self._reader is None:
            self.untrained = np.empty(0, np.int64)
            return self.bag(torch.from_numpy(places), offsets)
        distinct, inverse = np.unique(values, return_inverse=True)
        return nn.functional.embedding_bag(torch.from_numpy(inverse), torch.from_numpy(self.rows(distinct)), offsets, mode="sum")

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return rows by id: float32 [n, W].

        Args:
            ids: int64 [n], ascending and distinct.
        """
        if self._reader is not None:
            weights, found = self._reader.read(ids)
        else:
            places = np.minimum(np.searchsorted(self.known, ids), max(len(self.known) - 1, 0))
            found = self.known[places] == ids if len(self.known) else np.zeros(len(ids), bool)
            weights = np.zeros((len(ids), self.width), np.float32)
            weights[found] = self.bag.weight.numpy()[places[found]]
        self.untrained = ids[~found]
        weights[~found] = initial_rows(*self._initial[0], ids[~found], *self._initial[1])
        return weights


class Model(nn.Module):
    """A trained model.

    Args:
        about: the contents of features.json.
        encoder: encodes raw records.
        tables: the tables, in order.
        program: returns the logits of dense values [b, n] and a block [b, F, W].
    """

    def __init__(
        self, about: Mapping[str, Any], encoder: Encoder, tables: Sequence[Table], program: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.about, self.encoder, self.tables, self.program = about, encoder, nn.ModuleList(tables), program
        self._width = max((table.width for table in tables), default=0)
        self.labels: list[str] = [label["name"] for label in about["labels"]]
        self.unknown: dict[str, tuple[int, int]] = {}
        """The numbers of unknown and of all values in the last `predict`, by feature.

        Missing values are not counted. For features encoded by hash or as ids, the number of
        unknown values is a lower bound, because values may share rows.
        """

    def forward(self, dense: Tensor, lookups: Mapping[str, Tensor | tuple[Tensor, Tensor]]) -> Tensor:
        """Return the logits, float32 [b], or [b, L] for several labels.

        `encode` returns both arguments.

        Args:
            dense: float32 [b, n], transformed.
            lookups: per feature ids int64 [b], or ids int64 [lookups] and offsets int64 [b], as
                nn.EmbeddingBag takes them. Only bags of features with padding may be empty.

        Raises:
            ValueError: a feature does not have a bag, or a value in it, for each sample.
        """
        features = self.about["features"]
        block = torch.zeros((len(dense), len(features), self._width))
        for place, feature in enumerate(features):
            given, table = lookups[feature["name"]], self.tables[feature["table"]]
            ids, offsets = (given, torch.arange(len(dense))) if isinstance(given, Tensor) else given
            counts = torch.diff(offsets, append=torch.tensor([len(ids)]))
            if len(counts) != len(dense) or not ("padding" in feature or bool((counts > 0).all())):
                raise ValueError(
                    f"lookups: feature {feature['name']} must have a bag for each of {len(dense)} samples, with a value in each"
                )
            sums = table(ids, offsets)
            self._count(feature, ids.numpy(), table)
            block[:, place, : table.width] = sums / counts.clamp(min=1)[:, None] if feature["pooling"] == "mean" else sums
        logits: Tensor = self.program(dense, block) if self.about["mixes_samples"] else in_tiles(self.program, dense, block)
        return logits

    def _count(self, feature: Mapping[str, Any], ids: np.ndarray, table: Any) -> None:
        unknown = ids == 1 if feature["encoding"] == "vocabulary" else np.isin(ids, table.untrained)
        before = self.unknown.get(feature["name"], (0, 0))
        self.unknown[feature["name"]] = (before[0] + int((unknown & (ids != 0)).sum()), before[1] + int((ids != 0).sum()))

    def hardly_known(self) -> list[str]:
        """Return a warning for each feature with mostly unknown values in the last `predict`."""
        lines, encodings = [], {feature["name"]: feature["encoding"] for feature in self.about["features"]}
        for name, (unknown, values) in self.unknown.items():
            if values >= _FEWEST and unknown > _HARDLY * values:
                least = "" if encodings[name] == "vocabulary" else "at least "
                lines.append(
                    f"feature {name}: {least}{unknown:,} of {values:,} values ({unknown / values:.2%}) are unknown to the model; are they written as "
                    "for training?"
                )
        return lines

    def encode(self, records: Any) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Convert raw records, as `predict` takes them, to the arguments of forward.

        Raises:
            ValueError: a value is malformed.
        """
        return self._encoded(columns_of(records, self.encoder.columns), 0)

    def _encoded(self, columns: Mapping[str, Sequence[Any]], first: int) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        values, lookups = self.encoder.encode(columns, first)
        # torch allocates the tensor, because the bits of a product depend on its alignment.
        dense = torch.empty(values.shape)
        dense.numpy()[...] = values
        return dense, {name: (torch.from_numpy(ids), torch.from_numpy(offsets)) for name, (ids, offsets) in lookups.items()}

    @torch.no_grad()
    def predict(self, records: Any, batch_size: int = 1024, logits: bool = False, first: int = 0) -> Any:
        """Return the prediction for each record, float32 [n], in order.

        For several labels, returns a dict by label. A prediction is the probability that the label
        is 1. For a label that is a number, it is the number. A feature with mostly unknown values
        causes a warning, and `unknown` has the counts.

        Args:
            records: raw values, as a list of dicts, a dict of columns, an Arrow table or a data
                frame. None and an empty text are missing values.
            batch_size: the most records per call of forward.
            logits: whether to return logits instead of probabilities.
            first: the number of the first record, for errors.

        Raises:
            ValueError: a value is malformed, or an output is not finite.
        """
        columns = columns_of(records, self.encoder.columns)
        count = len(next(iter(columns.values())))
        self.unknown = {}
        parts = [np.empty((0, len(self.labels)), np.float32)]
        for place in range(0, count, batch_size):
            piece = {name: values[place : place + batch_size] for name, values in columns.items()}
            parts.append(self(*self._encoded(piece, first + place)).numpy().reshape(-1, len(self.labels)))
        for line in self.hardly_known():
            warnings.warn(line, stacklevel=3)
        whole = np.concatenate(parts)
        for row, place in np.argwhere(~np.isfinite(whole))[:1].tolist():
            raise ValueError(
                f"records[{first + row}]: {self.labels[place]}: the model must give a finite number; got {whole[row, place]}; look for numbers in "
                "the record that are far outside the range of the training data"
            )
        by_label = {}
        for place, label in enumerate(self.about["labels"]):
            by_label[label["name"]] = whole[:, place] if logits or label["kind"] == "number" else probabilities(whole[:, place])
        return by_label if len(by_label) > 1 else by_label[self.labels[0]]


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-logit)), computed in float64: float32 [n]."""
    exponentials = np.exp(-np.abs(logits.astype(np.float64)))
    return (np.where(logits >= 0, 1.0, exponentials) / (1.0 + exponentials)).astype(np.float32)


def load(
    folder: str | Path | None = None, *, rows_at: str | None = None, module: nn.Module | Callable[..., nn.Module] | None = None
) -> Model:
    """Load the model in a folder that `foreload export --format torch` wrote.

    Args:
        folder: the folder. If None, the folder of this file.
        rows_at: the URL of the server that has the rows of tables outside the folder, if it has
            changed or needs a password.
        module: for a model exported with --dense weights, its module with forward(dense,
            embeddings), or a class or function that builds it. Such a builder is called under the
            seed of the training. The parameters and buffers are loaded into the module.

    Raises:
        ValueError: a file does not have the size that features.json lists, or a file or the module
            does not fit.
    """
    folder = Path(__file__).parent if folder is None else Path(folder)
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    if about["format"] != FORMAT:
        raise ValueError(f"{folder}: format must be {FORMAT}; got {about['format']!r}; use the model.py that is in the folder")
    for name, entry in about["files"].items():
        if name in ("", "..") or "/" in name:
            raise ValueError(f"{folder}: {ABOUT} must name files in the folder; got {name!r}; export it again")
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size != entry["bytes"]:
            raise ValueError(
                f"{folder}: {name} must have {entry['bytes']} bytes; it {'is missing' if size is None else f'has {size}'}; copy it again"
            )
    tables = [
        Table(number, entry, about["seed"], _rows(folder, about, entry, rows_at)) for number, entry in enumerate(about["tables"])
    ]
    if about["program"] is None:
        if module is None:
            raise ValueError(f"load: {folder} has the weights of {about['model']['model']} alone; give it, as module=...")
        weights, tried = (_path(folder, about, about[name]) for name in ("weights", "tried"))
        program: nn.Module = OwnModule(about, weights, tried, module)
    else:
        program = read_program(_path(folder, about, about["program"]))
    return Model(about, Encoder(about, _vocabularies(folder, about)), tables, program)


def _path(folder: Path, about: Mapping[str, Any], name: str) -> Path:
    """Return the path of a file of the folder.

    Raises:
        ValueError: features.json does not list the file.
    """
    if name not in about["files"]:
        raise ValueError(f"{folder}: {ABOUT} must list each file that it names; got {name!r}; export it again")
    return folder / name


def _rows(folder: Path, about: Mapping[str, Any], entry: Mapping[str, Any], rows_at: str | None) -> Rows:
    width = sum(columns for _, columns in entry["parts"])
    if entry["at"] == "redis":
        return RedisRows(rows_at or about["rows_at"]["url"], about["rows_at"]["key"], about, entry["name"], width)
    if entry["at"] == "parquet":
        return ParquetRows(_path(folder, about, entry["file"]), width)
    return read_safetensors(_path(folder, about, entry["file"]))


def _vocabularies(folder: Path, about: Mapping[str, Any]) -> dict[int, dict[bytes, int]]:
    vocabularies = {}
    for number, entry in enumerate(about["tables"]):
        if "vocabulary" in entry:
            from pyarrow import parquet

            values = parquet.read_table(_path(folder, about, entry["vocabulary"]), columns=["value"]).column(0).to_pylist()
            # Id 0 is missing values, and id 1 is values outside the vocabulary.
            vocabularies[number] = {value: place + 2 for place, value in enumerate(values)}
    return vocabularies


# -- The command line ------------------------------------------------------------------------------


def read_csv(path: str, about: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the records of a text file, which is read as features.json specifies.

    Files that end in .gz or .zst are decompressed, and a byte order mark is skipped.

    Raises:
        ValueError: the file is not such a file, its header lacks a column, or a line has too few or
            too many columns.
    """
    text = about["text"]
    tabs = text["delimiter"] is None and path.removesuffix(".gz").removesuffix(".zst").endswith((".tsv", ".tab"))
    with opened_text(path) as file:
        delimiter = "\t" if tabs else text["delimiter"] or ","
        csv.field_size_limit(sys.maxsize)
        of_file = RowLines(path, file, _MOST_LINES if text["newlines_in_values"] is True else int(text["newlines_in_values"]))
        reader = csv.reader(of_file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if text["quoting"] else csv.QUOTE_NONE)

        def rows() -> Iterator[list[str]]:
            for row in reader:
                of_file.waiting = 0
                if row:
                    yield row

        lines = rows()
        first, headers = next(lines, []), about["headers"]
        names = next((names for names in headers if len(names) == len(first)), headers[0]) if headers else first
        for column in dict.fromkeys(entry["column"] for entry in (*about["dense"], *about["features"])):
            if names.count(column) != 1:
                how_many = "no" if column not in names else "more than one"
                shown = ascii(", ".join(names)[:_SHOWN_CHARACTERS])[1:-1]
                raise ValueError(f"{path}: {how_many} column {column!r} among its header: {shown or 'none'}; check the delimiter")
        for number, line in enumerate(chain([first], lines) if headers and first else lines):
            if len(line) != len(names):
                raise ValueError(f"{path}: records[{number}] must have {len(names)} columns; got {len(line)}")
            yield dict(zip(names, line, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the predictions of a CSV file to stdout, as CSV.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Predictions of the records of a CSV file, in order, as CSV.")
    parser.add_argument("file", metavar="FILE.csv", help="raw records; labels are not needed")
    parser.add_argument("--logits", action="store_true", help="write logits instead")
    parser.add_argument("--rows-at", metavar="URL", help="the server that has the rows of tables that are not in the folder")
    parsed = parser.parse_args(arguments)
    try:
        model = load(rows_at=parsed.rows_at)
        records, out = read_csv(parsed.file, model.about), csv.writer(sys.stdout, lineterminator="\n")
        several = len(model.labels) > 1
        out.writerow(model.labels if several else ["logit" if parsed.logits else "score"])
        done, unknown = 0, dict[str, tuple[int, int]]()
        # `predict` would warn of each chunk. The warnings for the whole file follow below.
        warnings.simplefilter("ignore")
        while chunk := list(islice(records, _CHUNK)):
            predicted = model.predict(chunk, logits=parsed.logits, first=done)
            done += len(chunk)
            for name, (new, values) in model.unknown.items():
                unknown[name] = (unknown.get(name, (0, 0))[0] + new, unknown.get(name, (0, 0))[1] + values)
            out.writerows(
                zip(*(predicted[name] for name in model.labels), strict=True) if several else ([value] for value in predicted)
            )
        model.unknown = unknown
        for line in model.hardly_known():
            sys.stderr.write(f"warning: {line}\n")
    except (OSError, ValueError, RuntimeError, csv.Error) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
