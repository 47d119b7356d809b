"""Apply exports to a folder of Parquet files, in the format of a full export.

If the process is killed, the folder holds either the old export or the new one, complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from foreload.base.files import is_full, remove_unfinished, replacing
from foreload.pipelines.schedule.at_work import at_work
from foreload.trainer.errors import ExportError
from foreload.trainer.serving.format import (
    ABOUT,
    BUFFERS,
    DENSE_STATE,
    ENCODING,
    MODEL,
    About,
    Export,
    ExportRows,
    TableWriter,
    check_rows,
    check_same_model,
    write_about,
)

_AT_WORKING_FOLDER, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_STEP = "step-"  # the prefix of a kept version's name


def apply_to_folder(export: Export, folder: Path, keep: int) -> tuple[int, list[str]]:
    """Apply an export to a folder.

    A full export is applied if the folder does not exist. An increment is applied to the full
    export of its predecessor's step and state.

    Args:
        keep: the number of previous versions to keep, as step-N in the folder FOLDER.kept next to
            it.

    Returns:
        The number of rows of all tables, and the folders that are kept.

    Raises:
        ExportError: the export cannot be applied. Nothing has changed.
    """
    folder = folder.resolve()
    if export.since is not None and not folder.exists():
        raise ExportError(
            f"{export.what}, and there is nothing at {folder} yet; apply a full export of step {export.since[0]} first"
        )
    lock = folder.with_name(f".{folder.name}.applying")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with at_work(lock):
            # Remove the folders that a killed call left.
            remove_unfinished(folder.parent, f"{glob.escape(folder.name)}.{'[0-9a-f]' * 16}")
            there = export.since is not None or folder.exists()
            about = _apply_increment(export, folder, keep) if there else _copy_full(export, folder)
            kept = _prune(folder, keep)
    except BlockingIOError as error:
        raise ExportError(f"--to: something else is being applied to {folder} right now; wait for it") from error
    except OSError as error:
        why = "the disk is full; free space" if is_full(error) else f"{error.strerror or error}; make it writable"
        raise ExportError(f"--to: cannot write {folder}: {why}, or choose another folder") from error
    return sum(table["rows"] for table in about["tables"]), kept


def _copy_full(export: Export, folder: Path) -> About:
    export.verify()
    with replacing(folder, durable=True) as temporary:
        temporary.mkdir()
        for name in (*export.about["files"], ABOUT):
            shutil.copyfile(export.file(name), temporary / name)
            _sync(temporary / name)
    return export.about


def _apply_increment(export: Export, folder: Path, keep: int) -> About:
    before = Export.open(folder)
    if before.since is not None:
        raise ExportError(f"--to: {before.what}, so it is an increment, and cannot be served; name the folder of a full export")
    check_same_model(str(export.path), export.about, before.about, before.about["tables"], str(folder))
    export.check_next(str(folder), before.step, before.state)
    export.verify()
    before.verify()
    _check_exchange(folder)
    # The exchange comes last. Until then the folder holds the old export, and afterwards the new
    # one.
    with _made_beside(folder) as temporary:
        about = _write(before, export, temporary)
        if keep:
            _keep(before, kept_in(folder) / f"{_STEP}{before.step}")
        _exchange(temporary, folder)
    return about


@contextlib.contextmanager
def _made_beside(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to another one, and remove it on leaving the context.

    After an exchange the folder that is removed holds the old contents of the other one.
    """
    temporary = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(before: Export, export: Export, folder: Path) -> About:
    """Write a full export: `before`, updated with the rows and the dense part of an increment.

    Args:
        before: the full export.
        export: the increment.
        folder: the folder to write into.

    Returns:
        The manifest of the new export.

    Raises:
        ExportError: the increment does not fit the full export.
    """
    contents: About = {**export.about, "tables": [{**table} for table in export.about["tables"]]}
    contents.pop("since", None)
    for name in (MODEL, DENSE_STATE, *(name for name in (ENCODING, BUFFERS) if name in export.about["files"])):
        shutil.copyfile(export.file(name), folder / name)
    for table, (layout, entry) in enumerate(zip(export.layouts, contents["tables"], strict=True)):
        has_values = before.has_values(table)
        if has_values != export.has_values(table):
            raise ExportError(
                f"{export.path}: the rows of table {layout.name} must have values if those of {before.path} have them, and only then"
            )
        entry.pop("whole_rows", None)
        # A table without changed rows is linked and not written again.
        if not entry["rows"]:
            _link(before.file(before.about["tables"][table]["file"]), folder / entry["file"])
            entry["rows"] = before.about["tables"][table]["rows"]
        else:
            with TableWriter(folder / entry["file"], layout, has_values) as writer:
                for rows in merged(before.rows(table), export.rows(table)):
                    writer.add(rows)
            entry["rows"] = writer.rows
        check_rows(export, table, entry["rows"], str(before.path))
    return write_about(folder, contents)


