"""The manifest of a checkpoint on disk (docs/checkpoints.md, The format), and queries on it.

This module does not import torch: `train` reads its settings from a checkpoint before it imports
torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from foreload.base.codec import MOST, Amount, Count, FormError, JsonForm, Name, Step, between, fault, of_json, to_stored
from foreload.base.files import sealed, unsealed, within
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.samples.features import FeatureSpec, StoredFeatures
from foreload.trainer.checkpoints.files import EXACT_BITS, FileEntry, RowFile
from foreload.trainer.errors import CheckpointError, CheckpointUnreachable
from foreload.trainer.run.directory import CODE
from foreload.trainer.run.manifest import Inexact, Manifest
from foreload.trainer.storage import AnyFolder, ObjectPath, chunks, holds, place, write_whole

FORMAT: Literal[1] = 1
MANIFEST, DENSE = "checkpoint.json", "dense.safetensors"

_ELSEWHERE: dict[str, Any] = {"store_urls": [], "local_stores": None}
"""The fields of a run's manifest that locate its rows, which a checkpoint omits.

Reading a checkpoint's manifest fills in these values.
"""


def _run_stored(run: Manifest) -> dict[str, Any]:
    return {name: value for name, value in to_stored(run).items() if name not in _ELSEWHERE}


def _run_of(stored: dict[str, Any]) -> Manifest:
    return of_json(_ELSEWHERE | stored, Manifest)


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that an increment builds on.

    Attributes:
        name: Its folder, which lies beside the increment's.
        sha256: The SHA-256 of its manifest.
    """

    name: Name
    sha256: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint's manifest says.

    Attributes:
        step: The last step trained, from the run's status.
        state: From the run's status.
        totals: From the run's status.
        run: The run's manifest, without the fields that say where its rows are.
        tables: The tables' layouts, in order.
        ordinals: How many ordinals each lane has given in each table.
        rows: The files of rows. Each holds rows of one lane and table, by ordinal.
        dense: The file of the dense part and its optimizer.
        features: From the header of the run's last schedule.
        encoding: The identity of that schedule's encoding state. None if it has none.
        base: The base of an increment, which holds only the rows changed since. If None, the
            checkpoint has all rows.
        sizes: The sizes of the increments since the last checkpoint with all rows, this one last.
            Each is the increment's rows as a fraction of all rows that existed then.
        inexact: How inexact a run is that has the rows as they are read from here, bases included.
            None if it is exact.
    """

    step: Step
    state: Literal["stopped", "ended"]
    totals: dict[str, Amount]
    run: Annotated[Manifest, JsonForm(dict[str, Any], _run_stored, _run_of)]
    tables: tuple[RowLayout, ...]
    ordinals: tuple[tuple[Count, ...], ...]
    rows: tuple[RowFile, ...]
    dense: FileEntry
    features: StoredFeatures
    encoding: str | None
    base: Base | None = None
    sizes: tuple[Annotated[float, between(0, MOST)], ...] = ()
    inexact: Inexact | None = None
    format: Literal[1] = FORMAT

    def __post_init__(self) -> None:
        lanes, tables = self.run.lanes, len(self.tables)
        numbered = [table.table for table in self.tables] == list(range(tables))
        if not numbered or [len(lane) for lane in self.ordinals] != [tables] * lanes:
            raise CheckpointError(f"ordinals: must cover {lanes} lanes and {tables} tables, numbered in order")
        held: Counter[tuple[int, int]] = Counter()
        for file in self.rows:
            in_model = file.lane < lanes and file.table < tables and file.last < self.ordinals[file.lane][file.table]
            if not in_model or file.rows > file.last - file.first + 1:
                raise CheckpointError(f"rows: {file.name} must have only ordinals of the model, each once")
            held[file.lane, file.table] += file.rows
        counted = tuple(tuple(held[lane, table] for table in range(tables)) for lane in range(lanes))
        if self.base is None and counted != self.ordinals:
            raise CheckpointError("rows: must include every row of the model")
        if [table.name for table in self.features.tables] != [table.name for table in self.tables]:
            raise CheckpointError("features: must match the tables")

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files except the manifest."""
        return (*self.rows, self.dense)

    @property
    def row_count(self) -> int:
        """The number of rows of the model, in all tables, including those in bases."""
        return sum(map(sum, self.ordinals))

    def write(self, folder: AnyFolder) -> bytes:
        """Write the manifest into the checkpoint's folder, durably, and return its bytes.

        The caller writes the manifest last. Raises OSError and CheckpointUnreachable.
        """
        data = sealed(to_stored(self))
        write_whole(folder / MANIFEST, data)
        return data

    @classmethod
    def made(
        cls,
        run: Manifest,
        features: FeatureSpec,
        encoding: str | None,
        step: int,
        totals: Mapping[str, float],
        tables: Sequence[RowLayout],
        ordinals: np.ndarray,
        rows: Sequence[RowFile],
        dense: FileEntry,
        base: Checkpoint | None = None,
        sizes: Sequence[float] = (),
    ) -> Contents:
        """Build the manifest for files that were written, in any order, after a step of a run.

        Args:
            run: The run's manifest.
            features: As the attribute.
            encoding: As the attribute.
            step: The last step trained.
            totals: As the attribute.
            tables: The tables' layouts, in order.
            ordinals: int64 [lanes, tables].
            rows: The files of rows, in any order.
            dense: The file of the dense part.
            base: The base of an increment. If None, the files have all rows.
            sizes: The sizes of the increments before this one, as the attribute.
        """
        bits = min([file.bits for file in rows] + ([EXACT_BITS] if base is None else [base.bits]))
        inexact = run.inexact
        if bits < EXACT_BITS:
            inexact = (
                Inexact(step, bits, 0) if inexact is None else Inexact(inexact.since, min(inexact.bits, bits), inexact.restores)
            )
        size = sum(file.rows for file in rows) / max(int(ordinals.sum()), 1)
        return cls(
            step=step,
            # The status cannot be asked: that of a crashed run, whose rows may still be those of
            # its last clean stop, no longer says whether the run had stopped or ended there.
            state="ended" if step == run.stages[-1].end_step - 1 else "stopped",
            totals=dict(totals),
            run=run,
            tables=tuple(tables),
            ordinals=tuple(tuple(lane) for lane in ordinals.tolist()),
            rows=tuple(sorted(rows, key=lambda file: (file.table, file.first, file.lane))),
            dense=dense,
            features=features,
            encoding=encoding,
            base=None if base is None else Base(base.place.name, base.sha256),
            sizes=() if base is None else (*sizes, size),
            inexact=inexact,
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is complete as far as the manifests of its chain show.

    Attributes:
        place: Its folder.
        contents: What its manifest says.
        sha256: The SHA-256 of its manifest.
        base: The checkpoint that it is an increment of. None if it has all rows.
    """

    place: AnyFolder
    contents: Contents
    sha256: str
    base: Checkpoint | None

    @classmethod
    def open(cls, path: AnyFolder | str, known: Mapping[str, Checkpoint] | None = None) -> Checkpoint:
        """Open the checkpoint in a folder, together with the checkpoints that it needs.

        Args:
            path: The folder, or its URL.
            known: Checkpoints that were opened a moment ago, by the SHA-256 of their manifests.
                These manifests are not read again.

        Raises:
            CheckpointError: The folder has no readable manifest, or a base is missing, was
                replaced, or does not fit.
        """
        folder, opened = place(path), None
        read = [(folder, *_contents(folder))]
        while (base := read[-1][1].base) is not None:
            # The base is next to the real folder of its increment, even if the caller's path is a
            # link.
            folder = read[-1][0].resolve().parent / base.name
            opened = (known or {}).get(base.sha256)
            if opened is not None and opened.place.resolve() == folder:
                break
            opened = None
            needed = f"checkpoint {read[-1][0]}: is an increment of {folder}"
            if not (folder / MANIFEST).is_file():
                raise CheckpointError(f"{needed}, which does not exist; put it back, or use another checkpoint")
            contents, sha256 = _contents(folder)
            if sha256 != base.sha256:
                raise CheckpointError(
                    f"{needed}, which is now a different checkpoint; put the right one back, or use another checkpoint"
                )
            if contents.tables != read[-1][1].tables or contents.run.lanes != read[-1][1].run.lanes:
                raise CheckpointError(f"{needed}, which has other tables or lanes; use another checkpoint")
            read.append((folder, contents, sha256))
        checkpoint = opened
        for one in reversed(read):
            checkpoint = cls(*one, checkpoint)
        assert checkpoint is not None
        return checkpoint

    @property
    def path(self) -> Path:
        """The folder of a local checkpoint."""
        assert isinstance(self.place, Path), self.place
        return self.place

    @property
    def chain(self) -> tuple[Checkpoint, ...]:
        """This checkpoint, its base, and so on, down to the checkpoint with all rows."""
        chain = [self]
        while (base := chain[-1].base) is not None:
            chain.append(base)
        return tuple(chain)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The checkpoint's own files, without the manifest."""
        return self.contents.files

    def at(self, file: FileEntry) -> AnyFolder:
        """Return the location of one of its own files.

        Raises CheckpointError if a link leads that path out of the folder.
        """
        if isinstance(self.place, ObjectPath):
            return self.place / file.name
        try:
            return within(self.place, file.name)
        except FormError as error:
            raise damaged(self.place, MANIFEST, error) from error

    @property
    def bits(self) -> int:
        """The fewest bits of any weight in the chain."""
        return min([file.bits for one in self.chain for file in one.contents.rows], default=EXACT_BITS)

    @property
    def row_count(self) -> int:
        """The number of rows of the model, in all tables."""
        return self.contents.row_count

    @property
    def rows_here(self) -> int:
        """The number of rows in its own files."""
        return sum(file.rows for file in self.contents.rows)

    @property
    def own_bytes(self) -> int:
        """The bytes of its own files, without the manifest."""
        return sum(file.bytes for file in self.files)

    @property
    def total_bytes(self) -> int:
        """The bytes of the files of the whole chain, without the manifests."""
        return sum(one.own_bytes for one in self.chain)

    def verify(self, on_bytes: Callable[[int], object] = lambda count: None) -> None:
        """Read every file of the chain, and compare its size and checksum with the manifest's.

        Args:
            on_bytes: Called with the number of bytes just read; they add up to `total_bytes`.

        Raises:
            CheckpointError: Files are damaged. The message names up to six of them.
        """
        wrong = [(one, file.name, why) for one in self.chain for file in one.files if (why := one._why_damaged(file, on_bytes))]
        if wrong:
            first, name, why = wrong[0]
            more = ", ".join(name if one is first else f"{one.place.name}/{name}" for one, name, _ in wrong[1:6])
            raise damaged(first.place, name, f"{why}, and {len(wrong) - 1} more: {more}" if more else why)

    def _why_damaged(self, file: FileEntry, on_bytes: Callable[[int], object]) -> str:
        """Describe what is wrong with a file; return "" if it is as it was written."""
        checksum, size = hashlib.sha256(), 0
        try:
            for chunk in chunks(self.at(file)):
                checksum.update(chunk)
                size += len(chunk)
                on_bytes(len(chunk))
        except OSError as error:
            return error.strerror or str(error)
        if size != file.bytes:
            return f"has {size} bytes instead of {file.bytes}"
        return "" if checksum.hexdigest() == file.sha256 else "its checksum does not match the manifest"

    @property
    def files_there(self) -> bool:
        """Whether every file of the chain exists and has its size; no file is read."""
        return all(holds(one.place, {file.name: file.bytes for file in one.files}) for one in self.chain)

    def read(self, file: FileEntry) -> bytes:
        """Read one of its own files, and compare its checksum. Raises CheckpointError."""
        try:
            data = self.at(file).read_bytes()
        except OSError as error:
            raise damaged(self.place, file.name, error.strerror or str(error)) from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise damaged(self.place, file.name, "its checksum does not match the manifest")
        return data

    @property
    def code_copy(self) -> str:
        """Where a copy of the model's code is, for messages.

        A local checkpoint has the code in files of its own; in an object store only the manifest
        has it.
        """
        return str(self.place / (CODE if self.is_local else MANIFEST))

    @property
    def is_local(self) -> bool:
        """Whether its files are in a local folder, and can be read without being fetched."""
        return isinstance(self.place, Path)

    @contextlib.contextmanager
    def local_dense(self) -> Iterator[Path]:
        """Yield the path of a local file with the dense part.

        For a checkpoint in an object store, that is a temporary copy, which was compared with the
        manifest and exists while the context lasts. Raises CheckpointError.
        """
        if isinstance(self.place, Path):
            yield Path(str(self.at(self.contents.dense)))
            return
        with tempfile.NamedTemporaryFile(prefix="foreload-") as copy:
            copy.write(self.read(self.contents.dense))
            copy.flush()
            yield Path(copy.name)

    @property
    def is_mappable(self) -> bool:
        """Whether its files can be mapped: they are local and have all rows, none rounded."""
        return (
            self.is_local
            and all(file.name.endswith(".arrow") for one in self.chain for file in one.contents.rows)
            and self.base is None
        )


def _manifest(path: AnyFolder) -> tuple[dict[str, Any], str]:
    """Read a checkpoint's manifest; return its JSON object and its SHA-256.

    Raises CheckpointError.
    """
    try:
        stored, sha256 = unsealed((path / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"checkpoint {path}: has no {MANIFEST}, so it is not a checkpoint, or was never finished; "
            "give a folder that `foreload checkpoint save` wrote"
        ) from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot read {MANIFEST}: {error.strerror}; make it readable") from error
    except ValueError as error:
        raise damaged(path, MANIFEST, error) from error
    if stored.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path}: its format must be {FORMAT}; got {stored.get('format')!r:.100}; use the foreload that wrote it"
        )
    return stored, sha256


