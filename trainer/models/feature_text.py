"""Write the feature file of a wrapped module."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foreload.pipelines.samples.features import ENCODINGS
from foreload.trainer.errors import ModelError
from foreload.trainer.models.tables import TorchTable


@dataclass(frozen=True, slots=True)
class WrappedFeature:
    """A feature of a wrapped module.

    Attributes:
        name: the name of the feature.
        table: the table that it looks up.
        column: the name of its column in the data.
    """

    name: str
    table: TorchTable
    column: str


@dataclass(frozen=True, slots=True)
class FeatureFile:
    """The contents of the feature file of a module.

    Attributes:
        title: the name of the module.
        features: its features, in order.
        dense: the names of the dense values.
        unused: the paths of its tables that have no feature.
    """

    title: str
    features: Sequence[WrappedFeature]
    dense: Sequence[str]
    unused: Sequence[str]

    def write(self, path: Path, labels: Sequence[str], encoding: str) -> None:
        """Write the file.

        Args:
            path: the path of the file, which must not exist yet.
            labels: the columns of the labels.
            encoding: the encoding of all features.

        Raises:
            ModelError: an argument is not valid, or the file exists or cannot be written.
        """
        if encoding not in ENCODINGS:
            raise ModelError(f"encoding: must be one of {', '.join(ENCODINGS)}; got {encoding!r}")
        if not labels or len(set(labels)) < len(labels):
            raise ModelError(f"label: must be the column of labels, or the columns of several, each once; got {list(labels)!r}")
        text = "\n".join(self._lines(labels, encoding)) + "\n"
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ModelError(
                f"{path}: cannot write the feature file ({error.strerror}); give another path, or remove the existing file"
            ) from error

    def _lines(self, labels: Sequence[str], encoding: str) -> Iterator[str]:
        yield f"# The features of {self.title}, one for each table and column; docs/features.md says what else can stand here."
        for path in self.unused:
            yield f"# {path}: not used in forward, so no feature has it"
        if len(labels) == 1:
            yield f"label = {_quoted(labels[0])}"
        else:
            yield from (f"\n[[label]]\nname = {_quoted(label)}" for label in labels)
        shared = {
            feature.table.name: feature.table
            for feature in self.features
            if [other.name for other in self.features if other.table == feature.table] != [feature.table.name]
        }
        for name, table in shared.items():
            key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)
            yield f"\n[table.{key}]"
            yield from _size(table, encoding)
        for feature in self.features:
            yield "\n[[feature]]"
            yield f"name = {_quoted(feature.name)}"
            if feature.column != feature.name:
                yield f"column = {_quoted(feature.column)}"
            if feature.table.name in shared:
                yield f"table = {_quoted(feature.table.name)}"
            else:
                yield from _size(feature.table, encoding)
            yield f"encoding = {_quoted(encoding)}"
            if feature.table.padding is not None:
                yield _padding(feature.table.padding, encoding)
            if feature.table.pooling != "single":
                yield f"pooling = {_quoted(feature.table.pooling)}"
        for dense in self.dense:
            yield "\n[[dense]]"
            yield f"name = {_quoted(dense)}"
            yield 'transform = "none"'


def _size(table: TorchTable, encoding: str) -> Iterator[str]:
    # `prepare` counts the rows of a vocabulary itself.
    if encoding != "vocabulary":
        yield f"rows = {table.rows}"
    yield f"dimension = {table.dimension}"


def _padding(id: int, encoding: str) -> str:
    """Return the line for a padding id. The values that have it are known only if they are ids."""
    if encoding == "id":
        return f"padding = {id}"
    return f"# padding = []  # the values that stand for nothing: the module has padding_idx={id}"


def _quoted(text: str) -> str:
    """Return a text as a TOML string."""
    return json.dumps(text, ensure_ascii=False)