def merged(before: Iterator[ExportRows], changes: Iterator[ExportRows]) -> Iterator[ExportRows]:
    """Merge rows of two sources, by ascending id.

    If both sources have a row, the one of `changes` is used. One batch of each source is in memory
    at a time.
    """
    before, changes = (filter(len, source) for source in (before, changes))
    waiting = next(changes, None)
    for rows in before:
        among = [rows]
        while waiting is not None:
            due = int(np.searchsorted(waiting.ids, rows.ids[-1], side="right"))
            among.append(_part(waiting, slice(0, due)))
            if due < len(waiting):
                waiting = _part(waiting, slice(due, len(waiting)))
                break
            waiting = next(changes, None)
        yield _latest(among)
    while waiting is not None:
        yield waiting
        waiting = next(changes, None)


def _part(rows: ExportRows, which: slice) -> ExportRows:
    values = None if rows.values is None else rows.values[which]
    return ExportRows(rows.ids[which], rows.weights[which], rows.state[which], values)


def _latest(among: list[ExportRows]) -> ExportRows:
    """Return the rows of several pieces by ascending id.

    If several pieces have a row, that of the last piece is used.
    """
    ids = np.concatenate([rows.ids for rows in among])
    # The sort is stable, so of equal ids the one of the last piece comes last.
    order = np.argsort(ids, kind="stable")
    last = np.append(ids[order][1:] != ids[order][:-1], True)
    chosen = order[last]
    values = None
    if among[0].values is not None:
        values = pa.concat_arrays([rows.values for rows in among]).take(pa.array(chosen))
    weights, state = (
        np.concatenate(parts)[chosen] for parts in ([rows.weights for rows in among], [rows.state for rows in among])
    )
    return ExportRows(ids[chosen], weights, state, values)


# -- The exchange of folders -----------------------------------------------------------------------


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders atomically. At every moment both names exist.

    Raises:
        OSError: the file system cannot exchange folders.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(other))
    if rename(_AT_WORKING_FOLDER, os.fsencode(one), _AT_WORKING_FOLDER, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))
    for folder in {one.parent, other.parent}:
        _sync(folder)


def _check_exchange(folder: Path) -> None:
    """Check, before anything is written, that folders next to this one can be exchanged.

    Raises:
        ExportError: they cannot.
    """
    with _made_beside(folder) as one, _made_beside(folder) as other:
        try:
            _exchange(one, other)
        except OSError as error:
            raise ExportError(
                f"--to: the file system of {folder.parent} cannot swap two folders at once ({error.strerror}); use a local one"
            ) from error


def kept_in(folder: Path) -> Path:
    """Return the folder in which previous versions of a folder are kept."""
    return folder.with_name(f"{folder.name}.kept")


def _keep(export: Export, folder: Path) -> None:
    """Put an export into a further folder, with links to its files where possible."""
    if folder.exists():
        # A call that was killed left it.
        return
    folder.parent.mkdir(exist_ok=True)
    with replacing(folder, durable=True) as temporary:
        temporary.mkdir()
        for name in (*export.about["files"], ABOUT):
            _link(export.file(name), temporary / name)


def _prune(folder: Path, keep: int) -> list[str]:
    """Delete the kept versions except for the newest `keep`.

    Returns:
        The paths of the versions that remain, the newest first.
    """
    if not kept_in(folder).exists():
        return []
    remove_unfinished(kept_in(folder))
    kept = sorted(kept_in(folder).glob(f"{_STEP}*"), key=lambda path: -int(path.name.removeprefix(_STEP)))
    for path in kept[keep:]:
        going = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.tmp")
        path.rename(going)
        shutil.rmtree(going)
    return [str(path) for path in kept[:keep]]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # The file system has no links, or does not allow further links to this file.
        shutil.copyfile(source, target)
        _sync(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