def _contents(path: AnyFolder) -> tuple[Contents, str]:
    stored, sha256 = _manifest(path)
    try:
        return of_json(stored, Contents), sha256
    except FormError as error:
        raise damaged(path, MANIFEST, error) from error


def bases_in(folder: AnyFolder) -> dict[str, str | None]:
    """Return the name of each checkpoint in a folder with its base's name, or None, by step.

    Checkpoints whose manifests are damaged are left out. Raises OSError, and CheckpointUnreachable.
    """
    bases: dict[str, str | None] = {}
    for path in checkpoints_in(folder):
        try:
            base = _manifest(path)[0]["base"]
            bases[path.name] = None if base is None else str(base["name"])
        # A store that does not answer must not make a checkpoint look as if it had no base.
        except CheckpointUnreachable:
            raise
        except (CheckpointError, KeyError, TypeError):
            continue
    return bases


def run_of(path: AnyFolder) -> str | None:
    """Return the id of the run that a checkpoint belongs to; None if its manifest is damaged.

    Raises CheckpointUnreachable.
    """
    try:
        return _contents(path)[0].run.run_id
    except CheckpointUnreachable:
        raise
    except CheckpointError:
        return None


def checkpoints_in(folder: AnyFolder) -> Iterator[AnyFolder]:
    """Yield the folders in a folder that have a checkpoint's manifest, by step, then by name.

    Raises OSError.
    """
    paths = [path for path in folder.iterdir() if not path.name.startswith(".") and (path / MANIFEST).is_file()]
    # Step numbers have no leading zeros, so the shorter name has the lower step.
    yield from sorted(paths, key=lambda path: (len(path.name), path.name))


def damaged(path: AnyFolder, name: str, why: Exception | str) -> CheckpointError:
    """Return the error for a damaged file of a checkpoint.

    Args:
        path: The checkpoint's folder.
        name: The file.
        why: What is wrong with it.
    """
    return CheckpointError(fault(f"checkpoint {path}: {name}", why, "use another checkpoint, or a copy of this one"))
