"""An export on disk: its manifest, its tables, and its state (docs/serving.md, The format).

The state identifies the model and the step that an export is of.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Literal, NotRequired, Self, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foreload.base.codec import Count, FormError, Name, Natural, between, fault, of_json
from foreload.base.files import is_full, read_sealed, replacing, within, write_sealed
from foreload.base.settings import local
from foreload.cache.errors import CacheError
from foreload.cache.rows.layout import MOST_COLUMNS, RowLayout
from foreload.trainer.errors import ExportError
from foreload.trainer.run.manifest import InexactEntry

FORMAT = 1
ABOUT = "export.json"
MODEL: Final = "model.safetensors"
DENSE_STATE: Final = "optimizer.safetensors"
ENCODING: Final = "encoding.json"
BUFFERS: Final = "buffers.safetensors"

GROUP_ROWS = 1 << 16
"""The rows of a row group. Only the last group of a table may have fewer.

The groups do not depend on how the rows arrive, so equal models give equal files.
"""

Parts = list[tuple[str, Annotated[int, between(1, MOST_COLUMNS)]]]


class TableOfModel(TypedDict):
    """The properties of a table that do not depend on the rows trained so far."""

    name: str
    table_rows: Natural
    parts: Parts
    optimizer: str
    initial: NotRequired[str]


class TableEntry(TableOfModel):
    """A table in the manifest.

    Attributes:
        file: the file of its rows.
        rows: the number of rows in the file.
        whole_rows: in an increment, the number of rows in the table after the increment is applied.
    """

    file: Name
    rows: Count
    whole_rows: NotRequired[Count]


class FileEntry(TypedDict):
    """A file in the manifest."""

    bytes: Count
    sha256: str


class Since(TypedDict):
    """The predecessor of an increment.

    Attributes:
        step: the step of the predecessor.
        state: its state. None if the user named only the step.
    """

    step: Count
    state: str | None


class OfModel(TypedDict):
    """The model and the step of an export, without its tables."""

    step: Count
    seed: Count
    model: dict[str, Any]
    settings: dict[str, Any]
    inexact: InexactEntry | None


class Contents(OfModel):
    """The part of a manifest that does not follow from the files."""

    dense: Literal["model.safetensors"]
    dense_optimizer_state: Literal["optimizer.safetensors"]
    tables: list[TableEntry]
    encoding: NotRequired[Literal["encoding.json"]]
    buffers: NotRequired[Literal["buffers.safetensors"]]
    mixes_samples: NotRequired[bool]
    since: NotRequired[Since]


class About(Contents):
    """The manifest (docs/serving.md, The format)."""

    format: int
    state: str
    files: dict[Name, FileEntry]


def _check_about(about: About) -> None:
    """Check that the parts of a manifest fit each other.

    Raises:
        FormError: they do not.
    """
    beside = [name for key, name in (("encoding", ENCODING), ("buffers", BUFFERS)) if key in about]
    if sorted([MODEL, DENSE_STATE, *beside, *(table["file"] for table in about["tables"])]) != sorted(about["files"]):
        raise FormError("files: must be those that tables, dense, buffers and encoding name, each once; got others")
    if any(("whole_rows" in table) != ("since" in about) for table in about["tables"]):
        raise FormError("tables: must have whole_rows in an increment, and in nothing else")


@dataclass(frozen=True, slots=True)
class ExportRows:
    """Rows of a table.

    Attributes:
        ids: int64 [n], ascending.
        weights: float32 [n, W].
        state: the optimizer's state, float32 [n, S].
        values: the values that the ids stand for, string [n]. If None, the table has no vocabulary.
    """

    ids: np.ndarray
    weights: np.ndarray
    state: np.ndarray
    values: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def encoded(self) -> pa.Table:
        """Return the rows as an Arrow table with the columns of a file."""
        columns = [pa.array(self.ids)]
        for values in (self.weights, self.state):
            kind = pa.list_(pa.float32(), values.shape[1])
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            lists = pa.FixedSizeListArray.from_arrays(flat, type=kind) if values.shape[1] else pa.array([[]] * len(self), kind)
            columns.append(lists)
        if self.values is not None:
            columns.append(self.values)
        schema = schema_of(self.weights.shape[1], self.state.shape[1], self.values is not None)
        return pa.Table.from_arrays(columns, schema=schema)


def schema_of(width: int, state_width: int, has_values: bool) -> pa.Schema:
    """Return the columns of a table's file."""
    columns = [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("weight", pa.list_(pa.float32(), width)),
        pa.field("state", pa.list_(pa.float32(), state_width)),
    ]
    # The value is None for the id of missing values, and for the id of all values outside the
    # vocabulary.
    return pa.schema(columns + ([pa.field("value", pa.string())] if has_values else []))


class TableWriter:
    """Writes the rows of a table into a Parquet file.

    Rows arrive by ascending id over all calls. The bytes of the file do not depend on how the rows
    are divided into calls.

    Args:
        path: the file to write.
        has_values: whether rows have the values of a vocabulary.
    """

    def __init__(self, path: Path, layout: RowLayout, has_values: bool) -> None:
        self.rows = 0
        self._held: list[pa.Table] = []
        self._held_rows = 0
        self._writer = pq.ParquetWriter(path, schema_of(layout.width, layout.state_width, has_values), compression="zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._held_rows:
                self._write(pa.concat_tables(self._held))
        finally:
            self._writer.close()

    def add(self, rows: ExportRows) -> None:
        """Write further rows.

        Raises:
            OSError: the file cannot be written.
        """
        self.rows += len(rows)
        self._held.append(rows.encoded())
        self._held_rows += len(rows)
        if self._held_rows >= GROUP_ROWS:
            held = pa.concat_tables(self._held)
            whole = len(held) // GROUP_ROWS * GROUP_ROWS
            for first in range(0, whole, GROUP_ROWS):
                self._write(held.slice(first, GROUP_ROWS))
            self._held, self._held_rows = [held.slice(whole)], len(held) - whole

    def _write(self, group: pa.Table) -> None:
        self._writer.write_table(group.combine_chunks(), row_group_size=GROUP_ROWS)


def check_new(out: str) -> Path:
    """Return the folder for a new export.

    Raises:
        ExportError: the folder exists already or cannot be created.
    """
    target = Path(local("--out", out))
    if target.exists():
        raise ExportError(f"--out: {out} exists already; choose a new folder")
    there = next(folder for folder in target.absolute().parents if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ExportError(f"--out: cannot write {out}: {there} is no folder that may be written to; choose another folder")
    return target


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes the export on leaving the context.

    The export appears complete or not at all.

    Raises:
        ExportError: the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=True) as temporary:
            temporary.mkdir()
            yield temporary
    except OSError as error:
        why = "the disk is full" if is_full(error) else error.strerror or error
        raise ExportError(f"--out: cannot write {target}: {why}; free the disk or choose another folder") from error


def canonical(value: object) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def state_of(contents: Contents, dense: str, dense_state: str) -> str:
    """Return the state of an export, which identifies the model and the step.

    It is the SHA-256 of the step, the seed, the model, the tables and the checksums of the dense
    part's files. Each step changes the dense part, and every row affects it. So two trainings have
    the same state only if their models are equal.

    Args:
        contents: the manifest.
        dense: the SHA-256 of the file of the dense part.
        dense_state: the SHA-256 of the file of its optimizer's state.
    """
    of_the_model = {"step": contents["step"], **same_model(contents), "tables": list(map(same_table, contents["tables"]))}
    return canonical(of_the_model | {"dense": dense, "dense_state": dense_state})


def same_model(manifest: OfModel) -> dict[str, object]:
    """Return the properties that all states of a model share, without settings and tables."""
    return {"seed": manifest["seed"], "model": manifest["model"], "inexact": manifest["inexact"]}


def same_table(table: TableOfModel) -> TableOfModel:
    """Return the properties that all states of a table share. `initial` is left out where it is the default."""
    same: TableOfModel = {
        "name": table["name"],
        "table_rows": table["table_rows"],
        "parts": table["parts"],
        "optimizer": table["optimizer"],
    }
    if (initial := table.get("initial", "uniform")) != "uniform":
        same["initial"] = initial
    return same


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Return the size and SHA-256 of every file in a folder, by name.

    Each file is synced to the disk.

    Raises:
        OSError: a file cannot be read or synced.
    """
    entries: dict[str, FileEntry] = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            entries[path.name] = {
                "bytes": os.fstat(file.fileno()).st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
    return entries


def write_about(folder: Path, contents: Contents) -> About:
    """Write the manifest of a folder, and return it.

    The other files of the folder must be complete.

    Args:
        folder: the folder of the export.
        contents: the part of the manifest that does not follow from the files.

    Raises:
        OSError: a file cannot be read or written.
    """
    files = file_entries(folder)
    state = state_of(contents, files[MODEL]["sha256"], files[DENSE_STATE]["sha256"])
    about: About = {**contents, "format": FORMAT, "files": files, "state": state}
    write_sealed(folder / ABOUT, about, durable=True)
    return about


@dataclass(frozen=True)
class Export:
    """An export: its folder and its manifest.

    An increment has only the rows that changed after a step, and is applied to a model of that
    step.
    """

    path: Path
    about: About

    @classmethod
    def open(cls, path: Path | str) -> Export:
        """Open the export in a folder.

        Raises:
            ExportError: the folder has no export, or its manifest is damaged.
        """
        path = Path(path)
        try:
            stored = read_sealed(within(path, ABOUT))[0]
            if stored.get("format") != FORMAT:
                raise ExportError(
                    f"{path}: its format must be {FORMAT}; got {stored.get('format')!r:.100}; use the foreload that wrote it"
                )
            about = of_json(stored, About)
            _check_about(about)
            export = cls(path, about)
            # Making the layouts checks them.
            assert export.layouts is not None
        except (FileNotFoundError, NotADirectoryError):
            raise ExportError(
                f"{path}: has no {ABOUT}, so it is not an export; give a folder that `foreload export` wrote"
            ) from None
        except OSError as error:
            raise ExportError(f"{path}: cannot read {ABOUT}: {error.strerror}; make it readable") from error
        except (ValueError, CacheError) as error:
            raise _damaged(path, ABOUT, error) from error
        return export

    def file(self, name: str) -> Path:
        """Return the path of a file of the export.

        Raises:
            ExportError: the file is a link out of the folder.
        """
        try:
            return within(self.path, name)
        except FormError as error:
            raise _damaged(self.path, ABOUT, error) from error

    @property
    def step(self) -> int:
        """The last step trained of the model, for an increment of the model after it is applied."""
        return self.about["step"]

    @property
    def state(self) -> str:
        """The state: see `state_of`."""
        return self.about["state"]

    @property
    def since(self) -> tuple[int, str | None] | None:
        """The step and state of the predecessor of an increment, or None for a full export.

        The state is None if the user named only the step.
        """
        since = self.about.get("since")
        return None if since is None else (since["step"], since["state"])

    @property
    def what(self) -> str:
        """A description of the export, for messages."""
        return (
            f"{self.path} is of step {self.step}"
            if self.since is None
            else f"{self.path} goes from step {self.since[0]} to step {self.step}"
        )

    @cached_property
    def layouts(self) -> list[RowLayout]:
        """The layouts of its tables, in order."""
        return [
            RowLayout(
                number,
                one["name"],
                one["table_rows"],
                tuple(one["parts"]),
                one["optimizer"],
                one.get("initial", "uniform"),
            )
            for number, one in enumerate(self.about["tables"])
        ]

    def verify(self) -> None:
        """Compare every file, and the contents of its tables, with the manifest.

        Raises:
            ExportError: a file is damaged. The error names the first one.
        """
        for name, entry in self.about["files"].items():
            try:
                with open(self.file(name), "rb") as file:
                    if (size := os.fstat(file.fileno()).st_size) != entry["bytes"]:
                        raise _damaged(self.path, name, f"has {size} bytes instead of {entry['bytes']}")
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                        raise _damaged(self.path, name, f"its checksum does not match {ABOUT}")
            except OSError as error:
                raise _damaged(self.path, name, error.strerror or str(error)) from error
        for table, layout in zip(self.about["tables"], self.layouts, strict=True):
            try:
                with pq.ParquetFile(self.file(table["file"])) as rows:
                    held, schema = rows.metadata.num_rows, rows.schema_arrow
            except (OSError, pa.ArrowException) as error:
                raise _damaged(self.path, table["file"], str(error).partition("\n")[0]) from error
            if held != table["rows"] or not schema.equals(schema_of(layout.width, layout.state_width, "value" in schema.names)):
                raise _damaged(self.path, table["file"], f"its rows are not those that {ABOUT} describes")

    def has_values(self, table: int) -> bool:
        """Return whether the rows of a table have the values of a vocabulary."""
        return "value" in pq.read_schema(self.file(self.about["tables"][table]["file"])).names

    def rows(self, table: int) -> Iterator[ExportRows]:
        """Yield the rows of a table, by ascending id. The files must have been verified."""
        layout, has_values = self.layouts[table], self.has_values(table)
        columns = ["id", "weight", *(["state"] if layout.state_width else []), *(["value"] if has_values else [])]
        with pq.ParquetFile(self.file(self.about["tables"][table]["file"])) as file:
            for batch in file.iter_batches(GROUP_ROWS, columns=columns, use_threads=False):
                weights = batch.column("weight").flatten().to_numpy().reshape(-1, layout.width)
                state = np.empty((len(batch), 0), np.float32)
                if layout.state_width:
                    state = batch.column("state").flatten().to_numpy().reshape(-1, layout.state_width)
                yield ExportRows(batch.column("id").to_numpy(), weights, state, batch.column("value") if has_values else None)

    def check_next(self, where: str, step: int, state: str) -> None:
        """Check that this increment goes on from the export at `where`.

        Args:
            where: the place of that export, for errors.
            step: its step.
            state: its state.

        Raises:
            ExportError: this is not the next increment.
        """
        if self.since is None:
            raise ExportError(
                f"{self.what}, and {where} has one of step {step} already; apply a full export only where there is none yet"
            )
        since, since_state = self.since
        if since != step or self.step <= step:
            already = " already" if self.step <= step else ""
            raise ExportError(
                f"{self.what}, and {where} is at step {step}{already}; apply the increment that goes from step {step}"
            )
        if since_state is not None and since_state != state:
            raise ExportError(
                f"{self.what} of another training than {where}: at step {step} their dense parts differ; export from the same run"
            )


def check_same_model(name: str, manifest: Contents, other: OfModel, tables: Sequence[TableOfModel], where: str) -> None:
    """Check that a manifest is of the same model as the export at `where`.

    Args:
        name: the name of the manifest's export, for errors.
        other: the manifest of the export at `where`.
        tables: the tables of the export at `where`.
        where: the place of that export, for errors.

    Raises:
        ExportError: the models differ.
    """
    # A setting that only one of them has comes from another version of foreload. The setting had no
    # other value in the version that lacks it.
    mine = {key: value for key, value in manifest["settings"].items() if key in other["settings"]} | same_model(manifest)
    there = {**other["settings"], **same_model(other)}
    for key, value in mine.items():
        if value != there[key]:
            raise ExportError(f"{name}: is of another model than {where}: {key} must be {there[key]!r}, as there; got {value!r}")
    if list(map(same_table, manifest["tables"])) != list(map(same_table, tables)):
        raise ExportError(f"{name}: is of another model than {where}: its tables must be those there; got others")


def check_rows(export: Export, table: int, rows: int, where: str) -> None:
    """Check the number of rows of a table after an increment is applied.

    Args:
        export: the increment.
        table: the number of the table.
        rows: the number of rows that the table would have.
        where: the place of the export that the increment is applied to, for errors.

    Raises:
        ExportError: the model has another number of rows.
    """
    entry = export.about["tables"][table]
    if entry["whole_rows"] != rows:
        raise ExportError(
            f"{export.what} of another training than {where}: table {entry['name']} must have {entry['whole_rows']} rows then, and would "
            f"have {rows}; export from the same run"
        )


def _damaged(path: Path, name: str, why: Exception | str) -> ExportError:
    return ExportError(fault(f"{path}: {name}", why, "export it again, or use a copy"))
